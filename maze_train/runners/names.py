"""Names of runners by algorithm and place: one runner runs every algorithm in every place."""

from maze_train.runners.base import TrainingRunner

ACRunner = ACDevRunner = ACLocalRunner = TrainingRunner
BCRunner = BCDevRunner = BCLocalRunner = TrainingRunner
ESMasterRunner = ESDevRunner = ESLocalRunner = TrainingRunner
ImpalaRunner = ImpalaDevRunner = ImpalaLocalRunner = TrainingRunner
SACRunner = SACDevRunner = SACLocalRunner = TrainingRunner
