"""Observations of the critic only: updates, policies without these keys, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from short_runs import short_run
from torch import nn
from update_problems import (
    BOX,
    B,
    N,
    T,
    compare,
    make_model,
    make_rollout,
    normal,
    random_obs,
    with_others,
)

from maze_train import ConfigError, ModelConfig, load_policy
from maze_train.core.targets import TARGET, InlineObject
from maze_train.nets.acting import Actor
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ObservationNormalizationConfig, RecurrentConfig
from maze_train.nets.policy_model import build_policy
from maze_train.spaces.agents import AgentSpaces
from maze_train.training.multi_agent_models import build_joint_model

if TYPE_CHECKING:
    from pathlib import Path

RUNNING = ObservationNormalizationConfig(mode="running")
SIMULATOR = spaces.Dict({"mass": BOX, "ground": spaces.Dict({"rough": BOX, "kind": BOX})})
SEEN = spaces.Dict({"camera": BOX, "gear": spaces.Discrete(3), "known": SIMULATOR})
HAND = spaces.Box(-1.0, 1.0, (2,), np.float64)
ENV = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict"}}
"""Environment with the observations `place` and `speed`."""


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "impala"])
@pytest.mark.parametrize("memory", [False, True])
def test_updates_match_the_reference(algorithm: str, memory: bool) -> None:
    """Updates match the reference if the critic reads more than the policy, also with an RNN."""
    settings: dict[str, Any] = {"rnn": RecurrentConfig(cell="gru", size=4)} if memory else {}
    space = spaces.Dict({"camera": BOX, "mass": BOX})
    model = make_model(space, HAND, critic_obs=["mass"], normalization=RUNNING, **settings)
    model.normalizer.update({"camera": 2.0 * normal(9, 4), "mass": normal(9, 4, seed=2) - 1.0})
    rollout = make_rollout(space, HAND)
    if memory:
        states = torch.zeros(T + 1, B, model.state_size)
        for t in range(T):
            obs = {key: leaf[t] for key, leaf in rollout.obs.items()}
            with torch.no_grad():
                _, after = model.policy_step(obs, states[t])
            states[t + 1] = torch.where(rollout.end[t].bool().unsqueeze(1), 0.0, after)
        rollout = replace(rollout, hidden_states=states, log_probs=normal(T, B) - 1.5)
    else:
        rollout = with_others(model, rollout)
    _, ratios = compare(algorithm, (model, rollout, HAND))
    assert len(ratios) == N


@pytest.mark.parametrize(
    ("named", "hidden"),
    [
        (["known"], ["known/ground/kind", "known/ground/rough", "known/mass"]),
        (["known/ground", "gear"], ["gear", "known/ground/kind", "known/ground/rough"]),
        (["known/mass", "known"], ["known/ground/kind", "known/ground/rough", "known/mass"]),
    ],
)
def test_policy_does_not_read_critic_keys(named: list[str], hidden: list[str]) -> None:
    """The policy ignores the critic's keys and does not need them; the values depend on them."""
    config = ModelConfig(hidden_sizes=[8], critic_obs=named, normalization=RUNNING)
    model = build_actor_critic(config, SEEN, HAND, seed=1)
    assert sorted(model.critic_keys) == hidden
    obs = random_obs(build_space(), (5,), torch.Generator().manual_seed(1))
    assert model.normalizer is not None
    model.normalizer.update(obs)
    params, values = model.policy_params(obs), model.values(obs)
    few = {key: leaf for key, leaf in obs.items() if key not in hidden}
    assert torch.equal(model.policy_params(few), params)
    alone = build_policy(config, SEEN, HAND, seed=1)
    alone.load_state_dict({k: v for k, v in model.state_dict().items() if "critic" not in k})
    assert torch.equal(alone.policy_params(few), params)
    for key in hidden:
        moved = model.values({**obs, key: obs[key].roll(1, 0)})
        assert not torch.allclose(moved, values)
    with pytest.raises(KeyError):
        model.values(few)


class Joined(nn.Module):
    """Network that concatenates all its inputs."""

    def __init__(self, observation_space: spaces.Dict, output_size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4 * len(observation_space), output_size)

    def forward(self, obs: dict[str, torch.Tensor]) -> Any:
        return self.layer(torch.cat(list(obs.values()), dim=-1).float())


