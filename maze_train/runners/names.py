"""Names of runners for a place; here one class runs in every place."""

from maze_train.runners.actor_critic import ACRunner
from maze_train.runners.bc import BCRunner
from maze_train.runners.es import ESMasterRunner
from maze_train.runners.impala import ImpalaRunner
from maze_train.runners.off_policy import SACRunner

ACDevRunner = ACLocalRunner = ACRunner
BCDevRunner = BCLocalRunner = BCRunner
ESDevRunner = ESLocalRunner = ESMasterRunner
ImpalaDevRunner = ImpalaLocalRunner = ImpalaRunner
SACDevRunner = SACLocalRunner = SACRunner
