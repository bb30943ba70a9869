"""Training that starts from the policy of an earlier run: BC, then reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
import torch
from own_envs import SpacesEnv
from recorded import record
from short_runs import ALGORITHMS, SMALL, settings

from maze_train import load_policy, train
from maze_train.errors import ConfigError
from maze_train.runners.base_policy import take_over

if TYPE_CHECKING:
    from pathlib import Path

NETS: dict[str, Any] = {
    "model.hidden_sizes": [8],
    "model.activation": "relu",
    "model.orthogonal_init": False,
}
SQUASHED: dict[str, Any] = {"model.distributions": {"Box": "squashed_gaussian"}}
QUIET: dict[str, Any] = {
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
    "seed": 3,
}
IMPALA: dict[str, Any] = {
    "algorithm": "impala",
    "algorithm.epoch_length": 2,
    "algorithm.num_actors": 2,
    "algorithm.actors_batch_size": 1,
}
ES: dict[str, Any] = {
    "algorithm": "es",
    "algorithm.epoch_length": 1,
    "algorithm.n_rollouts_per_update": 2,
    "algorithm.noise_table_size": 5000,
}
NEXT = {**ALGORITHMS, "impala": IMPALA}


def cloned(tmp_path: Path, action: str = "discrete", name: str = "bc", **changes: Any) -> Path:
    """The directory of a run of behavioral cloning."""
    data = tmp_path / f"data-{action}"
    if not data.exists():
        record(data, SpacesEnv(action=action))
    given = {"runner.dataset": str(data), "algorithm.n_epochs": 3, "algorithm.batch_size": 16}
    train(
        algorithm="bc",
        **{**given, "run_dir": tmp_path / name, **NETS, **QUIET, **changes},
    )
    return tmp_path / name


def continued(tmp_path: Path, base: Path, algorithm: str, **changes: Any) -> Any:
    """A run of another algorithm that starts from a base, and makes no update that counts."""
    given = {
        "env": {"_target_": "own_envs.SpacesEnv"},
        **SMALL,
        **NEXT[algorithm],
        **NETS,
        "base_run": str(base),
        "run_dir": tmp_path / "next",
        **changes,
    }
    return train(**given)


def policy_weights(run_dir: Path, name: str = "best") -> dict[str, torch.Tensor]:
    """Weights of the policy alone."""
    weights = torch.load(run_dir / name / "policy.pt")
    return {k: v for k, v in weights.items() if k.startswith(("policy.", "normalizer."))}


@pytest.mark.parametrize("algorithm", sorted(NEXT))
def test_weights_are_those_of_the_base(tmp_path, algorithm):
    """With a learning rate that moves nothing, the policy is the base's to the bit."""
    action = "box" if algorithm == "sac" else "discrete"
    base = cloned(tmp_path, action, **(SQUASHED if action == "box" else {}))
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": action}}
    still = {"algorithm.lr": 1e-30, "total_steps": 64}
    continued(tmp_path, base, algorithm, env=env, **still)
    before, after = policy_weights(base), policy_weights(tmp_path / "next")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_statistics_of_observations_go_along(tmp_path):
    """The policy sees observations as it did, and statistics go on from there."""
    normalised = {"model.normalization.mode": "running", "model.normalization.n_steps": 16}
    base = cloned(tmp_path, **normalised)
    still = {"algorithm.lr": 1e-30, "total_steps": 32}
    continued(tmp_path, base, "ppo", **normalised, **still)
    before, after = policy_weights(base), policy_weights(tmp_path / "next")
    assert float(before["normalizer.count"]) == 40
    assert float(after["normalizer.count"]) > 40


def test_networks_that_do_not_fit(tmp_path):
    """What differs is named, and how to make it fit; nothing has been written."""
    base = cloned(tmp_path)
    with pytest.raises(ConfigError) as caught:
        continued(tmp_path, base, "ppo", **{"model.hidden_sizes": [9]})
    text = str(caught.value)
    assert "base_run" in text
    assert "[8] there, [9] here" in text
    assert "model.hidden_sizes" in text
    assert not (tmp_path / "next").exists()
    with pytest.raises(ConfigError, match=r"normalizer\.count: nothing there, \[\] here"):
        continued(tmp_path, base, "ppo", **{"model.normalization.mode": "running"})


