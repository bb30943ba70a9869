"""Hindsight relabelling: replaces the goals of replay samples with goals achieved later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.checks import check_at_least, check_one_of
from maze_train.core.errors import EnvError, SpaceError, TrainingError
from maze_train.core.step_end import is_followed_by_new, is_terminated, is_transition
from maze_train.core.types import Array, TensorTree, leaves_by_key
from maze_train.data.replay_sampling import NStepWalker, Walk
from maze_train.data.rollout import Rollout

ACHIEVED, DESIRED = GOALS = ("achieved_goal", "desired_goal")

Strategy: TypeAlias = Literal["future", "final", "episode"]
STRATEGIES = ("future", "final", "episode")

MAX_DIFFERENCES = 1e-4
"""Tolerated fraction of steps with a recomputed reward that differs from the recorded one. Goals
are stored as float32, and rounding may move goals across a success threshold."""


class GoalTask:
    """Rewards and terminations of an environment as functions of goals.

    `compute_reward(achieved, desired, {})` receives goals `[n, ...]` in the dtype of their space
    and returns n rewards. The optional `compute_terminated(achieved, desired, {})` receives the
    goals of one step and returns whether the step terminates the episode. Methods of outer wrappers
    take precedence. The results must depend only on the arguments.

    Args:
        env: The environment.
        dtype: Dtype of the goals, see `goal_dtype`.

    Raises:
        EnvError: If the environment has no `compute_reward`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], dtype: np.dtype[Any]) -> None:
        self._name = type(env.unwrapped).__name__
        self._dtype = dtype
        if not env.has_wrapper_attr("compute_reward"):
            raise EnvError(
                "hindsight replay requires an environment with compute_reward(achieved_goal, "
                f"desired_goal, info), which {self._name} does not have: implement the method, "
                "or use another replay buffer"
            )
        self._compute_reward = env.get_wrapper_attr("compute_reward")
        self._compute_terminated: Callable[[Array, Array, dict[str, Any]], Any] | None = None
        if env.has_wrapper_attr("compute_terminated"):
            self._compute_terminated = env.get_wrapper_attr("compute_terminated")

    def rewards(self, achieved: Array, desired: Array) -> Array:
        """Return the rewards of n steps with goals `[n, ...]`, `[n]` float32.

        Raises:
            EnvError: If `compute_reward` fails or does not return n finite values.
        """
        goals = achieved.astype(self._dtype), desired.astype(self._dtype)
        try:
            rewards = np.asarray(self._compute_reward(*goals, {}), np.float32)
        except Exception as error:
            raise self._failed("compute_reward", error) from error
        if rewards.shape != (len(achieved),) or not np.isfinite(rewards).all():
            raise EnvError(
                f"compute_reward of {self._name} returned {rewards} for goals of shape "
                f"{list(achieved.shape)}: expected {len(achieved)} finite values, one per goal"
            )
        return rewards

    def terminal(self, achieved: Array, desired: Array) -> Array | None:
        """Return whether each step is terminal, `[n]` bool.

        Returns None if the environment has no `compute_terminated`.

        Raises:
            EnvError: If `compute_terminated` fails.
        """
        if self._compute_terminated is None:
            return None
        goals = zip(achieved.astype(self._dtype), desired.astype(self._dtype), strict=True)
        try:
            return np.array([bool(self._compute_terminated(*pair, {})) for pair in goals], bool)
        except Exception as error:
            raise self._failed("compute_terminated", error) from error

    def _failed(self, function: str, error: Exception) -> EnvError:
        return EnvError(
            f"{function} of {self._name} raised {type(error).__name__}: {error}; the arguments are "
            "goals and an empty info"
        )


