"""Names of Maze for classes that serve every algorithm and place here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.algorithms.es.population import ESDistributedRollouts
from maze_train.collect.actors import DistributedActors
from maze_train.collect.player import PlayerWorker
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.run.runner import TrainingRunner
from maze_train.workers.pool import CallCancelledError
from maze_train.workers.process_pool import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import gymnasium


SequentialVectorEnv = PooledVectorEnv
"""Steps in this process where no place is given."""


def SubprocVectorEnv(  # noqa: N802 (the name that users know)
    env_factories: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
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


ACRunner = ACDevRunner = ACLocalRunner = TrainingRunner
BCRunner = BCDevRunner = BCLocalRunner = TrainingRunner
ESMasterRunner = ESDevRunner = ESLocalRunner = TrainingRunner
ImpalaRunner = ImpalaDevRunner = ImpalaLocalRunner = TrainingRunner
SACRunner = SACDevRunner = SACLocalRunner = TrainingRunner


SequentialDistributedActors = SubprocDistributedActors = DistributedActors
ESDummyDistributedRollouts = ESSubprocDistributedRollouts = ESDistributedRollouts
ESRolloutWorkerWrapper = PlayerWorker
ESAbortException = CallCancelledError