def test_other_spaces(tmp_path):
    """A policy for other actions is refused by its spaces, not by its weights."""
    base = cloned(tmp_path, "box")
    with pytest.raises(ConfigError, match="its policy has the action space"):
        continued(tmp_path, base, "ppo")


def test_no_policy_there(tmp_path):
    """A directory without a policy, and one that does not exist."""
    for name in (".", "nowhere"):
        with pytest.raises(ConfigError, match=r"base_run.*holds no saved policy"):
            continued(tmp_path, tmp_path / name, "ppo")


def test_critics_are_taken_over_where_there_is_one(tmp_path):
    """From PPO to PPO everything goes along; from BC the critic stays as it was made."""
    model = load_policy(cloned(tmp_path)).model
    spaces = (SpacesEnv().observation_space, SpacesEnv().action_space)
    own = settings(**ALGORITHMS["ppo"])
    train(**{**own, **NETS, "run_dir": tmp_path / "ppo"})
    target = load_policy(tmp_path / "ppo").model
    assert take_over(str(tmp_path / "ppo"), target, spaces) == ["policy", "critic"]
    critic = {k: v.clone() for k, v in target.critic.state_dict().items()}
    assert take_over(str(tmp_path / "bc"), target, spaces) == ["policy"]
    assert all(torch.equal(critic[k], v) for k, v in target.critic.state_dict().items())
    own_policy, taken = model.policy.state_dict(), target.policy.state_dict()
    assert all(torch.equal(own_policy[key], taken[key]) for key in own_policy)


def test_a_continued_run_does_not_need_its_base(tmp_path):
    """Its checkpoint has everything; the base may be gone."""
    import shutil

    base = cloned(tmp_path)
    continued(tmp_path, base, "ppo", total_steps=64)
    shutil.rmtree(base)
    result = train(resume=tmp_path / "next", total_steps=128)
    assert result.summary.env_steps >= 128


def test_evolution_starts_from_it_too(tmp_path):
    """What its members perturb are the weights of the base."""
    base = cloned(tmp_path)
    own = {**settings(), **ES, **NETS, "algorithm.noise_stddev": 1e-30, "algorithm.lr": 1e-30}
    own = {
        k: v
        for k, v in own.items()
        if k not in ("algorithm.n_rollout_steps", "algorithm.batch_size")
    }
    given = {**own, "base_run": str(base), "run_dir": tmp_path / "next", "total_steps": 10}
    train(**{**given, "algorithm.l2_penalty": 0.0})
    before, after = policy_weights(base), policy_weights(tmp_path / "next")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_demonstrations_from_a_data_set(tmp_path):
    """SAC begins with recorded transitions in its buffer: `algorithm=sacfd`."""
    data = record(tmp_path / "data", gymnasium.make("Pendulum-v1"), n_episodes=4)
    given: dict[str, Any] = {
        "algorithm": "sacfd",
        "algorithm.initial_demonstration_trajectories": str(data),
        "algorithm.initial_buffer_size": 64,
        "algorithm.batch_size": 8,
        "algorithm.replay_buffer_size": 1000,
        "model.hidden_sizes": [8],
        "runner.concurrency": 2,
        "evaluation.n_episodes": 0,
        "total_steps": 40,
    }
    result = train(env="Pendulum-v1", run_dir=tmp_path / "run", **given, **QUIET)
    assert result.history[0]["train/gradient_steps"] > 0  # the buffer was full enough at once
    with pytest.raises(ConfigError, match="has the observation space"):
        train(env="MountainCarContinuous-v0", run_dir=tmp_path / "no", **given, **QUIET)
    del given["algorithm.initial_demonstration_trajectories"]
    with pytest.raises(ConfigError, match="initial_demonstration_trajectories"):
        train(env="Pendulum-v1", run_dir=tmp_path / "no", **given, **QUIET)
    assert np.isfinite(result.history[-1]["train/critic_loss"])
