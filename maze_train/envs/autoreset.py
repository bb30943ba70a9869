"""Vector environments with the autoreset modes of Gymnasium."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.step_end import StepBatch, has_ended, is_followed_by_new
from maze_train.envs.facade import infos_of
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.types import Env
from maze_train.envs.vector import Array, ArrayTree, StepResult
from maze_train.spaces.autoreset import AutoresetMode
from maze_train.workers.backends import WorkerBackend


class AutoresetVectorEnv(PooledVectorEnv, VectorEnv[Any, Any, Any]):
    """`PooledVectorEnv` with a choice of the autoreset mode.

    * SAME_STEP: see `MazeVectorEnv`.
    * NEXT_STEP: the last step of an episode returns its last observation. The next step ignores the
      action of this environment, resets it, and returns the first observation and reward 0.
    * DISABLED: the last step of an episode returns its last observation. The environment must be
      reset with `reset(options={"reset_mask": mask})` before the next step.

    Collectors, `state_dict` and restarts of workers require SAME_STEP.

    Args:
        env_factories: See `PooledVectorEnv`.
        backend: See `PooledVectorEnv`.
        autoreset_mode: The autoreset mode, or its value (`SameStep`, `NextStep`, `Disabled`).
        **settings: Other arguments of `PooledVectorEnv`.

    Raises:
        ConfigError: If the mode is unknown, or not SAME_STEP and failed workers are restarted; see
            also `PooledVectorEnv`.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], Env]],
        backend: WorkerBackend | None = None,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        **settings: Any,
    ) -> None:
        given = autoreset_mode
        value = given.value if isinstance(given, AutoresetMode) else given
        check_one_of("autoreset_mode", value, [mode.value for mode in AutoresetMode])
        mode = AutoresetMode(value)
        autoreset = mode is AutoresetMode.SAME_STEP
        if not autoreset and backend is not None and backend.may_restart:
            problem = "requires on_worker_failure='fail'; expected SameStep for restarts"
            raise ConfigError("autoreset_mode", problem, value)
        super().__init__(env_factories, backend, autoreset=autoreset, **settings)
        self.metadata["autoreset_mode"] = self.autoreset_mode = mode
        self._waiting = np.zeros(self.num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Begin new episodes in all environments, or in those of a mask; see `PooledVectorEnv`."""
        result = super().reset(seed=seed, options=options)
        self._waiting &= ~np.asarray((options or {}).get("reset_mask", True))
        return result

    def step_async(self, actions: Any) -> None:
        """Start a step in all workers; see `MazeVectorEnv`.

        Raises:
            EnvError: If an environment waits for a reset (mode DISABLED).
        """
        if self.autoreset_mode is AutoresetMode.DISABLED and self._waiting.any():
            rows = ", ".join(map(str, self._waiting.nonzero()[0]))
            raise EnvError(
                f"step() was called after the end of the episodes of environments {rows} "
                "(autoreset mode DISABLED): call reset(options={'reset_mask': mask}) first"
            )
        super().step_async(actions)

    def receive(self) -> StepBatch[Array]:
        """Wait for a step; see `MazeVectorEnv`.

        Raises:
            EnvError: If the autoreset mode is not SAME_STEP.
        """
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise EnvError(f"autoreset_mode = {self.autoreset_mode.value}: expected SameStep")
        return super().receive()

    def step_wait(self) -> StepResult:
        """Wait for the step started by `step_async`; see `MazeVectorEnv`."""
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return super().step_wait()
        batch, resetting = super().receive(), self._waiting
        self._waiting, ended = is_followed_by_new(batch.end), has_ended(batch.end)
        for key, column in self._buffers.obs.items():
            column[ended] = self._buffers.final_obs[key][ended]
        batch.rewards[resetting] = 0.0
        batch.infos = [*batch.infos, *((end.env, end.info) for end in batch.ends)]
        batch.ends = ()
        rows: list[int] = resetting.nonzero()[0].tolist()
        if rows:
            batch.infos += self._reset_rows(rows, None, {}).infos
        flags = batch.terminated, batch.truncated
        return self._observations(), batch.rewards, *flags, infos_of(batch, self.num_envs)


SequentialVectorEnv = AutoresetVectorEnv
"""Alias of `AutoresetVectorEnv`, which by default steps the environments in this process."""
