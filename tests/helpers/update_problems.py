"""Small rollouts and models of every kind in float64, with reference updates."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference_actor_critic import SlowLearner
from step_ends import ends_of, with_gaps
from torch import nn

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.algorithms.impala.learner import ImpalaLearner
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.data.replay import Transitions
from maze_train.data.rollout import Rollout
from maze_train.learner.config import Progress
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig
from maze_train.nets.template import TemplateNet
from maze_train.spaces.describe import flat_space, flat_spaces

T, B = 6, 3
N = T * B
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float64)
PARTS = spaces.Dict({"pose": BOX, "gear": spaces.Discrete(3, start=1)})
ARM = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float64)))

PROBLEMS = {
    "discrete": (BOX, spaces.Discrete(3)),
    "gaussian": (BOX, spaces.Box(-1.0, 1.0, (2,), np.float64)),
    "multi_discrete": (BOX, spaces.MultiDiscrete([2, 3])),
    "dict_obs": (PARTS, spaces.Discrete(3)),
    "dict_obs_tuple_action": (PARTS, ARM),
    "dict_action": (BOX, spaces.Dict({"gear": spaces.Discrete(3), "force": ARM.spaces[1]})),
}

# Values that are exact in float32, so that rounding of settings does not affect these tests.
SETTINGS = {"gamma": 0.96875, "gae_lambda": 0.9375, "n_rollout_steps": T}
SMALL: dict[str, Any] = {
    "algorithm.initial_buffer_size": 16,
    "algorithm.n_rollout_steps": 1,
    "algorithm.batch_size": 8,
    "algorithm.epoch_length": 8,
    "model.hidden_sizes": [8],
    "runner.concurrency": 2,
    "evaluation.n_episodes": 1,
    "evaluation.max_episode_steps": 20,
    "tracking": {"progress": "quiet", "plot": False, "tensorboard": False},
    "total_steps": 64,
    "seed": 1,
}
"""Settings of algorithms with replay for runs of a few seconds."""

SEED = 7
LR = {"a2c": 0.0078125, "ppo": 0.0625, "impala": 0.0078125}
LEARNERS = {
    "a2c": (A2CLearner, A2CAlgorithmConfig, {}),
    # The learning rate is large enough for ratios to be clipped.
    "ppo": (PPOLearner, PPOAlgorithmConfig, {"batch_size": 8, "n_optimization_epochs": 2}),
    "impala": (ImpalaLearner, ImpalaAlgorithmConfig, {}),
}


class OwnNet(nn.Module):
    """Custom network with a nonlinearity that no template has."""

    def __init__(self, observation_space, output_size):
        super().__init__()
        self.first = nn.Linear(observation_space.shape[0], 5)
        self.last = nn.Linear(5, output_size)

    def forward(self, obs):
        return self.last(torch.sin(self.first(obs)))


class OwnTemplate(TemplateNet):
    """Template subclass with a custom forward pass."""

    def __init__(self, observation_space, output_size):
        super().__init__(observation_space, ModelConfig(), [5], output_size, 0.5)

    def forward(self, obs):
        return 2.0 * super().forward(obs) + 0.1


def make_model(observation_space, action_space, seed=1, **settings):
    """Return a small model whose policy head has weights far from zero."""
    config = ModelConfig(**{"hidden_sizes": [6, 5], "branch_size": 3, **settings})
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # Custom networks are checked with stored observations.
    model = build_actor_critic(config, observation_space, action_space, seed).double()
    torch.set_default_dtype(default)
    return perturbed(model, seed)


@torch.no_grad()
def perturbed(model, seed=1, size=0.3):
    """Perturb all parameters of a model with noise of the given size."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.add_(size * torch.randn(param.shape, generator=generator))
    return model


def random_obs(space, shape, generator):
    """Return random observations of a flat space, [*shape, ...]."""

    def leaf(part):
        if part.dtype == np.uint8:
            return torch.randint(0, 20, (*shape, *part.shape), generator=generator).byte()
        if isinstance(part, spaces.MultiBinary):  # a mask
            mask = torch.randint(0, 2, (*shape, part.n), generator=generator).to(torch.int8)
            mask[..., 1] = 1
            return mask
        if isinstance(part, spaces.Discrete):
            low = int(part.start)
            return torch.randint(low, low + int(part.n), shape, generator=generator)
        return torch.randn(*shape, *part.shape, generator=generator)

    if isinstance(space, spaces.Dict):
        return {key: leaf(part) for key, part in space.spaces.items()}
    return leaf(space)


def random_actions(space, shape, generator):
    """Return random actions in stored form: categories from 0, unclipped values."""

    def leaf(part):
        if isinstance(part, spaces.Box):
            return 2.0 * torch.randn(*shape, *part.shape, generator=generator)
        if isinstance(part, spaces.Discrete):
            return torch.randint(0, int(part.n), shape, generator=generator)
        if isinstance(part, spaces.MultiBinary):
            return torch.randint(0, 2, (*shape, part.n), generator=generator).float()
        columns = [torch.randint(0, int(n), shape, generator=generator) for n in part.nvec]
        return torch.stack(columns, -1)

    parts = {key: leaf(part) for key, part in flat_spaces(space).items()}
    return parts[""] if list(parts) == [""] else parts


def make_transitions(observation_space, action_space, seed=0, weighted=False):
    """Return seven random transitions, some of them terminal."""
    generator, n = torch.Generator().manual_seed(seed), 7
    obs, next_obs = (random_obs(flat_space(observation_space), (n,), generator) for _ in range(2))
    actions = random_actions(action_space, (n,), generator)
    if isinstance(obs, dict) and "action_mask" in obs:
        actions = torch.ones_like(actions)
    terminated = torch.rand(n, generator=generator) < 0.3
    return Transitions(
        obs=obs,
        actions=actions,
        rewards=torch.randn(n, generator=generator),
        discounts=torch.where(terminated, 0.0, 0.9),
        next_obs=next_obs,
        indices=torch.arange(n),
        weights=torch.rand(n, generator=generator) if weighted else None,
    )


