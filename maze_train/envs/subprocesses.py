"""Gymnasium-style constructor of vector environments in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from maze_train.envs.autoreset import AutoresetVectorEnv
from maze_train.envs.types import Env
from maze_train.workers.process_pool import LocalProcesses


def SubprocVectorEnv(  # noqa: N802 (established name)
    env_factories: Sequence[Callable[[], Env]],
    *,
    n_workers: int = 0,
    start_method: str = "forkserver",
    timeout_s: float = 300.0,
    on_worker_failure: str = "fail",
    max_worker_restarts: int = 10,
    **settings: Any,
) -> AutoresetVectorEnv:
    """Create a vector environment in processes; see `LocalProcesses` for the arguments.

    `**settings` are arguments of `AutoresetVectorEnv` and `PooledVectorEnv`.
    """
    backend = LocalProcesses(
        n_workers, timeout_s, on_worker_failure, max_worker_restarts, start_method
    )
    return AutoresetVectorEnv(env_factories, backend, **settings)
