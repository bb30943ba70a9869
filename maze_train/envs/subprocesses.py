"""A vector environment that steps in worker processes, for users of gymnasium's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.types import Env
from maze_train.workers.process_pool import LocalProcesses


def SubprocVectorEnv(  # noqa: N802 (the name that users know)
    env_factories: Sequence[Callable[[], Env]],
    *,
    n_workers: int = 0,
    start_method: str = "forkserver",
    timeout_s: float = 300.0,
    on_worker_failure: str = "fail",
    max_worker_restarts: int = 10,
    **settings: Any,
) -> PooledVectorEnv:
    """A vector environment that steps in processes; the arguments are those of `LocalProcesses`.

    `**settings` are those of `PooledVectorEnv`.
    """
    place = LocalProcesses(
        n_workers, timeout_s, on_worker_failure, max_worker_restarts, start_method
    )
    return PooledVectorEnv(env_factories, place, **settings)
