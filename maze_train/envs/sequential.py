"""Many environments in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from maze_train.checks import check_one_of
from maze_train.envs.buffers import StepBuffers
from maze_train.envs.building import build_envs
from maze_train.envs.journal import Journal
from maze_train.envs.journaled import JournaledVectorEnv
from maze_train.envs.stepping import ON_NON_FINITE, EnvSlice
from maze_train.envs.wrappers import described_metadata
from maze_train.errors import ConfigError
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import gymnasium

    from maze_train.envs.journal import EpisodeRecord
    from maze_train.envs.vector import ArrayTree, StepResult

__all__ = ["SequentialVectorEnv"]


class SequentialVectorEnv(JournaledVectorEnv):
    """Steps its environments one after the other in the calling process.

    The fastest choice for environments that take microseconds, and the easiest one to debug.
    Observations, copies and infos are described at `MazeVectorEnv`.

    Args:
        env_factories: One function per environment, each of which returns a new environment.
        copy: Whether to return copies of the observations instead of the internal buffers.
        step_infos: Whether to return the infos of every step.
        on_non_finite: Reaction to NaN and infinities in rewards, observations, and last
            observations of truncated episodes: `raise`, or `skip`: the episode is given up as
            described at `MazeVectorEnv`. In the first observation of an episode they are always an
            error.
        can_be_restored: Whether the actions of running episodes are kept, so that `state_dict` can
            tell where the environments are. They take memory until an episode ends.
        first_env: Number of the first environment in messages.

    Raises:
        ConfigError: If there is no factory, or one refuses its settings, or an argument is out of
            its range.
        EnvError: If an environment can not be built, or differs in its spaces from the
            first.
        SpaceError: If a space can not be flattened.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        copy: bool = False,
        step_infos: bool = False,
        on_non_finite: Literal["raise", "skip"] = "raise",
        can_be_restored: bool = True,
        first_env: int = 0,
    ) -> None:
        super().__init__(copy=copy, step_infos=step_infos)
        self.first_env = first_env
        check_one_of("on_non_finite", on_non_finite, ON_NON_FINITE)
        if not env_factories:
            raise ConfigError("env_factories", "expected at least one factory", env_factories)
        self.envs = build_envs(env_factories, first_env)
        env, n = self.envs[0], len(self.envs)
        self._describe(env.observation_space, env.action_space, n, described_metadata(env))
        self.render_mode = env.render_mode
        observation = FlatView(env.observation_space)
        memory = np.zeros(StepBuffers.nbytes(observation, self._action, n), np.uint8)
        self._buffers = StepBuffers.over(memory, observation, self._action, n)
        self.can_be_restored = can_be_restored
        self._journal = Journal(self._buffers.actions, keeps_actions=can_be_restored)
        self._slice = EnvSlice(
            self.envs,
            self._buffers,
            number=first_env,
            step_infos=step_infos,
            on_non_finite=on_non_finite,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Start a run of episodes.

        Args:
            seed: Names the run of episodes, an integer >= 0; None draws one.
            options: Passed to the reset of every environment, not to later autoresets.

        Returns:
            The first observations, [num_envs, ...], and the infos of the resets.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        self._check_not_stepping("reset()")
        self._journal.begin(options)
        try:
            report = self._slice.reset(self._seed_for(seed), options)
        except BaseException:
            self._journal.invalidate()
            raise
        return self._observations(), self._infos(report)

    def _finish_step(self) -> StepResult:
        try:
            report = self._slice.step()
        except BaseException:
            self._journal.invalidate()
            raise
        return self._step_result(report)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        if hasattr(self, "_slice"):
            self._slice.close()

    def _own_states(self) -> Sequence[dict[str, Any] | None]:
        return self._slice.own_states()

    def _restore(
        self, root: int, records: Sequence[EpisodeRecord], allow_new_episodes: bool
    ) -> list[tuple[int, str]]:
        self._journal.invalidate()
        return self._slice.restore(root, records, allow_new_episodes=allow_new_episodes)
