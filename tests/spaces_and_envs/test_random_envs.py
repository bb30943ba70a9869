"""Arbitrary spaces: check, reset, rollout, update, save, load, act, also in workers."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium.spaces import Box
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from random_envs import RandomSpaceEnv, space_pairs

from maze_train import (
    A2CAlgorithmConfig,
    A2CLearner,
    LearnerGroup,
    ModelConfig,
    PPOAlgorithmConfig,
    PPOLearner,
    Progress,
    RolloutCollector,
    SequentialVectorEnv,
    SubprocVectorEnv,
    TrainedPolicy,
    build_actor_critic,
)
from maze_train.core.types import tree_leaves
from maze_train.nets.config import ObservationNormalizationConfig, RecurrentConfig
from maze_train.spaces.describe import flat_spaces
from maze_train.training.evaluators import copy_of_weights
from maze_train.training.policy_files import PolicyWriter, read_spaces, read_weights

T, B = 4, 3
A2C = A2CAlgorithmConfig(n_rollout_steps=T, lr=0.001)
PPO = PPOAlgorithmConfig(
    n_rollout_steps=T,
    lr=0.001,
    batch_size=5,
    n_optimization_epochs=2,
    sequence_length=2,
    reward_scaling=True,
)
ALGORITHMS = {"a2c": (A2CLearner, A2C), "ppo": (PPOLearner, PPO)}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    # Recommendations of gymnasium's checker: bounds, symmetry, equal bounds.
    pytest.mark.filterwarnings("ignore:.*space m(in|ax)imum value is.*infinity"),
    pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space"),
    pytest.mark.filterwarnings("ignore:.*maximum and minimum values are equal"),
    # Actions of a Box without dimensions are scalars, as in gymnasium's vector environments.
    pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array"),
]


@st.composite
def problems(draw: Any) -> tuple[Any, ModelConfig, str]:
    """Draw spaces, model settings for them, and an algorithm."""
    spaces = draw(space_pairs())
    boxes = [leaf for leaf in flat_spaces(spaces[1]).values() if isinstance(leaf, Box)]
    families = ["diagonal_gaussian"]
    if all(box.is_bounded() and (box.low < box.high).all() for box in boxes):
        families += ["squashed_gaussian", "beta"]
    cell = draw(st.sampled_from([None, None, None, None, "lstm", "gru"]))
    config = ModelConfig(
        hidden_sizes=[8],
        branch_size=4,
        shared_trunk=None if cell else draw(st.sampled_from([None, True, False])),
        rnn=RecurrentConfig(cell=cell, size=3) if cell else None,
        normalization=ObservationNormalizationConfig(
            mode=draw(st.sampled_from(["none", "none", "running"]))
        ),
        image_encoder=draw(st.sampled_from(["nature", "impala", "flat"])),
        distributions={"Box": draw(st.sampled_from(families))},
    )
    return spaces, config, draw(st.sampled_from(list(ALGORITHMS)))


def learn(env: Any, algorithm: str, config: ModelConfig) -> tuple[Any, Any]:
    """Return the model after rollouts and updates, and copies of all collected tensors."""
    learner_class, algorithm_config = ALGORITHMS[algorithm]
    model = build_actor_critic(config, env.env_observation_space, env.single_action_space, 3)
    group = LearnerGroup(learner_class(model, algorithm_config, seed=4))
    collector = RolloutCollector(env, T, env_seed=1, action_seed=2)
    collected = []
    for update in range(2):
        rollout, _ = collector.collect_steps(model)
        collected += [leaf.clone() for tree in columns(rollout) for leaf in tree_leaves(tree)]
        group.update(rollout, Progress(env_steps=update * T * B, updates=update))
    return model, collected


def columns(rollout: Any) -> list[Any]:
    """Return all columns of a rollout."""
    names = ("obs", "actions", "rewards", "terminated", "truncated", "final_obs", "final_positions")
    return [getattr(rollout, name) for name in names]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Assert that tensors and dtypes are bit-for-bit identical."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert a.dtype == torch.bool or bool(torch.isfinite(a).all())


def parts(value: Any) -> list[Any]:
    """Return the leaves of a nested value, sorted by key as gymnasium's batching does."""
    if isinstance(value, dict):
        value = tuple(value[key] for key in sorted(value))
    return [leaf for v in value for leaf in parts(v)] if isinstance(value, tuple) else [value]


def assert_close(ours: Any, theirs: Any) -> None:
    """Assert that actions are equal up to rounding, because BLAS depends on memory alignment."""
    for a, b in zip(parts(ours), parts(theirs), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def check_acting(model: Any, spaces: Any, config: ModelConfig) -> None:
    """Assert that a loaded policy acts like the original, for single and batched observations."""
    with tempfile.TemporaryDirectory() as directory:
        writer = PolicyWriter(*spaces, "seed: 1\n")
        writer(Path(directory), copy_of_weights(model), {"score": 1.0})
        read = read_spaces(Path(directory))
        restored = build_actor_critic(config, *read, 99)
        restored.load_state_dict(read_weights(Path(directory)))
    assert read == spaces
    policy, other = TrainedPolicy(model, *spaces), TrainedPolicy(restored, *read)
    env = RandomSpaceEnv(*spaces)
    observations = [env.reset(seed=seed)[0] for seed in range(3)]
    batch = concatenate(spaces[0], observations, create_empty_array(spaces[0], 3))
    for deterministic in (True, False):
        for seed, observation in enumerate(observations):
            env.reset(seed=seed)
            policy.reset()
            other.reset()
            ours, theirs = (p.act(observation, deterministic) for p in (policy, other))
            env.step(ours)
            assert_close(ours, theirs)
        rows = list(iterate(batch_space(spaces[1], 3), policy.act(batch, deterministic)))
        for seed, row in enumerate(rows):
            env.reset(seed=seed)
            env.step(row)
            policy.reset()
            if deterministic:
                assert_close(row, policy.act(observations[seed]))


def check_problem(spaces: Any, config: ModelConfig, algorithm: str) -> None:
    """Run all checks for one pair of spaces."""
    check_env(RandomSpaceEnv(*spaces, refuses_illegal=False), skip_render_check=True)
    factories = [partial(RandomSpaceEnv, *spaces)] * B
    workers = SubprocVectorEnv(factories, n_workers=2, start_method="fork", timeout_s=60.0)
    with SequentialVectorEnv(factories) as one_process, workers:
        model, ours = learn(one_process, algorithm, config)
        other, theirs = learn(workers, algorithm, config)
    assert_equal(ours, theirs)
    assert_equal(model.state_dict().values(), other.state_dict().values())
    check_acting(model, spaces, config)


@pytest.mark.slow
@pytest.mark.parametrize("part", everyday(1, range(3)))
def test_random_spaces_collect_learn_save_and_act(part: int) -> None:
    """Rollouts and weights are identical in one process and in workers."""

    @seeded(part)
    @settings(
        max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(problems())
    def check(problem: Any) -> None:
        check_problem(*problem)

    check()