class Hindsight:
    """Hindsight experience replay: relabels samples with goals achieved in the same episode.

    With probability k / (k + 1), the desired goal of a sample from a finished episode is replaced
    by the achieved goal of a step of the same episode, sampled uniformly: this or a later step
    (`future`), the last step (`final`), or any step (`episode`). Rewards are recomputed with
    `compute_reward`, and terminations with `compute_terminated` if the environment defines this
    method. An n-step sample has one goal, which is sampled for the first step of the sample.
    Samples of unfinished episodes are not relabelled.

    A dropped or interrupted episode counts as finished. If the first steps of an episode are
    overwritten, goals are sampled from the remaining steps.

    Args:
        walker: N-step walker of the buffer's memory.
        generator: Random number generator of the buffer.
        strategy: Steps from which goals are sampled: `future`, `final` or `episode`.
        relabelled_per_original: k, ratio of relabelled to original samples, >= 0.

    Raises:
        ConfigError: If a setting is out of range.
        SpaceError: If observations have no goals.

    Source: Andrychowicz et al. (2017), arXiv:1707.01495, algorithm 1 and section 4.5.
    """

    entry_nbytes = 2 * np.dtype(np.int32).itemsize
    """Additional bytes per transition."""

    def __init__(
        self,
        walker: NStepWalker,
        generator: torch.Generator,
        *,
        strategy: Strategy,
        relabelled_per_original: float,
    ) -> None:
        check_one_of("strategy", strategy, STRATEGIES)
        check_at_least("relabelled_per_original", relabelled_per_original, 0)
        self._walker, self._generator = walker, generator
        self._memory = walker.memory
        self._goal_dtype = goal_dtype(self._memory.layout.observation_space)
        self._strategy = strategy
        self._share = relabelled_per_original / (relabelled_per_original + 1)
        self._task: GoalTask | None = None
        self._num_compared = self._num_different = 0
        # Distance in rows to the last and to the first step of the episode, by index. In `_after`,
        # -1 means that the episode has not finished.
        self._after, self._before = np.zeros((2, self._memory.ring.size), np.int32)
        self._begin = np.zeros(self._memory.ring.num_envs, np.int64)
        self._num_followed = 0

    def use_environment(self, env: gymnasium.Env[Any, Any]) -> None:
        """Use the reward function of an environment.

        Raises:
            EnvError: If the environment has no `compute_reward`.
        """
        self._task = GoalTask(env, self._goal_dtype)

    def check(self, rollout: Rollout) -> None:
        """Raise EnvError if the final observation of a terminated episode is not finite.

        With a new goal, the step might not be terminal. The target then requires the value of the
        final observation.

        Raises:
            EnvError: If a final observation is not finite. The message names the leaf.
        """
        for key, leaf in leaves_by_key(rollout.final_obs).items():
            if not leaf.isfinite().all():
                raise EnvError(
                    f"the last observation of an episode is not finite in {key!r}: hindsight "
                    "replay also bootstraps from terminated episodes, so all observations "
                    "must be finite"
                )

    def follow(self, before: int) -> None:
        """Update the episode index after rows from `before` up to the head were written.

        Raises:
            TrainingError: If `use_environment` was not called.
            EnvError: If recorded rewards or terminations contradict the goals.
        """
        self._after[self._memory.changed] = -1
        self._follow_episodes()
        self._compare(before)

    def reload(self) -> None:
        """Rebuild the episode index after the memory was loaded from a state."""
        self._begin[:] = self._num_followed = self._memory.oldest
        self._after[:] = -1
        self._follow_episodes()

    def relabel(self, positions: Array, walk: Walk) -> tuple[Array, Array]:
        """Sample goals for the samples at positions `[n]`, and update their walks in place.

        Returns:
            Indices of the relabelled samples, `[m]`, and their goals, `[m, ...]`.
        """
        samples, goal_steps = self._draw_goals(positions)
        goals, _ = self._goals_after(goal_steps)
        if samples.size:
            replacement = self._walk_towards(positions[samples], goals)
            for column, replaced in zip(walk, replacement, strict=True):
                column[samples] = replaced
        return samples, goals

    @staticmethod
    def write_goals(obs: TensorTree, next_obs: TensorTree, samples: Array, goals: Array) -> None:
        """Replace the desired goals in observations with goals returned by `relabel`."""
        where, desired = torch.from_numpy(samples), torch.from_numpy(goals)
        for tree in (obs, next_obs):
            leaf = leaves_by_key(tree)[DESIRED]
            leaf[where.to(leaf.device)] = desired.to(leaf.device)

    def _follow_episodes(self) -> None:
        """Record the boundaries of episodes that finished in the new rows."""
        memory, ring, oldest = self._memory, self._memory.ring, self._memory.oldest
        first = max(self._num_followed, oldest)
        slots = np.arange(first, memory.head) % ring.num_slots
        ends = memory.end.reshape(ring.num_slots, ring.num_envs)[slots]
        for k, env in np.argwhere(is_followed_by_new(ends)):
            rows = np.arange(max(self._begin[env], oldest), first + k + 1)
            indices = rows % ring.num_slots * ring.num_envs + env
            steps = np.flatnonzero(is_transition(memory.end[indices]))
            if steps.size:
                self._before[indices[steps]] = steps - steps[0]
                self._after[indices[steps]] = steps[-1] - steps
            self._begin[env] = first + k + 1
        self._num_followed = memory.head

    def _compare(self, first: int) -> None:
        """Raise EnvError if rewards or terminations in rows >= `first` contradict the goals."""
        memory, num_envs = self._memory, self._memory.ring.num_envs
        positions = np.arange(max(first, memory.oldest) * num_envs, memory.head * num_envs)
        positions = positions[memory.is_transition(positions)]
        if not positions.size:
            return
        indices = positions % memory.ring.size
        stored, ended = memory.rewards[indices], is_terminated(memory.end[indices])
        achieved, desired = self._goals_after(positions)
        rewards, terminal = self._judged(achieved, desired, ended)
        same = np.isclose(rewards, stored, rtol=1e-4, atol=1e-5) & (terminal == ended)
        if not same.all():  # The goal may move: the reward depends on the goal before the step.
            moved = np.flatnonzero(~same)
            leaves = memory.observations(positions[moved], (DESIRED,))
            pursued = leaves[DESIRED].cpu().numpy()
            other, over = self._judged(achieved[moved], pursued, ended[moved])
            same[moved] = np.isclose(other, stored[moved], rtol=1e-4, atol=1e-5)
            same[moved] &= over == ended[moved]
        self._num_compared += len(positions)
        self._num_different += int((~same).sum())
        if self._num_different > 2 + MAX_DIFFERENCES * self._num_compared:
            k = np.flatnonzero(~same)[-1]
            raise EnvError(
                f"a step to the achieved goal {achieved[k]} with the desired goal {desired[k]} had "
                f"the reward {stored[k]:g} and terminated={bool(ended[k])}, but for these goals "
                f"the environment returns {rewards[k]:g} and {bool(terminal[k])}: hindsight replay "
                "requires rewards that depend only on the goals. Remove wrappers that change "
                "rewards, terminations or goals, or implement compute_reward and "
                "compute_terminated in the outermost wrapper"
            )

    def _draw_goals(self, positions: Array) -> tuple[Array, Array]:
        """Choose random samples to relabel, and the positions of their goal steps, `[m]` each."""
        memory, ring = self._memory, self._memory.ring
        is_chosen, place = self._draw(2, len(positions))
        after = self._after[positions % ring.size]
        samples = np.flatnonzero((is_chosen < self._share) & (after >= 0))
        first, after = positions[samples], after[samples].astype(np.int64)
        if self._strategy == "final":
            return samples, first + after * ring.num_envs
        before = np.zeros_like(after)
        if self._strategy == "episode":
            before = self._before[first % ring.size]
            before = np.minimum(before, first // ring.num_envs - memory.oldest)

        def goal_steps(which: Array, place: Array) -> Array:
            rows = (place * (before + after + 1)[which]).astype(np.int64) - before[which]
            reached: Array = first[which] + rows * ring.num_envs
            return reached

        steps = goal_steps(np.arange(len(samples)), place[samples])
        if memory.has_waiting:
            while (waiting := np.flatnonzero(~memory.is_transition(steps))).size:
                steps[waiting] = goal_steps(waiting, self._draw(waiting.size))
        return samples, steps

    def _draw(self, *shape: int) -> Array:
        drawn: Array = torch.rand(shape, dtype=torch.float64, generator=self._generator).numpy()
        return drawn

    def _walk_towards(self, positions: Array, goals: Array) -> Walk:
        """Walk up to n steps from positions `[m]` with new goals `[m, ...]`."""
        steps = self._walker.steps_from(positions)
        numbers, samples = np.nonzero(steps.counts)
        counts = steps.counts.copy()
        rewards, terminal = np.zeros(counts.shape, np.float32), np.zeros(counts.shape, bool)
        achieved, _ = self._goals_after(steps.where[numbers, samples])
        ended = is_terminated(steps.end[counts])
        rewards[counts], terminal[counts] = self._judged(achieved, goals[samples], ended)
        # Ignore rewards after a terminal step.
        counts[1:] &= ~np.logical_or.accumulate(terminal, axis=0)[:-1]
        return self._walker.join(steps._replace(counts=counts), rewards, terminal)

    def _judged(self, achieved: Array, desired: Array, ended: Array) -> tuple[Array, Array]:
        """Compute the rewards and terminations of steps for new goals, `[k]` each.

        Args:
            achieved: Achieved goals after the steps, `[k, ...]`.
            desired: Desired goals, `[k, ...]`.
            ended: Recorded terminations, `[k]`; used if the environment has no
                `compute_terminated`.
        """
        if self._task is None:
            problem = "the replay buffer has no environment: call use_environment(make_env) first"
            raise TrainingError(problem)
        terminal = self._task.terminal(achieved, desired)
        return self._task.rewards(achieved, desired), ended if terminal is None else terminal

    def _goals_after(self, positions: Array) -> tuple[Array, Array]:
        """Return achieved and desired goals after the steps at positions `[k]`, `[k, ...]` each."""
        memory = self._memory
        leaves = memory.observations(positions + memory.ring.num_envs, GOALS)
        end = memory.end[positions % memory.ring.size]
        at_final = np.flatnonzero(memory.has_final_obs(end))
        if at_final.size:
            memory.put_final_obs(leaves, at_final, positions[at_final])
        return leaves[ACHIEVED].cpu().numpy(), leaves[DESIRED].cpu().numpy()


def goal_dtype(observation_space: spaces.Space[Any]) -> np.dtype[Any]:
    """Return the dtype of the goals.

    Raises:
        SpaceError: If the observations have no goals, or the two goals differ in shape or dtype.
    """
    parts: dict[str, spaces.Space[Any]] = {}
    if isinstance(observation_space, spaces.Dict):
        parts = dict(observation_space.spaces)
    found = [(parts[key].shape, parts[key].dtype) for key in GOALS if key in parts]
    if len(found) != len(GOALS) or found[0] != found[1]:
        raise SpaceError(
            "hindsight replay requires Dict observations with arrays achieved_goal and "
            f"desired_goal of the same shape and dtype, got {observation_space}: use a goal-based "
            "environment, or the replay buffer uniform or prioritized"
        )
    return np.dtype(found[0][1])
