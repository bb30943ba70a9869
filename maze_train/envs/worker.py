"""A worker that steps a slice of the environments of a vector environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.envs.buffers import StepBuffers
from maze_train.envs.building import build_envs, close_all
from maze_train.envs.layers import offers_own_state
from maze_train.envs.stepping import EnvSlice
from maze_train.envs.wrappers import described_metadata
from maze_train.errors import EnvError
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import gymnasium

    from maze_train.envs.journal import EpisodeRecord
    from maze_train.envs.stepping import StepReport
    from maze_train.workers.messages import Portable
    from maze_train.workers.pool import WorkerContext

__all__ = ["EnvWorker"]


class EnvWorker:
    """The environments `first, first + 1, ...` of a vector environment.

    Args:
        factories: Functions that build them.
        first: Index of the first one.
        num_envs: Number of environments of the whole vector environment.
        step_infos: Whether to report the infos of every step.
        on_non_finite: Reaction to numbers that are not finite.
        context: Where it lives.
    """

    def __init__(
        self,
        factories: Portable[Sequence[Callable[[], gymnasium.Env[Any, Any]]]],
        first: int,
        num_envs: int,
        step_infos: bool,
        on_non_finite: str,
        context: WorkerContext,
    ) -> None:
        self._first, self._num_envs = first, num_envs
        self._settings: dict[str, Any] = {
            "step_infos": step_infos,
            "on_non_finite": on_non_finite,
        }
        self._context = context
        self._envs = build_envs(factories.value, first)

    def describe(self) -> tuple[Any, Any, Any, Any, bool]:
        """Spaces, metadata and render mode, and whether an environment offers its state."""
        env, offers = self._envs[0], any(map(offers_own_state, self._envs))
        metadata = described_metadata(env)
        return env.observation_space, env.action_space, metadata, env.render_mode, offers

    def map(self, memory: Any) -> None:
        """Step into memory of the whole vector environment from now on."""
        envs = self._envs
        observation, action = FlatView(envs[0].observation_space), FlatView(envs[0].action_space)
        buffers = StepBuffers.over(memory.buffer, observation, action, self._num_envs)
        self._slice = EnvSlice(
            envs,
            buffers.rows(self._first, self._first + len(envs)),
            first=self._first,
            num_envs=self._num_envs,
            **self._settings,
        )

    def step(self) -> StepReport | None:
        """Step every environment once, see `EnvSlice`."""
        return self._slice.step()

    def reset(self, seed: int, options: dict[str, Any] | None) -> StepReport:
        """Start a run of episodes, see `EnvSlice`."""
        return self._slice.reset(seed, options)

    def begin(self, seed: int, started: Sequence[int]) -> StepReport:
        """Begin new episodes, see `EnvSlice`."""
        return self._slice.begin(seed, started)

    def restore(
        self, seed: int, records: Sequence[EpisodeRecord], allow_new_episodes: bool
    ) -> list[tuple[int, str]]:
        """Put the environments back, see `EnvSlice`."""
        return self._slice.restore(
            seed, records, allow_new_episodes=allow_new_episodes, progress=self._context.count
        )

    def own_states(self) -> list[dict[str, Any] | None] | str:
        """States that environments give of themselves; a text if they can not."""
        try:
            return self._slice.own_states()
        except EnvError as error:
            return str(error)

    def close(self) -> None:
        """Close the environments."""
        close_all(self._envs)
