"""Comparison of a file with the policy that it was made of."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box

from maze_train.errors import ExportError
from maze_train.export.step import ACTION, NEXT_STATE
from maze_train.rollout.rollout_generator import RolloutGenerator
from maze_train.spaces.agent_trees import part_of, with_name
from maze_train.spaces.agents import ACTS, AGENTS
from maze_train.spaces.describe import flat_spaces, flatten_value, unflatten_value
from maze_train.spaces.masks import mask_layout
from maze_train.training.policy_files import TrainedPolicy
from maze_train.types import leaves_by_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gymnasium import spaces

    from maze_train.data.trajectories import Trajectory
    from maze_train.export.formats import Function
    from maze_train.export.step import PolicyStep
    from maze_train.types import Array


BATCHES = ((1, 8), (31, 32))
"""Numbers of environments and of steps of the comparison."""

OBSERVATIONS = sum(n * steps for n, steps in BATCHES)

EPISODES, STEPS = 4, 250
"""Episodes that are played at a time for observations, and steps after which they end."""

TOLERANCE = 1e-4
"""Largest difference of a number x, in units of max(1, |x|): sums in another order are rounded
otherwise."""

MAX_OTHER_CHOICES = 5
"""Observations for which another discrete action may be chosen: rounding decides between two that
are equally good."""


class Differences(NamedTuple):
    """Differences between a file and a policy."""

    largest: float
    """Largest difference of a number x, in units of max(1, |x|)."""

    other_choices: int
    """Observations for which other discrete actions were chosen."""


def played_observations(env: Any, policy: Any) -> dict[str, Array]:
    """Observations of episodes in which a policy draws its actions, by leaf, `[1000, ...]`.

    Raises:
        ConfigError: If the policy does not fit the environment.
        EnvError: If the environment can not be built, or fails.
    """
    episodes: list[Trajectory] = []
    with RolloutGenerator(
        env, policy, deterministic=False, concurrency=EPISODES, max_episode_steps=STEPS
    ) as generator:
        while sum(episode.num_steps for episode in episodes) < OBSERVATIONS:
            episodes += generator.rollout(EPISODES)
    columns = [leaves_by_key(episode.obs) for episode in episodes]
    return {key: np.concatenate([own[key] for own in columns])[:OBSERVATIONS] for key in columns[0]}


def observations_of_agent(
    observations: Mapping[str, Array] | None, agent: str, number: int
) -> dict[str, Array]:
    """What one of several agents observed where it acted, again and again; empty if it never did.

    Args:
        observations: Observations of all agents by leaf, `[1000, ...]`, or None.
        agent: Its name.
        number: Its number.
    """
    rows = np.flatnonzero(observations[ACTS][:, number]) if observations else ()
    if observations is None or not len(rows):
        return {}
    own = leaves_by_key(part_of(part_of(observations, AGENTS), agent))
    return {key: leaf[np.resize(rows, OBSERVATIONS)] for key, leaf in own.items()}


def drawn_observations(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> dict[str, Array]:
    """Observations of a space by leaf, `[1000, ...]`, the same each time; some action is legal.

    Real numbers are standard normal, clipped to their bounds, all others uniform.
    """
    found = {key: _drawn(leaf) for key, leaf in flat_spaces(observation_space).items()}
    masks = mask_layout(observation_space, action_space)
    for row in range(OBSERVATIONS if masks is not None else 0):
        if masks is not None and masks.illegal_part({k: leaf[row] for k, leaf in found.items()}):
            for key in masks.leaves:
                found[key][row] = 1
    return found


def _drawn(leaf: spaces.Space[Any]) -> Array:
    if isinstance(leaf, Box) and leaf.dtype.kind == "f":
        numbers = np.random.default_rng(0).standard_normal((OBSERVATIONS, *leaf.shape))
        return np.clip(numbers, leaf.low, leaf.high).astype(leaf.dtype)
    leaf = copy.deepcopy(leaf)
    leaf.seed(0)
    return np.stack([leaf.sample() for _ in range(OBSERVATIONS)])


def differences(
    policy: TrainedPolicy, step: PolicyStep, run: Function, observations: Mapping[str, Array]
) -> Differences:
    """Compare what a file does with what the policy does, for batches of two sizes.

    A memory goes on through the steps; the file is given that of the policy.

    Args:
        policy: The policy.
        step: The same as a function of tensors.
        run: Runs the file.
        observations: Observations by leaf, `[1000, ...]`.

    Raises:
        ExportError: If the file fails, or differs by more than rounding.
    """
    own = TrainedPolicy(policy.model, policy.observation_space, policy.action_space)
    start, found = 0, []
    for n, steps in BATCHES:
        state = torch.zeros(n, step.state_size)
        for _ in range(steps):
            rows = {key: leaf[start : start + n] for key, leaf in observations.items()}
            start += n
            inputs = step.inputs(rows, state)
            with torch.no_grad():
                outputs = step(inputs)
            state = outputs.get(NEXT_STATE, state)
            expected = {name: output.numpy() for name, output in outputs.items()}
            action = own.act(unflatten_value(own.observation_space, rows.get("", rows)))
            expected.update(with_name(ACTION, flatten_value(own.action_space, action)))
            try:
                given = run(inputs)
            except Exception as error:
                problem = f"the file can not be run: {type(error).__name__}: {error}"
                raise ExportError(problem) from error
            found.append(_compared(given, expected))
    largest, other = float(np.max([x for x, _ in found])), sum(count for _, count in found)
    if not largest <= TOLERANCE or other > MAX_OTHER_CHOICES:
        raise ExportError(
            f"the file acts otherwise than the policy: of {OBSERVATIONS:,} observations {other} "
            f"have other discrete actions (at most {MAX_OTHER_CHOICES} may), and numbers x differ "
            f"by up to {largest:.1e} max(1, |x|) (at most {TOLERANCE:g}); networks of your own may "
            "not choose what they compute by values of tensors, nor keep something between calls"
        )
    return Differences(largest, other)


def _compared(given: dict[str, Array], expected: dict[str, Array]) -> Differences:
    """Differences in one batch; NaN where a number is none."""
    forms = [{k: (x.dtype, x.shape) for k, x in found.items()} for found in (given, expected)]
    if forms[0] != forms[1]:
        raise ExportError(f"the file gives {forms[0]}, the policy {forms[1]}")
    is_other, gaps = np.zeros(len(next(iter(expected.values()))), np.bool_), [0.0]
    for name, array in expected.items():
        if array.dtype.kind != "f":
            is_other |= (given[name] != array).reshape(len(array), -1).any(1)
    for name, array in expected.items():
        if array.dtype.kind == "f":
            gap = np.abs(given[name] - array) / np.maximum(1.0, np.abs(array))
            gaps.append(float(gap[~is_other].max(initial=0.0)))
    return Differences(float(np.max(gaps)), int(is_other.sum()))
