"""Names of actors, populations and their workers; here one class works in every place."""

from maze_train.rollout.actors import DistributedActors
from maze_train.rollout.es_rollouts import ESDistributedRollouts
from maze_train.rollout.player import PlayerWorker
from maze_train.workers.pool import CallCancelledError

SequentialDistributedActors = SubprocDistributedActors = DistributedActors
ESDummyDistributedRollouts = ESSubprocDistributedRollouts = ESDistributedRollouts
ESRolloutWorkerWrapper = PlayerWorker
ESAbortException = CallCancelledError
