"""Hindsight experience replay: transitions with goals that the agent reached later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.checks import check_at_least, check_one_of
from maze_train.core.errors import EnvError, SpaceError, TrainingError
from maze_train.core.types import Array, TensorTree, leaves_by_key
from maze_train.data.replay import Transitions, UniformReplayBuffer, Walk
from maze_train.data.replay_memory import ENDS, FINAL_OBS, TERMINATED, VALID
from maze_train.data.rollout import Rollout

ACHIEVED, DESIRED = GOALS = ("achieved_goal", "desired_goal")

STRATEGIES = ("future", "final", "episode")

MOST_DIFFERENCES = 1e-4
"""Share of the steps whose reward may be another one than the environment gave: goals are stored as
float32, which may move one over the edge of a threshold."""


class GoalTask:
    """Rewards and ends of an environment as functions of goals.

    `compute_reward(achieved, desired, {})` gets goals `[n, ...]` in the data type of their space,
    and gives n rewards. `compute_terminated(achieved, desired, {})`, where there is one, gets the
    goals of one step, and says whether it ends the episode. Both are looked for in the wrappers of
    the environment, the outermost first, and may depend on nothing else.

    Args:
        env: The environment.
        dtype: Data type of goals.

    Raises:
        EnvError: If the environment has no `compute_reward`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], dtype: np.dtype[Any]) -> None:
        self._name = type(env.unwrapped).__name__
        self._dtype = dtype
        if not env.has_wrapper_attr("compute_reward"):
            raise EnvError(
                "hindsight replay needs an environment with compute_reward(achieved_goal, "
                f"desired_goal, info), which {self._name} does not have: give it one, or use "
                "another replay buffer"
            )
        self._compute_reward = env.get_wrapper_attr("compute_reward")
        self._compute_terminated: Callable[[Array, Array, dict[str, Any]], Any] | None = None
        if env.has_wrapper_attr("compute_terminated"):
            self._compute_terminated = env.get_wrapper_attr("compute_terminated")

    def rewards(self, achieved: Array, desired: Array) -> Array:
        """Rewards of n steps by the goals `[n, ...]` after them, `[n]` float32.

        Raises:
            EnvError: If the environment raises, or gives something else than n finite numbers.
        """
        goals = achieved.astype(self._dtype), desired.astype(self._dtype)
        try:
            rewards = np.asarray(self._compute_reward(*goals, {}), np.float32)
        except Exception as error:
            raise self._failed("compute_reward", error) from error
        if rewards.shape != (len(achieved),) or not np.isfinite(rewards).all():
            raise EnvError(
                f"compute_reward of {self._name} gave {rewards} for goals of shape "
                f"{list(achieved.shape)}: expected {len(achieved)} finite numbers, one for each"
            )
        return rewards

    def terminal(self, achieved: Array, desired: Array) -> Array | None:
        """Whether n steps end the episode, `[n]` bool; None: the goals do not say.

        Raises:
            EnvError: If the environment raises.
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
            f"{function} of {self._name} raised {type(error).__name__}: {error}; it is called with "
            "goals and an empty info"
        )


class HindsightReplayBuffer(UniformReplayBuffer):
    """A replay buffer that gives most samples a goal which their episode reached.

    Of a sample from an episode that is over, the desired goal is replaced with probability
    k / (k + 1) by the achieved goal after another step of the episode: a later one or its own
    (`future`), the last one (`final`), or any (`episode`); all that come into question are equally
    likely. Rewards are those of `compute_reward` for this goal. A step is terminal where
    `compute_terminated` says so; without that function it stays what it was. Samples of several
    steps have one goal, drawn for the first of them. Samples of running episodes keep their goals,
    and so does the last share of 1 / (k + 1).

    An episode that is lost or interrupted is over with its last step, and of one whose first steps
    are overwritten the others count.

    `use_environment` has to be called first. Stored rewards and ends are compared with the results
    of the functions of the environment.

    Args:
        buffer_size: As for `UniformReplayBuffer`.
        observation_space: A Dict with arrays `achieved_goal` and `desired_goal` of one shape and
            data type, and more.
        actions: As for `UniformReplayBuffer`.
        strategy: Where goals come from: `future`, `final` or `episode`.
        relabelled_per_original: k, samples with another goal for each one with its own. >= 0.
        **settings: All other arguments of `UniformReplayBuffer`.

    Raises:
        ConfigError: If a setting is out of range.
        SpaceError: If observations have no goals.

    Source: Andrychowicz et al. (2017), arXiv:1707.01495, algorithm 1 and section 4.5.
    """

    keeps_terminal_obs = True
    entry_nbytes: ClassVar[int] = 2 * np.dtype(np.int32).itemsize

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        *,
        strategy: Literal["future", "final", "episode"] = "future",
        relabelled_per_original: float = 4,
        **settings: Any,
    ) -> None:
        check_one_of("strategy", strategy, STRATEGIES)
        check_at_least("relabelled_per_original", relabelled_per_original, 0)
        self._goal_dtype = goal_dtype(observation_space)
        super().__init__(buffer_size, observation_space, actions, **settings)
        self._strategy = strategy
        self._share = relabelled_per_original / (relabelled_per_original + 1)
        self._task: GoalTask | None = None
        self._num_compared = self._num_different = 0
        # Steps of the same episode after and before each, by index; -1 after: it is running.
        self._after, self._before = np.zeros((2, self._memory.ring.size), np.int32)
        self._begin = np.zeros(self.num_envs, np.int64)
        self._num_followed = 0

    def use_environment(self, make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:
        """Take the functions of an environment that rewards are computed with.

        Raises:
            EnvError: If it has no `compute_reward`.
        """
        self._task = GoalTask(make_env(), self._goal_dtype)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        super().load_state_dict(state)
        self._begin[:] = self._num_followed = self._memory.oldest
        self._after[:] = -1
        self._follow_episodes()

    def _add(self, rollout: Rollout) -> None:
        before = self._memory.head
        _check_finite(rollout.final_obs)
        super()._add(rollout)
        self._after[self._memory.changed] = -1
        self._follow_episodes()
        self._compare(before)

    def _follow_episodes(self) -> None:
        """Note which of the new rows belong to one episode, where it is over."""
        ring, oldest = self._memory.ring, self._memory.oldest
        first = max(self._num_followed, oldest)
        slots = np.arange(first, self._memory.head) % ring.num_slots
        flags = self._memory.flags.reshape(ring.num_slots, ring.num_envs)[slots]
        is_step = (flags & VALID) != 0
        for k, env in np.argwhere(((flags & ENDS) != 0) | ~is_step):
            rows = np.arange(max(self._begin[env], oldest), first + k + is_step[k, env])
            indices = rows % ring.num_slots * ring.num_envs + env
            self._before[indices] = np.arange(len(rows))
            self._after[indices] = np.arange(len(rows))[::-1]
            self._begin[env] = first + k + 1
        self._num_followed = self._memory.head

    def _compare(self, first: int) -> None:
        """Refuse rewards and ends, of rows from the first on, that goals do not explain.

        Raises:
            TrainingError: If there is no environment yet.
            EnvError: If they are others than the environment gives for their goals.
        """
        memory, num_envs = self._memory, self.num_envs
        positions = np.arange(max(first, memory.oldest) * num_envs, memory.head * num_envs)
        positions = positions[self._is_valid(positions)]
        if not positions.size:
            return
        indices = positions % memory.ring.size
        flags = memory.flags[indices]
        achieved, desired = self._goals_after(positions)
        rewards, terminal = self._judged(achieved, desired, flags)
        same = np.isclose(rewards, memory.rewards[indices], rtol=1e-4, atol=1e-5)
        same &= terminal == ((flags & TERMINATED) != 0)
        self._num_compared += len(positions)
        self._num_different += int((~same).sum())
        if self._num_different > 2 + MOST_DIFFERENCES * self._num_compared:
            k = np.flatnonzero(~same)[-1]
            raise EnvError(
                f"a step to the achieved goal {achieved[k]} with the desired goal {desired[k]} had "
                f"the reward {memory.rewards[indices[k]]:g} and terminated="
                f"{bool(flags[k] & TERMINATED)}, but for these goals the environment gives "
                f"{rewards[k]:g} and {bool(terminal[k])}: hindsight replay needs rewards that "
                "follow from goals alone. Leave out wrappers that change rewards, ends or goals, "
                "or give the outermost one compute_reward and compute_terminated"
            )

    def _gather(self, positions: Array) -> Transitions:
        samples, goal_steps = self._draw_goals(positions)
        if not samples.size:
            return super()._gather(positions)
        goals, _ = self._goals_after(goal_steps)
        walk = self._walk(positions)
        replacement = self._walk_towards(positions[samples], goals)
        for column, replaced in zip(walk, replacement, strict=True):
            column[samples] = replaced
        batch = self._transitions(positions, walk)
        where, desired = torch.from_numpy(samples), torch.from_numpy(goals)
        for tree in (batch.obs, batch.next_obs):
            assert isinstance(tree, dict)
            leaf = tree[DESIRED]
            leaf[where.to(leaf.device)] = desired.to(leaf.device)
        return batch

    def _draw_goals(self, positions: Array) -> tuple[Array, Array]:
        """Samples that get another goal, `[m]`, and the positions of the steps that reach it."""
        memory, ring = self._memory, self._memory.ring
        draws = torch.rand((2, len(positions)), dtype=torch.float64, generator=self._generator)
        is_chosen, place = draws.numpy()
        after = self._after[positions % ring.size]
        samples = np.flatnonzero((is_chosen < self._share) & (after >= 0))
        first, after = positions[samples], after[samples].astype(np.int64)
        if self._strategy == "final":
            return samples, first + after * ring.num_envs
        before = np.zeros_like(after)
        if self._strategy == "episode":
            before = self._before[first % ring.size]
            before = np.minimum(before, first // ring.num_envs - memory.oldest)
        steps = (place[samples] * (before + after + 1)).astype(np.int64) - before
        return samples, first + steps * ring.num_envs

    def _walk_towards(self, positions: Array, goals: Array) -> Walk:
        """Walk up to n steps from positions `[m]`, with other goals `[m, ...]`."""
        where, _, flags, counts = self._steps_from(positions)
        steps, samples = np.nonzero(counts)
        rewards, terminal = np.zeros(counts.shape, np.float32), np.zeros(counts.shape, bool)
        achieved, _ = self._goals_after(where[steps, samples])
        rewards[counts], terminal[counts] = self._judged(achieved, goals[samples], flags[counts])
        # No reward counts after a step that ends the episode.
        counts[1:] &= ~np.logical_or.accumulate(terminal, axis=0)[:-1]
        return self._summed(where, counts, rewards, flags, terminal)

    def _judged(self, achieved: Array, desired: Array, flags: Array) -> tuple[Array, Array]:
        """Rewards of steps to goals, and whether they are terminal, `[k]` each."""
        if self._task is None:
            problem = "the replay buffer knows no environment: call use_environment(make_env) first"
            raise TrainingError(problem)
        terminal = self._task.terminal(achieved, desired)
        if terminal is None:
            terminal = (flags & TERMINATED) != 0
        return self._task.rewards(achieved, desired), terminal

    def _goals_after(self, positions: Array) -> tuple[Array, Array]:
        """Achieved and desired goals after the steps at positions `[k]`, `[k, ...]` each."""
        memory = self._memory
        leaves = memory.observations(positions + self.num_envs, GOALS)
        at_final = np.flatnonzero(memory.flags[positions % memory.ring.size] & FINAL_OBS)
        if at_final.size:
            memory.put_final_obs(leaves, at_final, positions[at_final])
        return leaves[ACHIEVED].cpu().numpy(), leaves[DESIRED].cpu().numpy()


def _check_finite(final_obs: TensorTree) -> None:
    """Refuse last observations that are not finite, whether or not the episode terminated.

    With another goal the step may not be terminal, so that the value of its observation counts.

    Raises:
        EnvError: Naming the leaf.
    """
    for key, leaf in leaves_by_key(final_obs).items():
        if not leaf.isfinite().all():
            raise EnvError(
                f"the last observation of an episode is not finite in {key!r}: hindsight replay "
                "also learns from those of terminated episodes, so let the environment return "
                "finite numbers there"
            )


def goal_dtype(observation_space: spaces.Space[Any]) -> np.dtype[Any]:
    """The data type of goals.

    Raises:
        SpaceError: If the observations have none, or the two goals are unlike.
    """
    parts: dict[str, spaces.Space[Any]] = {}
    if isinstance(observation_space, spaces.Dict):
        parts = dict(observation_space.spaces)
    found = [(parts[key].shape, parts[key].dtype) for key in GOALS if key in parts]
    if len(found) != len(GOALS) or found[0] != found[1]:
        raise SpaceError(
            "hindsight replay needs Dict observations with arrays achieved_goal and desired_goal "
            f"of one shape and data type, the observation space is {observation_space}: take an "
            "environment with goals, or the buffer uniform or prioritized"
        )
    return np.dtype(found[0][1])
