"""Training runs: from a checked configuration to a finished run directory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from maze_train.config.train_config import TrainConfig
from maze_train.config.writing import check_text, config_text
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import CallbackError, MazeTrainError
from maze_train.core.files import link_latest, versions, writable
from maze_train.core.names import LATEST, OUTPUTS
from maze_train.core.notices import notify
from maze_train.core.run_directory import FAILURES, MetricsRow, RunDirectory
from maze_train.core.secrets import settings_without_secrets
from maze_train.core.seeding import Seeds, draw_seed
from maze_train.core.targets import build_targets
from maze_train.envs.factory import EnvFactory
from maze_train.learner.modules import torch_threads
from maze_train.run.evaluation import (
    build_evaluator,
    build_selection,
    final_results,
    selection_mode,
)
from maze_train.run.notes import (
    EvaluationGapNote,
    TimeLimitNote,
    end_notes,
    missing_results,
    start_notes,
    tell_stop,
)
from maze_train.run.provenance import record_start
from maze_train.spaces.agents import agents_of
from maze_train.tracking.run_log import RunLog
from maze_train.tracking.tracker import MetricsWriter, RunInfo, Tracker
from maze_train.training.builder import BuildContext, make_builder
from maze_train.training.callbacks import Callback, name_of
from maze_train.training.checkpoints import Checkpoint, CheckpointStore
from maze_train.training.contexts import UpdateProfiler, find_device, modes
from maze_train.training.evaluators import BestModelSelection, Evaluator
from maze_train.training.generators import generators_kept, generators_of_run
from maze_train.training.models import with_networks
from maze_train.training.outcome import Interrupted, Limits, TrainingSummary
from maze_train.training.policy_files import TrainedPolicy
from maze_train.training.services import TrainerServices
from maze_train.training.trainer import Trainer

if TYPE_CHECKING:
    from maze_train.run.assembly import Assembly


LOG = logging.getLogger(__package__)


@dataclass(frozen=True)
class TrainingResult:
    """Result of a finished run."""

    run_dir: Path
    """Directory of the run."""

    summary: TrainingSummary
    """Summary of training."""

    history: list[dict[str, float]] = field(repr=False)
    """One row of metrics per epoch."""

    policy: TrainedPolicy
    """The best policy; the last policy if none was selected."""

    missing: tuple[str, ...] = ()
    """Results that could not be written, for example on a full disk. If not empty, `maze-run`
    fails."""

    @property
    def best_metric(self) -> float:
        """Best value of the selection metric; the objective of a sweep."""
        return self.summary.best_metric


class TrainingRunner:
    """Builds the parts of a run, trains, and cleans up.

    `config.algorithm` selects the builder of the algorithm, `config.runner` the backend of the
    workers.

    Args:
        config: The configuration; nothing is written before `run`.
        assembly: Builds the optional parts; see `run.train.make_runner`.

    Attributes:
        processes: Processes of the run.
        config: The configuration with all defaults, a seed, and the networks of a base run.
        resumption: Resumes an earlier run; None for a new run.
        callbacks: Callbacks of the run; callers may add more.

    Raises:
        ConfigError: If settings contradict each other, the run to resume does not exist, a changed
            setting affects the results of a resumed run, or the algorithm does not support the
            policy of the base run.
        RunDirectoryError: If the configuration of the resumed run is damaged.
    """

    def __init__(self, config: TrainConfig, assembly: Assembly) -> None:
        self._assembly = assembly
        self._closing = contextlib.ExitStack()
        try:
            self._prepare(config)
        except BaseException:
            self.close()
            raise

    def _prepare(self, config: TrainConfig) -> None:
        """Join the other processes, complete the configuration, and create the builder."""
        self.processes = self._assembly.processes_of(config)
        self._closing.callback(self.processes.leave)
        self.resumption = self._assembly.resumption_of(config)
        self.resumed_dir = None if self.resumption is None else self.resumption.directory
        config, self._bases = self._assembly.base_policies(config, self.resumed_dir)
        config = config.shortened()
        if self.resumption is not None:
            config = self.resumption.checked(config)
        drawn = self.processes.first(draw_seed)  # Called by every process, also with a seed.
        seed = drawn if config.seed is None else config.seed
        self.config = replace(config, seed=seed)
        self.seeds = Seeds(seed)
        self.config_text = config_text(self.config)
        self._outputs = Path(OUTPUTS).absolute()  # An environment may change the directory.
        self._notify_once = cache(lambda text: notify(f"note: {text}"))
        self.callbacks: list[Callback] = []
        self.builder = make_builder(self._context())

    def _context(self) -> BuildContext[Any]:
        """Return the build context of the algorithm."""
        config, env = self.config, self.config.env
        own = config.learner_group.device
        key = "learner_group.device" if own else "algorithm.device"
        device = own or config.algorithm.device if config.algorithm.uses_accelerators else "cpu"
        if env.device is not None:
            env = replace(env, device=self.processes.device(env.device, "env.device"))
        return BuildContext(
            config=config,
            algorithm=config.algorithm,
            env_factory=EnvFactory(env),
            backend=config.runner.make_backend(),
            seeds=self.seeds,
            device=find_device(self.processes.device(device, key), key),
            run_dir=self.resumed_dir or Path(config.run_dir or ".").absolute(),
            features=self._assembly.building_features(config, self.processes),
            processes=self.processes,
            has_checkpoint=self._has_checkpoint,
            read_checkpoint=self.read_checkpoint,
            closing=self._closing,
            notify=self._notify_once,
        )

    def read_checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint to resume from, if any."""
        return None if self.resumption is None else self.resumption.read()

    @property
    def _has_checkpoint(self) -> bool:
        return self.resumption is not None and self.resumption.checkpoint is not None

    def __enter__(self) -> TrainingRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close environments and evaluators, and leave the processes; repeated calls do nothing."""
        self._closing.close()

    def run(self) -> TrainingResult:
        """Train until a limit is reached; a resumed run starts at its checkpoint.

        Raises:
            ConfigError: If settings contradict each other. Raised before anything is written.
            Interrupted: If SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 was received. Raised
                after a checkpoint was saved.
            MazeTrainError: If training failed. Results written so far are kept.
            RunDirectoryError: If another process trains in the directory, or all checkpoints of a
                resumed run are damaged.
        """
        with (
            RunLog() as log,
            self,
            self._ending_together(),
            generators_of_run(self.seeds.integer(self.processes.stream("global"))),
            torch_threads(self.config.runner.torch_threads),
        ):
            if self.processes.is_shared:
                each = self.builder.num_envs // self.processes.count
                notify(f"{self.processes}, with {each} environments each")
            self.config.check_start()
            check_text(self.config_text)
            if self.resumed_dir is None:
                if self.config.run_dir is not None:
                    RunDirectory(Path(self.config.run_dir)).check_is_free()
                for note in start_notes(self.config, self.builder.spaces[0]):
                    self._notify_once(note)  # Printed before networks are built (may be slow).
            builder = self.builder
            bases = [] if self._has_checkpoint else self._bases
            for base in bases:
                base.check_spaces(builder.spaces)
            model = builder.build_model()
            LOG.debug("seed %s; resumed run: %s", self.config.seed, self.resumed_dir)
            builder.prepare(model)
            for base in bases:
                notify(base.take_over(model))
            if agents_of(builder.spaces) and self.resumed_dir is None:
                self._judge_by_opponents()
            evaluators = (
                build_evaluator(self.config, builder, self._assembly),
                builder.build_final_evaluator(),
            )
            with generators_kept():  # `rich` draws from `random` when it is imported.
                writers = self._writers()
                writers.append(TimeLimitNote(self.config, self._notify_once))
                writers.append(EvaluationGapNote(self._notify_once))
                self.callbacks += self._assembly.curriculum_of(self.config)
                self.callbacks += build_targets(self.config.callbacks, "callbacks", Callback)
            with self._locked_directory() as run:
                return self._run_in(run, log, model, evaluators, writers)

    @contextlib.contextmanager
    def _ending_together(self) -> Iterator[None]:
        """At the end, wait until the first process has written all files.

        torchrun ends all processes once a process has failed.
        """
        try:
            yield
        except (Interrupted, CallbackError) as error:
            if error.is_common:
                with contextlib.suppress(MazeTrainError):  # The first error is raised.
                    self.processes.first(lambda: None)
            raise
        self.processes.first(lambda: None)

    @contextlib.contextmanager
    def _locked_directory(self) -> Iterator[RunDirectory]:
        """Create (for a new run) and lock the run directory; only in the first process."""
        checkpoint = None if self.resumption is None else self.resumption.checkpoint
        self.processes.check_same("configuration", self.config_text)
        self.processes.check_same("resume", checkpoint and checkpoint.path.name)
        remedy = "the environments of all processes must have equal spaces"
        self.processes.check_same("env", self.builder.spaces, remedy)
        remedy = "every process must have the same callbacks"
        self.processes.check_same("callbacks", list(map(name_of, self.callbacks)), remedy)
        if not self.processes.is_first:
            yield RunDirectory(self.processes.first(Path))
        elif self.resumed_dir is None:
            with RunDirectory.new(self.config.run_dir, self._parent) as run:
                yield RunDirectory(self.processes.first(lambda: run.path))
        else:
            run = RunDirectory(self.resumed_dir)
            with run.lock():
                yield RunDirectory(self.processes.first(lambda: run.path))

    def _run_in(
        self,
        run: RunDirectory,
        log: RunLog,
        model: nn.Module,
        evaluators: tuple[Evaluator | None, Evaluator | None],
        writers: list[MetricsWriter],
    ) -> TrainingResult:
        """Train in a locked directory; the directory does not change before `_begin`.

        Args:
            run: The directory.
            log: Log of the run, not opened yet.
            model: The policy.
            evaluators: Evaluators for training, and for the test after training.
            writers: Writers of metrics.
        """
        config, leftover, is_first = self.config, run.results, self.processes.is_first
        parts = self._assembly.parts_of(self.processes)
        mode, text = selection_mode(self.builder), self.config_text
        store = parts.make_store(run.checkpoints, config.checkpoint, mode=mode, settings=text)
        earlier = self.resumption
        resumed = None if earlier is None else earlier.load(store, config)
        past = earlier.past_rows(resumed, config.tracking.csv) if earlier and resumed else ()
        selection = build_selection(self.builder, model, run, text)
        tracker = Tracker(writers, self._run_info(run, resumed, past))
        profiler = UpdateProfiler(config.tracking.profile if is_first else None, run.profile)
        interruption, adapt_evaluator = parts.make_interruption()
        evaluator, final = map(adapt_evaluator, evaluators)
        background = self._assembly.background_of(evaluator, self.builder)
        services = TrainerServices(
            tracker=tracker,
            evaluator=background or evaluator,
            background=background,
            model_selection=selection,
            limits=self._limits,
            evaluation_interval=config.evaluation.interval,
            evaluation_interval_steps=config.evaluation.interval_steps,
            selection_metric=self.builder.selection_metric,
            around_update=[profiler.around],
            checkpoints=store if config.checkpoint.is_on else None,
            interruption=interruption,
            callbacks=self.callbacks,
            env_calls=self.builder.context.env_calls,
            processes=self.processes,
            infos=self.builder.context.infos,
        )
        trainer = self.builder.build_trainer(model, services)
        trainer.connect_callbacks()
        if earlier is not None and resumed is not None:
            earlier.restore(trainer, resumed)
        with interruption, contextlib.closing(tracker):
            with generators_kept():  # Custom writers may use the random number generators.
                tracker.start()
            self._begin(run, log, store, resumed, leftover)
            selection.write_best()
            training = self._training(profiler)
            summary = self._train(run, trainer, selection, final, training)
        selection.keep_if_none(trainer.epoch)
        selection.reset_to_best()
        missing = missing_results(trainer, tracker, selection, run)
        missing += () if log.is_complete else (run.log.name,)
        rows = tracker.history[len(past) :]
        for note in end_notes(rows, config.tracking.info_keys):
            self._notify_once(note)
        acting = model.cpu()
        policy = TrainedPolicy(acting, *self.builder.spaces, self.seeds.integer("acting"))
        return TrainingResult(run.path, summary, tracker.history, policy, missing)

    def _run_info(
        self, run: RunDirectory, resumed: Checkpoint | None, past_rows: tuple[MetricsRow, ...]
    ) -> RunInfo:
        """Return the description of the run for its writers.

        Args:
            run: Directory of the run.
            resumed: Checkpoint from which the run is resumed.
            past_rows: Rows of metrics before this checkpoint.
        """
        config, builder = self.config, self.builder
        name, metric = config.algorithm.name, builder.selection_metric
        plain = with_networks(
            config_to_dict(config), config.model, config.algorithm, builder.spaces
        )
        settings = settings_without_secrets(plain)
        after = "" if resumed is None else f", continued from {resumed.path.name}"
        is_new = self.resumption is None
        return RunInfo(
            run_dir=run.path if self.processes.is_first else None,
            title=f"{name.upper()} on {builder.task_name}{after}",
            name=config.tracking.name,
            group=config.tracking.group,
            past_rows=past_rows,
            resumed_at_step=None if is_new else 0 if resumed is None else resumed.env_steps,
            config=settings,
            facts={
                "algorithm": name,
                "environment": builder.task_name,
                "seed": config.seed,
                "version": versions()["maze_train"],
                "metric": metric,
                "model": settings["model"],
            },
            total_env_steps=config.total_steps or None,
            n_epochs=config.algorithm.n_epochs or None,
            max_wall_time_s=config.runner.max_wall_time_s or None,
            step_label=builder.step_label,
            metric=metric,
            mode=selection_mode(builder),
        )

    def _begin(
        self,
        run: RunDirectory,
        log: RunLog,
        store: CheckpointStore,
        resumed: Checkpoint | None,
        leftover: list[Path],
    ) -> None:
        """Write the first files of the run; called after all checks have passed.

        Args:
            run: The directory.
            log: Log of the run.
            store: Checkpoints of the run.
            resumed: Checkpoint whose state was restored; None for a new run.
            leftover: Results of an earlier run in the directory.
        """
        if not self.processes.is_first:
            if resumed is not None:
                store.point_to(resumed)
            return
        run.clean()
        store.clean()
        with writable("run_dir", run.path):
            if self.resumption is not None and resumed is not None:
                self.resumption.begin(store, resumed)
            else:
                run.put_aside(leftover)
        record_start(run, self.config, self.config_text, resumed.path.name if resumed else None)
        if self.resumed_dir is None and self.config.run_dir is None:
            link_latest(self._outputs / LATEST, run.path)
        log.open(run.log)
        self.processes.started(str(run.path))

    @contextlib.contextmanager
    def _training(self, profiler: UpdateProfiler) -> Iterator[None]:
        """Context manager that enters all contexts of training."""
        config = self.config.runner
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                modes(deterministic=config.deterministic, detect_anomaly=config.detect_anomaly)
            )
            stack.callback(profiler.stop)
            yield

    def _train(
        self,
        run: RunDirectory,
        trainer: Trainer,
        selection: BestModelSelection,
        final_evaluator: Evaluator | None,
        training: contextlib.AbstractContextManager[None],
    ) -> TrainingSummary:
        """Train, test the policies, and write the summary (even after an error)."""
        tests: dict[str, dict[str, float]] = {}
        try:
            with training:
                self.builder.before_training(trainer)
                trainer.train()
            with modes(deterministic=self.config.runner.deterministic):
                resumed = None if self.resumption is None else run
                tests = final_results(self.builder, final_evaluator, trainer, selection, resumed)
        except BaseException as error:
            is_signal = isinstance(error, KeyboardInterrupt)
            trainer.stop_reason = "interrupted" if is_signal else "error"
            raise
        finally:
            summary = replace(trainer.summary(), final_test=tests)
            trainer.tracker.finish(summary.as_dict())
            if trainer.stop_reason in FAILURES:
                tell_stop(trainer, self._assembly.how_to_continue(run.path, self.config))
        return summary

    def _judge_by_opponents(self) -> None:
        """Add a random opponent to the evaluation in zero-sum environments."""
        self.config = config = self._assembly.with_random_opponent(self.config)
        self.config_text = config_text(config)
        builder = self.builder
        builder.context = replace(builder.context, config=config)

    @property
    def _limits(self) -> Limits:
        """Limits of training."""
        config = self.config
        return Limits(
            n_epochs=config.algorithm.n_epochs,
            total_steps=config.total_steps or 0,
            patience=config.algorithm.patience,
            max_wall_time_s=config.runner.max_wall_time_s,
        )

    def _writers(self) -> list[MetricsWriter]:
        """Build the metrics writers; only the first process has writers."""
        if not self.processes.is_first:
            return []
        return self._assembly.writers(self.config.tracking)

    @property
    def _parent(self) -> Path:
        """Default parent directory of new runs."""
        config = self.config
        return (
            self._outputs / f"{self.builder.task_name}-{config.algorithm.name}-{config.runner.name}"
        )
