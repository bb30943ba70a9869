"""Multi-agent runs: policies by id, and properties of every run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium.spaces import Box
from own_parts import OwnNet
from run_cases import HEAPS, RECURRENT, start
from short_runs import rows, settings, short_run, written_config

from maze_train import ConfigError, TrainingError, load_learner, load_policy, run_rollout, train
from maze_train.data.replay import PrioritizedReplayBuffer
from maze_train.spaces.agents import AgentSpaces
from maze_train.training.config import PolicyConfig
from maze_train.training.models import modules_of
from maze_train.training.multi_agent_models import check_id, policies_of_agents

pytestmark = pytest.mark.usefixtures("empty_directory")


def run(name: str, case: str, **more: Any) -> Any:
    """Run a multi-agent case for a few updates."""
    return start(f"agents: {case}", Path(name).absolute(), **more)


@pytest.mark.parametrize("case", everyday(1, ["ppo", "td3", "ppo, league"]))
def test_losses_by_policy_and_returns_by_agent_are_reported(case: str) -> None:
    """Losses are reported per policy, evaluation returns per agent."""
    run("run", case, **{"algorithm.n_epochs": 2})
    found = rows("run")[-1].keys()
    one = {name.split("/")[1] for name in found if re.match("train/.*_loss", name)}
    names = {"main", "judge"} if "league" in case else {"first", "referee"}
    assert one == ({"left", "right"} if case == "td3" else names)
    assert any(name.startswith("eval/") and name.count("/") == 2 for name in found)


@pytest.mark.parametrize(
    "more", everyday(1, [{}, {"runner": "local"}, {"runner.envs_per_actor": 1}])
)
def test_agent_infos_become_metrics(more: Any) -> None:
    """Infos are reported per agent and as means."""
    keys = {"tracking.info_keys": ["fuel", "a/fuel"]}
    env = {"_target_": "agent_envs.Fuelled"}
    told = short_run("run", "ppo", env=env, **keys, **more).history[-1]
    for prefix in ("train", "eval"):
        found = {name: told[f"{prefix}/{name}"] for name in ("success_rate", "info/fuel")}
        assert found == {"success_rate": 0.5, "info/fuel": 5.0}
        assert told[f"{prefix}/info/a/fuel"] == 7.0
        successes = [told[f"{prefix}/{agent}/success_rate"] for agent in ("a", "_a")]
        returns = [told[f"{prefix}/{agent}/episode_return_mean"] for agent in ("a", "_a")]
        assert (successes, returns) == ([1.0, 0.0], [2.0, 12.0])


@pytest.mark.parametrize("case", everyday(1, ["ppo, league", "ppo, league by win rate"]))
def test_kept_snapshots_are_saved(case: str) -> None:
    """Two of five snapshots are kept, frozen, and saved."""
    more = {"algorithm.lr": 0.01, "checkpoint.interval": 1}
    run("run", case, **more, **{"algorithm.n_epochs": 6, "total_steps": 0})
    last = rows("run")[-1]
    assert float(last["league/main/snapshots"]) == 2
    assert any(float(row["league/main/episodes"] or 0) for row in rows("run"))
    assert float(last["league/main/elo"]) != 0
    assert "league/main@4/win_rate" in last or case != "ppo, league"
    load_policy("run", trust=["agent_envs"])
    load_policy("run@final", trust=["agent_envs"])
    modules = load_learner("run", ["agent_envs"]).modules
    assert sum(module_id.startswith("main@") for module_id in modules) == 2


@pytest.mark.parametrize("case", everyday(1, ["impala", "impala, replay", "ppo"]))
def test_recorded_log_probs_match_the_acting_policy(case: str) -> None:
    """Recorded log-probabilities match the policy of each turn."""
    run("run", case, **{"algorithm.lr": 1e-12})
    for policy in ("first", "referee"):
        last = {name: float(cell) for name, cell in rows("run")[-1].items() if cell}
        if case == "ppo":
            assert last[f"train/{policy}/approximate_kl"] == pytest.approx(0.0, abs=1e-9)
        else:
            assert last[f"train/{policy}/rho_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mode", ["running", "estimated"])
@pytest.mark.parametrize(
    "before", everyday(1, [{}, {"model.centralized_critic": True}]), ids=["own", "joint"]
)
def test_centralized_critic_has_separate_statistics(mode: str, before: dict[str, Any]) -> None:
    """Statistics are collected before training and follow the mode of the run."""
    other = "running" if mode == "estimated" else "estimated"
    run("base", "a2c", **before, **{"model.normalization.mode": other})
    now = {"model.centralized_critic": True, "model.normalization.mode": mode}
    run("run", "a2c", base_run="base", **now, **{"algorithm.n_epochs": 1})
    model: Any = load_policy("run@final", trust=["agent_envs"]).model
    for policy in modules_of(model).values():
        own, others = policy.normalizer, policy.critic.normalizer
        assert [bool(each.frozen) for each in (own, others)] == [mode == "estimated"] * 2
        assert int(others.count) >= 20


@pytest.mark.exhaustive
def test_multi_agent_observations_are_stacked() -> None:
    """Observations are stacked per agent, without masks and common entries."""
    stack = {"_target_": "maze_train.envs.wrappers.ObservationStackWrapper", "n": 2}
    run("run", "sac", **{"env.wrappers": [stack]})
    space: Any = load_policy("run", trust=["agent_envs"]).observation_space
    assert space["agents"]["first"]["observation"].shape == (2, 2)
    assert space["agents"]["first"]["action_mask"].shape == (3,)
    assert space["agents"]["referee"].shape == (2, 2)
    assert space["rewards"].shape == (3,)
    run("ppo", "ppo, memory", **{"env.wrappers": [stack]})


CLASSIC = ["tictactoe_v3", "rps_v2", "leduc_holdem_v4", "chess_v6", "hanabi_v5"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", everyday(1, CLASSIC))
def test_classic_games_train_resume_and_play(name: str) -> None:
    """Classic PettingZoo games can be trained, resumed and played."""
    pytest.importorskip("pettingzoo")
    if name != "tictactoe_v3":
        pytest.importorskip("hanabi_learning_environment" if "hanabi" in name else "rlcard")
    few = {"algorithm.lr": 0.01, "checkpoint.interval": 1, "evaluation.max_episode_steps": 30}
    few |= {"env": {"id": f"pettingzoo:classic/{name}"}, "total_steps": 0}
    run("whole", "ppo", **few, **{"algorithm.n_epochs": 2})
    run("part", "ppo", **few, **{"algorithm.n_epochs": 1})
    run("part", "ppo", **few, **{"algorithm.n_epochs": 2}, resume="part")
    assert rows("part") == rows("whole")
    for found in rows("whole"):
        losses = [float(cell) for key, cell in found.items() if "policy_loss" in key and cell]
        assert losses
        assert np.isfinite(losses).all()
    given = {"trust": ["pettingzoo"], "progress": "quiet", "max_episode_steps": 40}
    (episode,) = run_rollout(run="whole", n_episodes=1, **given).episodes
    assert episode.length > 0


def test_default_policy_ids_are_valid() -> None:
    """Default policy ids are valid, and agents of an id have equal spaces."""
    sizes = {"p@1": 1, "p_1": 2, "p:1": 3, "keys": 4, "wolf_0": 5, "wolf_1": 5}
    boxes: dict[str, Any] = {agent: Box(0.0, 1.0, (size,)) for agent, size in sizes.items()}
    found = policies_of_agents(AgentSpaces(boxes, boxes), {})
    assert list(found.values()) == ["p_1", "p_1_", "p_1__", "keys_", "wolf_0", "wolf_0"]
    for policy in found.values():
        check_id(policy)


def test_agent_names_with_brackets_are_matched() -> None:
    """Names with brackets select the agent with this name."""
    boxes: dict[str, Any] = {agent: Box(0.0, 1.0, (1,)) for agent in ("p[0]", "p[1]", "*", "q")}
    agents = {"one": ["p[0]", "*"], "rest": ["p[[]1]", "q*"]}
    policies = {policy: PolicyConfig(agents=names) for policy, names in agents.items()}
    found = policies_of_agents(AgentSpaces(boxes, boxes), policies)
    assert found == {"p[0]": "one", "p[1]": "rest", "*": "one", "q": "rest"}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            {"policies.a.agents": ["frist"]},
            r"policies\.a\.agents = 'frist': no such agent; did you mean first\? there are: first",
        ),
        ({"policies.a.agents": ["first"]}, r"policies = .*no policy for second, referee"),
        (
            {"policies.a.agents": ["first"], "policies.b.agents": ["second", "ref*"]},
            r"policies\.b\.agents.*different spaces",
        ),
        (
            {"policies.r.agents": ["referee"], "policies.keys.agents": ["*st", "se*"]},
            r"policies = 'keys': not a valid PyTorch module name",
        ),
        *(
            (
                {"policies": {"r": {"agents": ["referee"]}, key: {"agents": ["*st", "se*"]}}},
                f"policies = '{key}': expected a name without . / @ :",
            )
            for key in ("", "a.b", "a/b", "a@b", "a:b")
        ),
        ({"policies.a.agents": []}, r"policies\.a\.agents = \[\]: expected at least one agent"),
        (
            {"policies.a.agents": ["*"], "policies.b.agents": ["first"]},
            r"policies\.b\.agents.*first already has the policy a",
        ),
        (
            {"algorithm": "es", "model.normalization.mode": "running"},
            r"model\.normalization\.mode = 'running': es does not normalize observ",
        ),
        (
            {"algorithm": "es", "policies_to_train": ["first"]},
            r"policies_to_train = \['first'\]: es trains all policies that are not frozen",
        ),
        (
            {"algorithm": "sac", "algorithm.initial_demonstration_trajectories": "data"},
            r"initial_demonstration_trajectories = '.*data': not supported for multi-agent",
        ),
        (
            {"env": {"id": "CartPole-v1"}, "policies.a.agents": ["first"]},
            r"policies = \['a'\]: only for multi-agent environments",
        ),
        (
            {"algorithm": "sac", "model.centralized_critic": True},
            r"model\.centralized_critic = True: only state-value critics .* choose a2c, ppo",
        ),
        (
            {"env": {"id": "CartPole-v1"}, "model.centralized_critic": True},
            r"model\.centralized_critic = True: only for multi-agent environments",
        ),
        (
            {"model.shared_trunk": True, "model.centralized_critic": True},
            r"model\.shared_trunk = True: a centralised critic shares no layers",
        ),
        (
            {"env.wrappers": [{"_target_": "gymnasium.wrappers.ClipReward", "max_reward": 1}]},
            r"env\.wrappers\[0\] = 'gymnasium.*': changes the mean of the rewards, but agents",
        ),
        (
            {
                "env.training_wrappers": [
                    {"_target_": "maze_train.RewardScalingWrapper", "scale": 2}
                ]
            },
            r"env\.training_wrappers\[0\] = 'maze_train.*': changes the mean of the rewards",
        ),
        (
            {
                "env.max_episode_steps": 9,
                "env.wrappers": [
                    {"_target_": "gymnasium.wrappers.TimeAwareObservation", "flatten": False}
                ],
            },
            r"env\.wrappers\[0\] = 'gymnasium.*': adds 'time' in the joint observation",
        ),
    ],
)
def test_invalid_multi_agent_settings_raise(overrides: dict[str, Any], problem: str) -> None:
    """The error contains key, value and allowed values."""
    algorithm = str(overrides.pop("algorithm", "ppo"))
    with pytest.raises(ConfigError, match=problem):
        short_run("run", algorithm, **{"env": HEAPS, "total_steps": 100, **overrides})


@pytest.mark.parametrize("base", everyday(1, ["ppo", "sac"]))
def test_base_run_loads_policies_by_id(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All policies are loaded by id; unknown ids raise an error."""
    run("base", base, **{"model.hidden_sizes": [6, 5], "model.activation": "relu"})
    more = {"base_run": "base", "algorithm.lr": 1e-12, "trust": ["agent_envs"]}
    given = settings("impala", env=HEAPS, **more, run_dir="run")
    del given["model.hidden_sizes"]
    train(**given)
    assert "loaded policies.first.policy" in capsys.readouterr().err
    weights, wanted = (
        torch.load(f"{name}/best/policy.pt", weights_only=True) for name in ("run", "base")
    )
    policies = [name for name in wanted if ".policy." in name]
    assert {name.split(".")[1] for name in policies} == {"first", "referee"}
    for name in policies:
        assert torch.allclose(weights[name], wanted[name], atol=1e-6)
    with pytest.raises(ConfigError, match=r"base_run = .*policies\.first\.policy.*nothing here"):
        train(**{**given, "run_dir": "other", "policies.one.agents": ["referee"],
                 "policies.all.agents": ["first", "second"]})  # fmt: skip