def make_rollout(observation_space, action_space, seed=0):
    """Return a rollout with every kind of episode end, in the last row and before it."""
    generator = torch.Generator().manual_seed(seed)
    terminated = torch.zeros(T, B, dtype=torch.bool)
    truncated = torch.zeros(T, B, dtype=torch.bool)
    terminated[2, 0] = truncated[1, 1] = truncated[T - 1, 1] = True
    terminated[4, 1] = truncated[4, 1] = terminated[T - 1, 2] = True
    positions = (truncated & ~terminated).flatten().nonzero().squeeze(-1)
    space = flat_space(observation_space)
    return Rollout(
        obs=random_obs(space, (T + 1, B), generator),
        actions=random_actions(action_space, (T, B), generator),
        rewards=torch.randn(T, B, generator=generator),
        end=ends_of(terminated, truncated),
        final_obs=random_obs(space, (len(positions),), generator),
        final_positions=positions,
    )


def normal(*shape, seed=5):
    """Return standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def log_probs_of(model, rollout):
    """Return the log-probabilities of the actions under a feedforward model, `[T, B]`."""
    obs = {k: x[:-1] for k, x in rollout.obs.items()} if isinstance(rollout.obs, dict) else (
        rollout.obs[:-1]
    )  # fmt: skip
    with torch.no_grad():
        return model.distribution.log_prob(model.policy_params(obs), rollout.actions)


def with_others(model, rollout):
    """Return the rollout with behaviour log-probabilities changed by a factor of up to about 5."""
    return replace(rollout, log_probs=log_probs_of(model, rollout) + 0.8 * normal(T, B))


def with_ignored(rollout):
    """Return the rollout with gap rows that contain invalid values.

    Gaps follow a terminal step, a truncated step and a dropped episode; one is in the first row.
    """
    ignored = torch.zeros(T, B, dtype=torch.bool)
    ignored[3, 0] = ignored[2, 1] = ignored[0, 2] = ignored[3, 2] = True
    assert not bool((ignored & rollout.ended).any())
    return replace(
        with_gaps(rollout, ignored),
        rewards=torch.where(ignored, 1e6, rollout.rewards),
        log_probs=torch.where(ignored, -1e3, rollout.log_probs),
    )


def replayed(rollout, count=1):
    """Return the rollout whose last `count` environments were replayed, with the oldest weights."""
    seq_nos = torch.tensor([7] * (B - count) + [0] * count)
    return replace(rollout, weights_seq_no=seq_nos, replayed=torch.arange(B) >= B - count)


def make_problem(name="discrete", ignoring=False, **model_settings):
    """Return a model, a rollout of another policy, and the action space."""
    model = make_model(*PROBLEMS[name], **model_settings)
    rollout = with_others(model, make_rollout(*PROBLEMS[name]))
    return model, with_ignored(rollout) if ignoring else rollout, PROBLEMS[name][1]


def make_config(algorithm, **settings):
    """Return settings whose values are exact in float32."""
    _, config_class, own = LEARNERS[algorithm]
    defaults = {"lr": LR[algorithm], "entropy_coef": 0.03125}
    return config_class(**{**SETTINGS, **defaults, **own, **settings})


def make_learner(algorithm, model, **settings):
    """Return a learner of a model."""
    return LEARNERS[algorithm][0](model, make_config(algorithm, **settings), seed=SEED)


def orders(slow, rollout, generator):
    """Yield the minibatches of each pass: all units, or slices of a permutation."""
    config, count = slow.config, len(slow.units(rollout))
    if not hasattr(config, "batch_size"):
        yield [range(count)]
        return
    size = config.batch_size // (1 if rollout.hidden_states is None else slow.length(rollout))
    for _ in range(config.n_optimization_epochs):
        order = torch.randperm(count, generator=generator)
        if config.n_minibatches is not None:
            ends = [0]
            for i in range(config.n_minibatches):
                ends.append(ends[-1] + -(-(count - ends[-1]) // (config.n_minibatches - i)))
            yield [order[start:end].tolist() for start, end in pairwise(ends)]
            continue
        yield [piece.tolist() for piece in order.split(size)]


def compare(algorithm, problem, critic=None, progress=None, now=None, updates=1, **settings):
    """Update model and reference, and compare their weights and statistics.

    Returns the last statistics and importance weights.
    """
    model, rollout, action_space = problem
    if algorithm == "ppo":  # as collected if the acting policy is the one being trained
        rollout = replace(rollout, log_probs=None)
    reference, before = copy.deepcopy(model), snapshot(model)
    learner = make_learner(algorithm, model, **settings)
    slow = SlowLearner(reference, action_space, learner.config, critic)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(updates):
        row = learner.update(rollout, progress or Progress()).reduce()
        ratios, _ = slow.update(rollout, orders(slow, rollout, generator), **(now or {}))
        assert row == pytest.approx(slow.reported(), rel=1e-7, abs=1e-10)
    assert_same_weights(model, reference, before)
    return row, ratios


def assert_same_weights(model, reference, before=None):
    """Check that all parameters agree to 1e-9 and have changed."""
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param.detach(),
            theirs[name].detach(),
            rtol=1e-9,
            atol=1e-10,
            msg=lambda m, n=name: n + m,
        )
    if before is not None:
        moved = [bool((param != before[name]).any()) for name, param in model.named_parameters()]
        assert any(moved)


def snapshot(model):
    """Return copies of all parameters by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
