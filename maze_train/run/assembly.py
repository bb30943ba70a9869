"""Optional parts of a run, selected by the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze_train.config.train_config import TrainConfig
from maze_train.core.notices import notify
from maze_train.core.torchrun import TorchrunVariables

if TYPE_CHECKING:
    from maze_train.learner.parallel import SingleProcess
    from maze_train.run.base_policy import BasePolicy
    from maze_train.run.resuming import Resumption
    from maze_train.tracking.config import TrackingConfig
    from maze_train.tracking.tracker import MetricsWriter
    from maze_train.training.background import BackgroundEvaluator
    from maze_train.training.builder import AlgorithmBuilder
    from maze_train.training.callbacks import Callback
    from maze_train.training.evaluators import Evaluator
    from maze_train.training.features import AgentParts, BuildFeatures, ProcessParts


def build_writers(config: TrackingConfig) -> list[MetricsWriter]:
    """Build the configured writers; the console comes last, after all files are written.

    Raises:
        ConfigError: If an entry of `writers` cannot be built or is not a `MetricsWriter`.
        MissingExtraError: If a writer needs a package that is not installed.
    """
    from maze_train.core.targets import build_targets
    from maze_train.tracking import console, curves, tensorboard, tracker

    chosen: list[tuple[bool, type[MetricsWriter]]] = [
        (config.csv, tracker.CSVWriter),
        (config.tensorboard, tensorboard.TensorBoardWriter),
        (config.summary, tracker.JSONSummaryWriter),
        (config.plot, curves.LearningCurveWriter),
    ]
    writers = [writer() for is_on, writer in chosen if is_on]
    writers += build_targets(config.writers, "tracking.writers", tracker.MetricsWriter)
    return [*writers, console.ConsoleWriter(config.progress)]


class Assembly:
    """Builds the optional parts of a run.

    The runner calls this class instead of importing the parts, so a run only imports the parts that
    its settings require.
    """

    writers = staticmethod(build_writers)

    def processes_of(self, config: TrainConfig) -> SingleProcess:
        """Join the other processes of the run, if torchrun started this one.

        Raises:
            ConfigError: If the settings do not support torchrun; see `run.torchrun.joined`.
        """
        from maze_train.learner.parallel import SingleProcess

        variables = TorchrunVariables.read()
        if variables is None:
            if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
                text = "RANK and WORLD_SIZE are set, but not by torchrun: this process trains alone"
                notify(f"note: {text}")
            return SingleProcess()
        from maze_train.run.torchrun import joined

        return joined(config, variables)

    def parts_of(self, processes: SingleProcess) -> ProcessParts:
        """Return the parts of a trainer that depend on whether there are other processes."""
        from maze_train.training.features import ProcessParts

        if not processes.is_shared:
            return ProcessParts()
        from maze_train.training.processes import common_parts

        return common_parts(processes)

    def resumption_of(self, config: TrainConfig) -> Resumption | None:
        """Return the object that resumes a run; None for a new run."""
        if config.resume is None:
            return None
        from maze_train.run.resuming import Resumption, run_to_resume

        directory = run_to_resume(config)
        return None if directory is None else Resumption(directory, config.resume)

    def how_to_continue(self, run_dir: Path, config: TrainConfig) -> str:
        """Return the command that resumes the run in a directory."""
        from maze_train.run.resuming import resume_hint

        return resume_hint(run_dir, config)

    def base_policies(
        self, config: TrainConfig, resumed_dir: Path | None
    ) -> tuple[TrainConfig, list[BasePolicy]]:
        """Return the policies that initialize the weights, and a configuration for their networks.

        Raises:
            ConfigError: If a policy is missing, or does not match the algorithm or the settings.
        """
        bases = []
        sources = [policy for policy, own in config.policies.items() if own.run is not None]
        for policy in [*[None] * (config.base_run is not None), *sources]:
            from maze_train.run.base_policy import BasePolicy

            bases.append(BasePolicy(config, policy))
            config = bases[-1].with_networks(resumed_dir)
        return config, bases

    def building_features(self, config: TrainConfig, processes: SingleProcess) -> BuildFeatures:
        """Return the optional parts of the algorithm."""
        from maze_train.training.features import BuildFeatures

        features = BuildFeatures(agents=_agent_parts)
        if config.learner_group.n_learners > 1:
            from maze_train.learner.group import LearnerGroup

            features = replace(features, make_group=LearnerGroup)
        if processes.is_shared:
            from maze_train.run.torchrun import with_exchange

            features = with_exchange(features, processes)
        if any(policy.opponents is not None for policy in config.policies.values()):
            from maze_train.training.league import make_league_collector

            features = replace(features, make_league=make_league_collector)
        if config.runner.envs_per_actor:
            from maze_train.training.actors import PARTS

            features = replace(features, actors=PARTS)
        if config.env.backend != "gymnasium":
            from maze_train.collect.simulators import collector_class
            from maze_train.envs.third_party import make_third_party_env

            features = replace(
                features, make_vector_env=make_third_party_env, collector_class=collector_class
            )
        return features

    def curriculum_of(self, config: TrainConfig) -> list[Callback]:
        """Return a list with the curriculum callback; empty without a curriculum."""
        if not config.curriculum.stages:
            return []
        from maze_train.training.curriculum import Curriculum

        return [Curriculum(config.curriculum)]

    def with_random_opponent(self, config: TrainConfig) -> TrainConfig:
        """Add a random opponent in zero-sum environments; see `opponents.with_random_opponent`."""
        from maze_train.run.opponents import with_random_opponent

        return with_random_opponent(config)

    def background_of(
        self, evaluator: Evaluator | None, builder: AlgorithmBuilder[Any]
    ) -> BackgroundEvaluator | None:
        """Return the evaluator of `evaluation.asynchronous`; None if evaluations are synchronous.

        Args:
            evaluator: The evaluator that runs in the other process; None: no evaluations.
            builder: Builder of the algorithm.
        """
        if evaluator is None or not builder.config.evaluation.asynchronous:
            return None
        from maze_train.training.background import BackgroundEvaluator
        from maze_train.workers.process_pool import LocalProcesses

        context = builder.context
        background = BackgroundEvaluator(
            evaluator,
            context.env_calls,
            builder.model_maker(),
            context.device,
            context.backend.for_learners() or LocalProcesses(),
        )
        context.closing.callback(background.close)
        return background

    def opponent_evaluator(self, config: TrainConfig, builder: AlgorithmBuilder[Any]) -> Evaluator:
        """Return the evaluator for `evaluation.opponents`."""
        from maze_train.run.opponents import opponent_evaluator

        return opponent_evaluator(config, builder)


def load_resumed(resume: str, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a run with changed settings; see `resumed_config`."""
    from maze_train.run.resuming import resumed_config

    return resumed_config(resume, changes)


def after_restart(config: TrainConfig) -> TrainConfig:
    """Return a configuration that resumes the run of an earlier torchrun attempt, if any."""
    earlier = restarted_run()
    return config if earlier is None else replace(config, resume=earlier, run_dir=None)


def restarted_run() -> str | None:
    """Return the directory of the run to resume after a restart by torchrun; None otherwise."""
    variables = TorchrunVariables.read()
    if variables is None or not variables.attempt:
        return None
    from maze_train.learner.torchrun import restarted_run

    return restarted_run(variables)


def _agent_parts() -> AgentParts:
    from maze_train.training.multi_agent_models import PARTS

    return PARTS