def test_custom_networks_get_the_observations_of_their_role() -> None:
    """Custom networks get only the spaces and observations of their role."""
    space = spaces.Dict({"camera": BOX, "mass": BOX})
    own: dict[str, Any] = {TARGET: InlineObject(Joined)}
    config = ModelConfig(policy=own, critic=own, critic_obs=["mass"])
    model: Any = build_actor_critic(config, space, HAND, seed=0)
    obs = random_obs(space, (3,), torch.Generator().manual_seed(0))
    assert model.policy.net.layer.in_features == 4
    assert model.critic.layer.in_features == 8
    assert model.policy_params(obs).shape == (3, 4)
    assert model.values(obs).shape == (3,)


def build_space() -> Any:
    """Return the flat observation space."""
    ground = {"known/ground/kind": BOX, "known/ground/rough": BOX, "known/mass": BOX}
    return spaces.Dict({"camera": BOX, "gear": spaces.Discrete(3), **ground})


def test_critic_obs_names_keys_of_each_agent() -> None:
    """`critic_obs` names keys of each agent's observation."""
    several = AgentSpaces({"a": SEEN, "b": SEEN}, dict.fromkeys("ab", spaces.Discrete(2)))
    config = ModelConfig(hidden_sizes=[8], critic_obs=["known"])
    joint: Any = build_joint_model(build_actor_critic, config, several, {}, 0)
    generator = torch.Generator().manual_seed(0)
    obs = {
        f"agents/{a}/{k}": x
        for a in "ab"
        for k, x in random_obs(build_space(), (5,), generator).items()
    }
    obs["acts"] = torch.ones(5, 2)
    actor = Actor(joint, 5)
    params = actor.act(obs, None, True).params
    changed = {key: leaf + 1 if "known" in key else leaf for key, leaf in obs.items()}
    assert torch.equal(actor.act(changed, None, True).params, params)
    changed["agents/b/camera"] = obs["agents/b/camera"] + 1
    assert not torch.equal(actor.act(changed, None, True).params, params)


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_run_with_critic_obs_acts_without_its_keys(tmp_path: Path, algorithm: str) -> None:
    """The policy acts without the critic's keys; other missing keys raise an error."""
    short_run(tmp_path / "run", algorithm, **{"env": ENV, "model.critic_obs": ["speed"]})
    policy = load_policy(tmp_path / "run")
    full = policy.observation_space.sample()
    action = policy.act({"place": full["place"]})
    assert policy.action_space.contains(action)
    assert policy.act(full) == action
    assert policy.probabilities({"place": np.array([0, 1])}).shape == (2, 3)
    assert isinstance(policy.values(full), float)
    with pytest.raises(Exception, match="the leaf 'speed' is missing"):
        policy.values({"place": full["place"]})
    with pytest.raises(Exception, match="the leaf 'place' is missing"):
        policy.act({"speed": full["speed"]})


@pytest.mark.parametrize(
    ("space", "named", "told"),
    [
        (SEEN, ["knwon"], r"'knwon': expected keys .*'known/ground/kind'.*"),
        (SEEN, ["know"], r"'know': expected keys of the observation space"),
        (SEEN, ["camera", "gear", "known"], r"no observation is left for the policy"),
        (BOX, ["critic"], r"'critic': the observation space has no keys"),
    ],
)
def test_unknown_critic_keys_raise(space: Any, named: list[str], told: str) -> None:
    """The error contains the setting and the available keys."""
    with pytest.raises(ConfigError, match=rf"^model\.critic_obs = .*{told}"):
        build_actor_critic(ModelConfig(critic_obs=named), space, HAND, seed=0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"shared_trunk": True}, r"shared_trunk = True: .*the critic shares no layers"),
        ({"centralized_critic": True}, r"critic_obs = \['speed'\]: a centralised critic"),
    ],
)
def test_critic_obs_with_trunk_or_centralized_critic_raises(
    settings: dict[str, Any], told: str
) -> None:
    """`critic_obs` does not support a shared trunk or a centralised critic."""
    with pytest.raises(ConfigError, match=told):
        ModelConfig(critic_obs=["speed"], **settings)
