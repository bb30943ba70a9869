"""From a checked configuration to the objects of a run: `build_run`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maze_train.config.stored import check_text, config_text
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import CallbackError, ConfigError, MazeTrainError, RunDirectoryError
from maze_train.core.files import versions
from maze_train.core.names import OUTPUTS
from maze_train.core.notices import notify
from maze_train.core.run_directory import RunDirectory
from maze_train.core.secrets import settings_without_secrets
from maze_train.core.seeding import Seeds, draw_seed
from maze_train.core.signals import Interrupted
from maze_train.core.targets import build_targets, locate
from maze_train.core.torchrun import TorchrunVariables
from maze_train.learner.group import LearnerGroup
from maze_train.learner.learner import Learner
from maze_train.learner.modules import torch_threads
from maze_train.learner.ranks import OneRank, Ranks
from maze_train.run.notes import EvaluationGapNote, TimeLimitNote, start_notes
from maze_train.run.resuming import Resumption, after_restart, fitting, run_to_resume
from maze_train.spaces.agents import agents_of
from maze_train.tracking import console, curves, tensorboard, tracker
from maze_train.tracking.config import TrackingConfig
from maze_train.tracking.run_log import RunLog
from maze_train.tracking.tracker import EVAL_RETURN, TRAIN_RETURN, MetricsWriter, RunInfo, Tracker
from maze_train.training.callbacks import Callback, name_of
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.config import check_selection
from maze_train.training.contexts import UpdateProfiler, find_device
from maze_train.training.evaluators import BestModelSelection, MultiEvaluator, own_evaluators
from maze_train.training.generators import generators_kept, generators_of_run
from maze_train.training.models import with_networks
from maze_train.training.policy_files import PolicyWriter
from maze_train.training.trainer import Run, Trainer

if TYPE_CHECKING:
    from maze_train.run.base_policy import BasePolicy


def build_run(
    config: TrainConfig, *, callbacks: Sequence[Callback] = (), until_learner: bool = False
) -> Run:
    """Build the objects of a run, in order; use the result as a context manager.

    Only an empty run directory is created. If a step raises an error, all earlier objects are
    closed, and the directory is removed.

        with build_run(load_config({"algorithm": "ppo", "env": "CartPole-v1"})) as run:
            result = train_run(run)

    Args:
        config: The configuration.
        callbacks: Callbacks in addition to those of the configuration.
        until_learner: Whether to stop after the learner was built, without a run directory.

    Raises:
        ConfigError: If settings contradict each other, the run to resume does not exist, a changed
            setting affects the results of a resumed run, or a component cannot be built.
        RunDirectoryError: If another process trains in the directory, or all checkpoints of a
            resumed run are damaged.
    """
    with ExitStack() as closing:
        # 1. Processes, settings, random streams.
        config = after_restart(config)
        ranks = join_ranks(config)
        closing.callback(ranks.leave)
        outputs = Path(OUTPUTS).absolute()  # An environment may change the directory.
        resumption, config, bases = resolved(config)
        drawn = ranks.first(draw_seed)  # Called by every process, also with a seed.
        seed = drawn if config.seed is None else config.seed
        config, seeds, is_new = replace(config, seed=seed), Seeds(seed), resumption is None
        algorithm, log = config.algorithm, RunLog()
        if not until_learner:
            closing.enter_context(log)
            closing.enter_context(ending_together(ranks))
            closing.enter_context(generators_of_run(seeds.integer(ranks.stream("global"))))
            closing.enter_context(torch_threads(config.runner.torch_threads))
            config.check_start()
            check_text(config_text(config))
            if is_new and config.run_dir is not None:
                RunDirectory(Path(config.run_dir)).check_is_free()
        own = {f"policies.{policy}.model": each.model for policy, each in config.policies.items()}
        models = {"model": config.model, **own}
        algorithm.check_run(config.env, {key: model for key, model in models.items() if model})
        run = Run(
            config=config,
            ranks=ranks,
            seeds=seeds,
            closing=closing,
            device=device_of(config, ranks),
            backend=config.runner.make_backend(),
            run_dir=Path(config.run_dir or ".").absolute(),
            log=log,
            is_new=is_new,
        )
        if resumption is not None:
            run.run_dir = resumption.directory
            run.has_checkpoint = resumption.checkpoint is not None
            run.read_checkpoint = resumption.read

        # 2. Experience, model, learners.
        path = algorithm.trainer_class
        trainer_class: type[Trainer] = locate(path, "algorithm.trainer_class")
        if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
            problem = "expected a subclass of maze_train.Trainer"
            raise ConfigError("algorithm.trainer_class", problem, path)
        run.source = trainer_class.make_source(run)
        if ranks.is_shared:
            each = config.runner.concurrency // ranks.count
            notify(f"{ranks}, with {each} environments each")
        if is_new and not until_learner:
            for note in start_notes(config, run.spaces[0]):
                run.notify(note)  # Printed before networks are built (may be slow).
        if run.has_checkpoint:
            bases = []
        for base in bases:
            base.check_spaces(run.spaces)
        run.model = trainer_class.model_maker(run)()
        learner = trainer_class.make_learner(run)
        run.learners = LearnerGroup(learner, run.config.learner_group, run.backend, run.ranks)
        closing.callback(run.learners.shutdown)
        if until_learner:
            run.closing = closing.pop_all()
            return run
        for base in bases:
            notify(base.take_over(run.model))

        # 3. Evaluation.
        has_agents = bool(agents_of(run.spaces))
        evaluation = config.evaluation
        check_selection(evaluation, agents_of(run.spaces))
        evaluators = trainer_class.make_evaluators(run)
        if evaluation.evaluators:
            own_ones = own_evaluators(evaluation, *run.spaces)
            for evaluator in own_ones:
                closing.callback(evaluator.close)
            evaluators += own_ones
        if evaluation.opponents:
            from maze_train.run.opponents import opponent_evaluator

            evaluators.append(opponent_evaluator(run, config))
        if evaluators:
            run.evaluator = evaluators[0] if len(evaluators) == 1 else MultiEvaluator(evaluators)
        run.final_evaluator = trainer_class.make_final_evaluator(run)
        run.selection_metric = metric = trainer_class.selection_metric(run)

        # 4. Writers, callbacks, trainer.
        with generators_kept():  # `rich` draws from `random` when it is imported.
            run.writers = build_writers(config.tracking) if ranks.is_first else []
            run.writers += [TimeLimitNote(config, run.notify), EvaluationGapNote(run.notify)]
            if config.curriculum.stages:
                from maze_train.training.curriculum import Curriculum

                run.callbacks.append(Curriculum(config.curriculum))
            run.callbacks += build_targets(config.callbacks, "callbacks", Callback)
            run.callbacks += callbacks
        if ranks.is_shared:
            from maze_train.training.processes import CommonInterruption, FirstEvaluator

            run.interruption = interruption = CommonInterruption(ranks)
            if run.evaluator is not None:
                run.evaluator = FirstEvaluator(ranks, run.evaluator, interruption)
            if run.final_evaluator is not None:
                run.final_evaluator = FirstEvaluator(ranks, run.final_evaluator, interruption)
        run.trainer = trainer_class.build(run)
        run.trainer.connect_callbacks()

        # 5. The directory, and the state of a resumed run.
        run.text = config_text(config)
        task = trainer_class.task_name(run)
        parent = outputs / f"{task}-{algorithm.name}-{config.runner.name}"
        found = None if resumption is None else resumption.checkpoint
        ranks.check_same("configuration", run.text)
        ranks.check_same("resume", found and found.path.name)
        remedy = "the environments of all processes must have equal spaces"
        ranks.check_same("env", run.spaces, remedy)
        remedy = "every process must have the same callbacks"
        ranks.check_same("callbacks", list(map(name_of, run.callbacks)), remedy)
        run.directory = closing.enter_context(locked_directory(run, config.run_dir, parent))
        mode = evaluation.selection_mode(metric)
        run.store = CheckpointStore(
            run.directory.checkpoints, config.checkpoint, mode=mode, settings=run.text, ranks=ranks
        )
        run.checkpoints = run.store if config.checkpoint.is_on else None
        if resumption is not None:
            run.checkpoint = resumption.load(run.store, config)
        if resumption is not None and run.checkpoint is not None:
            run.past_rows = resumption.past_rows(run.checkpoint, config.tracking.csv)
            run.has_damaged_metrics = resumption.has_damaged_metrics
        run.model_selection = BestModelSelection(
            run.model,
            save=PolicyWriter(*run.spaces, run.text) if ranks.is_first else None,
            best_dir=run.directory.best,
            dump_dir=run.directory.policies,
            dump_interval=evaluation.dump_interval,
            dump_interval_steps=evaluation.dump_interval_steps,
            mode=mode,
            may_cancel=has_agents and metric in (EVAL_RETURN, TRAIN_RETURN),
        )
        updates = config.tracking.profile if ranks.is_first else None
        run.profiler = UpdateProfiler(updates, run.directory.profile)
        run.tracker = Tracker(run.writers, run_info(run, config, task))
        if resumption is not None and run.checkpoint is not None:
            resumption.restore(run.trainer, run.checkpoint)
        run.closing = closing.pop_all()
        return run


def resolved(
    config: TrainConfig, *, notes: bool = True
) -> tuple[Resumption | None, TrainConfig, list[BasePolicy]]:
    """Find the run to resume and the policies to start from, and complete the configuration.

    Args:
        config: The configuration.
        notes: Whether to print the changed settings of a resumed run.

    Returns:
        The object that resumes a run (None: a new run), the configuration with the networks of
        these policies and the seed of a resumed run, and the policies.
    """
    resumption: Resumption | None = None
    bases: list[BasePolicy] = []
    if config.resume is not None:
        directory = run_to_resume(config)
        resumption = None if directory is None else Resumption(directory, config.resume)
    sources = [policy for policy, own in config.policies.items() if own.run is not None]
    for policy in [*[None] * (config.base_run is not None), *sources]:
        from maze_train.run.base_policy import BasePolicy

        bases.append(BasePolicy(config, policy))
        config = bases[-1].with_networks(None if resumption is None else resumption.directory)
    config = config.shortened()
    return resumption, resumption.checked(config, notes) if resumption else config, bases


def finished_objective(config: TrainConfig) -> float | None:
    """Return the objective of the run to resume if it has already finished, otherwise None."""
    resumption, config, _ = resolved(config, notes=False)
    if resumption is None:
        return None
    return resumption.objective(config_text(config), config.selection_metric)


def restored_learner(config: TrainConfig) -> Learner[Any, Any, Any]:
    """Return the learner of a run with the state of its checkpoint.

    Raises:
        RunDirectoryError: If there is no checkpoint, or all checkpoints are damaged.
    """
    from maze_train.training.league import make_snapshots

    with generators_kept(), build_run(config, until_learner=True) as run:
        checkpoint, learner = run.read_checkpoint(), run.learners.first
        if checkpoint is None:
            raise RunDirectoryError(f"{run.run_dir} has no checkpoint to load the learner from")
        with fitting(checkpoint):
            state = checkpoint.state["learners"]["learner"]
            if learner.modules.keys() != state["modules"].keys():
                make_snapshots(learner, state["modules"])
            learner.load_state_dict(state)
    return learner


def join_ranks(config: TrainConfig) -> Ranks:
    """Join the other processes of the run, if torchrun started this one.

    Raises:
        ConfigError: If the settings do not support torchrun; see `run.torchrun.joined`.
    """
    variables = TorchrunVariables.read()
    if variables is not None:
        from maze_train.run.torchrun import joined

        return joined(config, variables)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        text = "RANK and WORLD_SIZE are set, but not by torchrun: this process trains alone"
        notify(f"note: {text}")
    return OneRank()


def device_of(config: TrainConfig, ranks: Ranks) -> torch.device:
    """Return the device of the learner in this process.

    Raises:
        ConfigError: If PyTorch cannot use the device.
    """
    algorithm, of_group = config.algorithm, config.learner_group.device
    key = "learner_group.device" if of_group else "algorithm.device"
    name = of_group or algorithm.device if algorithm.uses_accelerators else "cpu"
    return find_device(ranks.device(name, key), key)


def build_writers(config: TrackingConfig) -> list[MetricsWriter]:
    """Build the configured writers; the console comes last, after all files are written.

    Raises:
        ConfigError: If an entry of `writers` cannot be built or is not a `MetricsWriter`.
        MissingExtraError: If a writer needs a package that is not installed.
    """
    chosen: list[tuple[bool, type[MetricsWriter]]] = [
        (config.csv, tracker.CSVWriter),
        (config.tensorboard, tensorboard.TensorBoardWriter),
        (config.summary, tracker.JSONSummaryWriter),
        (config.plot, curves.LearningCurveWriter),
    ]
    writers = [writer() for is_on, writer in chosen if is_on]
    writers += build_targets(config.writers, "tracking.writers", MetricsWriter)
    return [*writers, console.ConsoleWriter(config.progress)]


@contextlib.contextmanager
def ending_together(ranks: Ranks) -> Iterator[None]:
    """At the end, wait until the first process has written all files.

    torchrun ends all processes once a process has failed.
    """
    try:
        yield
    except (Interrupted, CallbackError) as error:
        if error.is_common:
            with contextlib.suppress(MazeTrainError):  # The first error is raised.
                ranks.first(lambda: None)
        raise
    ranks.first(lambda: None)


@contextlib.contextmanager
def locked_directory(run: Run, run_dir: str | None, parent: Path) -> Iterator[RunDirectory]:
    """Create (for a new run) and lock the run directory; only in the first process.

    Args:
        run: The run.
        run_dir: Setting `run_dir`.
        parent: Default parent directory of new runs.
    """
    ranks = run.ranks
    if not ranks.is_first:
        yield RunDirectory(Path(ranks.first(str)))
    elif run.is_new:
        with RunDirectory.new(run_dir, parent) as directory:
            yield RunDirectory(Path(ranks.first(lambda: str(directory.path))))
    else:
        directory = RunDirectory(run.run_dir)
        with directory.lock():
            yield RunDirectory(Path(ranks.first(lambda: str(directory.path))))


def run_info(run: Run, config: TrainConfig, task: str) -> RunInfo:
    """Return the description of the run for its writers.

    Args:
        run: The run.
        config: Configuration of the run.
        task: Name of the task.
    """
    name, metric, checkpoint = config.algorithm.name, run.selection_metric, run.checkpoint
    plain = with_networks(config_to_dict(config), config.model, config.algorithm, run.spaces)
    settings = settings_without_secrets(plain)
    after = "" if checkpoint is None else f", continued from {checkpoint.path.name}"
    resumed_at = 0 if checkpoint is None else checkpoint.env_steps
    return RunInfo(
        run_dir=run.directory.path if run.ranks.is_first else None,
        title=f"{name.upper()} on {task}{after}",
        name=config.tracking.name,
        group=config.tracking.group,
        past_rows=run.past_rows,
        resumed_at_step=None if run.is_new else resumed_at,
        config=settings,
        facts={
            "algorithm": name,
            "environment": task,
            "seed": config.seed,
            "version": versions()["maze_train"],
            "metric": metric,
            "model": settings["model"],
        },
        total_env_steps=config.total_steps or None,
        n_epochs=config.algorithm.n_epochs or None,
        max_wall_time_s=config.runner.max_wall_time_s or None,
        step_label=run.trainer.step_label,
        metric=metric,
        mode=config.evaluation.selection_mode(metric),
    )
