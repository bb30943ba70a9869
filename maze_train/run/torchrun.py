"""Runs with several processes, started by torchrun."""

from __future__ import annotations

import logging

from maze_train.config.train_config import TrainConfig
from maze_train.core.errors import ConfigError
from maze_train.core.notices import CONSOLE
from maze_train.core.targets import InlineObject
from maze_train.core.torchrun import TorchrunVariables
from maze_train.learner.torchrun import TorchrunRanks


def joined(config: TrainConfig, variables: TorchrunVariables) -> TorchrunRanks:
    """Join the other processes of the run; notes are only printed in the first process.

    Raises:
        ConfigError: If a setting does not support several processes; see also `TorchrunRanks`.
    """
    _check(config, variables.count)
    processes = TorchrunRanks(variables)
    CONSOLE.setLevel(logging.INFO if processes.is_first else logging.ERROR)
    return processes


def _check(config: TrainConfig, count: int) -> None:
    """Check that the settings support several processes.

    Raises:
        ConfigError: If a setting does not support several processes.
    """
    algorithm, learners, runner = config.algorithm, config.learner_group, config.runner
    name, target = algorithm.name, config.env.target
    shared = {f"algorithm.{key}": algorithm.value_of(key) for key in algorithm.shared_settings}
    shared["runner.concurrency"] = runner.concurrency
    for key, value, is_wrong, problem in (
        (
            "algorithm",
            name,
            algorithm.without_torchrun,
            f"not supported with torchrun: {algorithm.without_torchrun}",
        ),
        (
            "learner_group.n_learners",
            learners.n_learners,
            learners.n_learners > 1,
            "each process of torchrun is a learner; expected 1, and torchrun --nproc-per-node",
        ),
        ("runner", runner.name, runner.name == "ray", "expected dev or local with torchrun"),
        (
            "runner.envs_per_actor",
            runner.envs_per_actor,
            runner.envs_per_actor,
            "not supported with torchrun, since its processes collect in parallel; expected 0",
        ),
        *(
            (key, number, number % count, f"expected a multiple of the {count} processes")
            for key, number in shared.items()
        ),
        (
            "policies",
            list(config.policies),
            any(policy.opponents is not None for policy in config.policies.values()),
            "self-play against snapshots is not supported with torchrun; expected opponents=null",
        ),
        (
            "env",
            target,
            isinstance(target, InlineObject) and target.is_instance(),
            "an instance of a vector environment cannot be shared by the processes of torchrun; "
            "use a class or function",
        ),
    ):
        if is_wrong:
            raise ConfigError(key, problem, value)