@pytest.mark.parametrize("is_centralized", [True, None])
@pytest.mark.exhaustive
def test_base_run_loads_alike_centralized_critics_only(
    is_centralized: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recurrent policies are loaded; critics only if they are alike."""
    short: dict[str, Any] = {"total_steps": 100, "trust": ["agent_envs"]}
    run("base", "ppo, memory", **short, **{"model.centralized_critic": is_centralized})
    for name, more in {"run": {"base_run": "base"}, "both": {"base_run": "run"}}.items():
        run(name, "ppo, memory", **short, **more, **{"model.centralized_critic": True})
        taken, _, new = capsys.readouterr().err.partition("; new:")
        assert "policies.referee.trunk, policies.referee.rnn, policies.referee.policy" in taken
        assert ("referee.critic" in new) == (name == "run" and not is_centralized)
    assert written_config("run")["model"]["shared_trunk"] is None


def test_observation_statistics_are_per_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are per policy; a policy that never acts raises an error."""
    norm = {"mode": "estimated", "n_steps": 20}
    policies = {
        "players": {"agents": ["first", "second"]},
        "judge": {"agents": ["referee"], "model": {"normalization": norm}},
    }
    run("run", "ppo", policies=policies)
    weights = torch.load("run/best/policy.pt", weights_only=True)
    found = {name: leaf for name, leaf in weights.items() if "normalizer" in name}
    assert found["policies.judge.normalizer.frozen"]
    assert found["policies.judge.normalizer.count"] >= 20
    assert not any(".players." in name for name in found)
    monkeypatch.setattr("maze_train.training.trainer.MAX_IDLE", 1)
    small = {"algorithm.n_rollout_steps": 2, "algorithm.batch_size": 2}
    with pytest.raises(TrainingError, match=r"no observation statistics for judge: no agent"):
        run("idle", "ppo", policies=policies, **small)


def test_policies_have_separate_networks() -> None:
    """`policies.<id>.model` configures the networks of a policy."""
    policies = {
        "players": {"agents": ["first", "second"]},
        "judge": {"agents": ["referee"], "model": {"hidden_sizes": [5, 4]}},
    }
    run("run", "ppo", policies=policies)
    weights = torch.load("run/best/policy.pt", weights_only=True)
    shapes = {tuple(leaf.shape) for name, leaf in weights.items() if ".judge." in name}
    assert (5, 2) in shapes
    assert (4, 5) in shapes
    assert written_config("run")["policies"]["judge"]["model"]["hidden_sizes"] == [5, 4]
    policies["judge"]["model"] = {"policy": OwnNet}
    run("own", "ppo", policies=policies)
    policy = load_policy("own", trust=["agent_envs", "own_parts"])
    assert isinstance(policy.model.by_policy["judge"].policy.net, OwnNet)
    assert np.isfinite(float(rows("run")[-1]["train/judge/value_loss"]))


@pytest.mark.exhaustive
def test_sequences_do_not_depend_on_other_policies() -> None:
    """Sequences of a recurrent policy do not depend on other policies."""
    sizes = {"hidden_sizes": [8]}
    memory = {**sizes, "rnn": RECURRENT["model.rnn"]}
    steps = {key: value for key, value in RECURRENT.items() if key != "model.rnn"}
    players, judge = {"agents": ["first", "second"]}, {"agents": ["referee"]}
    policies: dict[str, Any] = {"players": players, "judge": {**judge, "model": sizes}}
    run("all", "ppo", **RECURRENT, policies=policies)
    policies = {"players": {**players, "model": memory}, "judge": judge}
    run("one", "ppo", **steps, policies=policies)
    assert rows("one") == rows("all")


class Marked(PrioritizedReplayBuffer):
    """Replay buffer that records the TD errors it receives."""

    received: ClassVar[dict[int, set[float]]] = {}

    def update_priorities(self, indices: Any, errors: Any) -> None:
        self.received.setdefault(id(self), set()).update(errors.tolist())
        super().update_priorities(indices, errors)


def marked_loss(learner: Any, module_id: str, batch: Any, statistics: Any) -> Any:
    """Return the loss of the algorithm, with TD errors that identify the policy."""
    loss = learner.compute_loss_for_module(module_id, batch, statistics)
    errors = torch.full((len(batch.rewards),), {"a": 1.0, "b": 2.0}[module_id])
    statistics.keep("td_errors", errors)
    return loss


def test_each_replay_buffer_receives_the_td_errors_of_its_policy() -> None:
    """With prioritized replay, the priorities of a policy depend on its own errors only."""
    Marked.received.clear()
    small = {"total_steps": 80, "algorithm.initial_buffer_size": 20, "algorithm.batch_size": 8}
    train(
        {"_target_": "agent_envs.Rochambeau"},
        "dqn",
        run_dir="run",
        evaluation={"n_episodes": 1},
        **{
            **small,
            "policies": {"a": {"agents": ["left"]}, "b": {"agents": ["right"]}},
            "algorithm.replay_buffer": {"_target_": f"{__name__}.Marked"},
            "algorithm.loss_function": {"_target_": f"{__name__}.marked_loss"},
        },
    )
    assert sorted(Marked.received.values(), key=sorted) == [{1.0}, {2.0}]
