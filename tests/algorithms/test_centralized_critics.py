"""Centralised critics: values, advantages, normalisation and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium import spaces
from torch import nn

from maze_train import ModelConfig, train
from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.core.events import Statistics
from maze_train.core.targets import TARGET, InlineObject
from maze_train.data.rollout import Rollout
from maze_train.data.turns import TurnSplitter
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ObservationNormalizationConfig, RecurrentConfig
from maze_train.nets.normalization import find_normalizer
from maze_train.spaces.agents import AgentSpaces
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import flat_space_of, sampled_for
from maze_train.training.config import PolicyConfig
from maze_train.training.multi_agent_models import build_joint_model

if TYPE_CHECKING:
    from pathlib import Path

BOX = spaces.Box(-np.inf, np.inf, (1,), np.float32)
SPACES = AgentSpaces({"a": BOX, "b": BOX}, dict.fromkeys("ab", spaces.Discrete(2)))


class Sum(nn.Module):
    """Critic: own + 10 a + 100 b + 1000 (1 if a acts, 2 if b acts) + 10000 (1 for agent b)."""

    def __init__(self, observation_space: spaces.Dict, output_size: int) -> None:
        super().__init__()
        assert list(observation_space) == ["own", "agents/a", "agents/b", "acts", "agent"]
        self.scale = nn.Parameter(torch.ones(output_size))

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        own, a, b = (obs[key].double() for key in ("own", "agents/a", "agents/b"))
        acts = obs["acts"].double() @ torch.tensor([1.0, 2.0], dtype=torch.float64)
        flags = 1000 * acts + 10000 * obs["agent"]
        found: torch.Tensor = (own + 10 * a + 100 * b + flags.unsqueeze(-1)) * self.scale
        return found


def joint_model(**settings: Any) -> Any:
    """Return the shared policy of both agents with a centralised critic."""
    config = ModelConfig(centralized_critic=True, **settings)
    return build_joint_model(build_actor_critic, config, SPACES, {}, 0)


@pytest.mark.parametrize(
    "settings", [{"critic_hidden_sizes": [7]}, {"critic": {TARGET: InlineObject(Sum)}}]
)
def test_centralized_critic_has_separate_layers(settings: dict[str, Any]) -> None:
    """With a recurrent policy, the centralised critic has separate layers."""
    joint = joint_model(rnn=RecurrentConfig(size=5), hidden_sizes=[4], **settings)
    model = joint.by_policy["default"]
    sizes = {len(value) for value in model.critic.parameters()}
    assert sizes == {1} if "critic" in settings else 7 in sizes
    assert model.state_size > 0


PARTS = {
    "table": spaces.Box(-1.0, 1.0, (2, 2), np.float32),
    "kind": spaces.Discrete(3, start=5),
    "pair": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "flags": spaces.MultiBinary((2, 2)),
    "screen": spaces.Box(0, 255, (16, 16), np.uint8),
    "number": spaces.Box(0, 255, (), np.uint8),
}


def test_centralized_critic_shares_branches_of_equal_leaves() -> None:
    """Vectors and choices of agents share a branch; images and leaves of other spaces do not."""
    others = {**PARTS, "number": spaces.Box(0, 9, (), np.uint8)}
    observed = {agent: spaces.Dict(others if agent == "d" else PARTS) for agent in "abcd"}
    several = AgentSpaces(observed, dict.fromkeys("abcd", spaces.Discrete(2)))
    policies = {"main": PolicyConfig(agents=["a", "b", "c"]), "other": PolicyConfig(agents=["d"])}
    config = ModelConfig(centralized_critic=True)
    model = build_joint_model(build_actor_critic, config, several, policies, 0).by_policy["main"]
    encoder = model.critic.net.encoder
    sizes = dict(zip(encoder.keys, (e.output_size for e in encoder.encoders), strict=True))
    found = {key: size for key, size in sizes.items() if key.startswith("agents/")}
    assert sorted(key.rpartition("/")[2] for key in found) == sorted(
        [*PARTS, *["screen"] * 3, "number"]
    )
    vectors = {"table": 16, "kind": 12, "pair": 20, "flags": 16}
    for name, size in vectors.items():
        assert [x for key, x in found.items() if key.endswith(name)] == [size]
    assert sorted(x for key, x in found.items() if key.endswith("number")) == [1, 3]
    assert "agents/d/number" in found
    # Changing any leaf of any agent changes the value.
    space = spaces.Dict(
        flat_space_of(flat_space(several.observation_space), "a", is_centralized=True)
    )
    one, other = sampled_for(space, 2), {}
    values = model.raw_values({}, one)
    for key, leaf in one.items():
        if key.startswith("/joint"):
            other = {**one, key: leaf.flip(0)}
            assert leaf.equal(leaf.flip(0)) or not model.raw_values({}, other).equal(values), key


def column(*numbers: Any) -> torch.Tensor:
    """Return rows of one environment in float64."""
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


def game() -> Rollout:
    """Return a rollout in which a and b act in turn, twice, and are then truncated."""
    flags = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]], dtype=torch.int8)
    rewards = [[1.0, 10.0], [2.0, 20.0], [4.0, 30.0], [8.0, 40.0]]
    none = torch.zeros(5, 1, 2, dtype=torch.int8)
    return Rollout(
        obs={
            "agents/a": column([1.0], [1.0], [3.0], [3.0], [-1.0]),
            "agents/b": column([0.0], [2.0], [2.0], [4.0], [-1.0]),
            "acts": flags.unsqueeze(1),
            "rewards": column([0.0, 0.0], *rewards[:3], [0.0, 0.0]),
            "terminated": none,
            "truncated": none,
        },
        actions={agent: torch.zeros(4, 1, dtype=torch.int64) for agent in "ab"},
        rewards=torch.zeros(4, 1, dtype=torch.float64),
        end=torch.tensor([[0]] * 3 + [[2]], dtype=torch.uint8),
        final_obs={
            "agents/a": column([5.0])[0],
            "agents/b": column([6.0])[0],
            "acts": none[0],
            "rewards": column(rewards[3])[0],
            "terminated": none[0],
            "truncated": none[0] + 1,
        },
        final_positions=torch.tensor([3]),
    )


def test_advantages_by_hand() -> None:
    """Advantages for gamma = lambda = 0.5, values of `Sum`, and rewards summed between turns.

    a: values 1011, 1233 and final value 1655, rewards 3 and 12; so 12 + 827.5 - 1233 = -393.5 and
    3 + 616.5 - 1011 - 0.25 * 393.5. b: values 12212, 12434 and 12656, rewards 60 and 40; so 40 +
    6328 - 12434 = -6066 and 60 + 6217 - 12212 - 0.25 * 6066. The final value of a truncated agent
    assumes that this agent acts next.
    """
    model = joint_model(critic={"_target_": InlineObject(Sum)})
    splitter = TurnSplitter(model.members, model.state_sizes, centralized=model.centralized)
    config = A2CAlgorithmConfig(gamma=0.5, gae_lambda=0.5, normalize_advantage=False)
    learner = A2CLearner(model.by_policy["default"].double(), config)
    rollout = splitter.split(game())["default"]
    prepared = learner.preprocess("default", rollout, Statistics())
    names = ("advantages", "targets", "old_values")
    advantages, returns, values = (prepared.columns[name] for name in names)
    assert advantages.tolist() == [-391.5 - 98.375, -5935.0 - 1516.5, -393.5, -6066.0]
    assert values.tolist() == [1011.0, 12212.0, 1233.0, 12434.0]
    assert returns.tolist() == (advantages + values).tolist()


@pytest.mark.parametrize("is_centralized", everyday(1, [True, False]))
def test_centralized_critic_predicts_other_agents_rewards(
    tmp_path: Path, is_centralized: bool
) -> None:
    """Rewards depend on the other agent's observation; a critic that sees it predicts them."""
    more = {
        "env": {"_target_": "agent_envs.Peek"},
        "total_steps": 2_560,
        "runner.concurrency": 64,
        "model.hidden_sizes": [16],
        "model.centralized_critic": is_centralized,
        "algorithm.lr": 0.03,
        "algorithm.n_rollout_steps": 4,
        "algorithm.batch_size": 128,
        "evaluation.n_episodes": 0,
    }
    result = train(algorithm="ppo", **more, run_dir=tmp_path / "run", seed=0)
    explained = float(result.history[-1]["train/explained_variance"])
    assert (explained > 0.999) if is_centralized else (explained < 0.05)


def test_centralized_critic_normalizes_all_observations() -> None:
    """The critic normalizes all observations, the policy its inputs, over the same rows."""
    model = joint_model(normalization=ObservationNormalizationConfig(mode="running"))
    own = model.by_policy["default"]
    splitter = TurnSplitter(model.members, model.state_sizes, centralized=model.centralized)
    rollout = splitter.split(game())["default"]
    assert find_normalizer(own) is own.normalizer
    own.normalizer.update(rollout.acted_on(own.normalizer.keys))
    assert own.normalizer.mean.tolist() == [2.5], "of 1, 3 and 2, 4"
    joint = own.critic.normalizer
    assert joint.keys == ["/joint/agents/a", "/joint/agents/b"]
    assert joint.mean.tolist() == [2.0, 2.0]
    assert joint.var.tolist() == [1.0, 2.0]
    own.normalizer.freeze()
    assert joint.frozen
