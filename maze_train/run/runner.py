"""Runners of training: from a configuration to a finished run directory."""

from __future__ import annotations

import contextlib
import inspect
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from maze_train.collect.league import make_snapshots
from maze_train.config.writing import config_text, config_to_dict, write_config
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import exclusive
from maze_train.core.notices import notify
from maze_train.core.seeding import Seeds
from maze_train.core.targets import TARGET, locate
from maze_train.envs.factory import EnvFactory, env_name
from maze_train.learner.modules import torch_threads
from maze_train.run.checkpoints import (
    RunCheckpoints,
    fitting,
    how_to_go_on,
    load_checkpoint,
    past_rows,
)
from maze_train.run.parts import (
    SUMMARY,
    TrainingResult,
    check_is_free,
    make_run_dir,
    missing_results,
    tell_stop,
)
from maze_train.run.policies import opponent_evaluator
from maze_train.run.speed import speed_notes
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.describe import (
    choice_sizes,
    flat_spaces,
    image_layout,
    is_image,
    is_mask_key,
)
from maze_train.tracking.tracker import EVAL_RETURN, TRAIN_RETURN, MetricsWriter, RunInfo, Tracker
from maze_train.tracking.writers import build_writers
from maze_train.training.build_context import BuildContext
from maze_train.training.builder import make_builder
from maze_train.training.callbacks import own_callbacks
from maze_train.training.config import check_selection
from maze_train.training.contexts import RunContexts, UpdateClock, find_device
from maze_train.training.evaluators import (
    BestModelSelection,
    MultiEvaluator,
    earlier_test,
    final_test,
    own_evaluators,
)
from maze_train.training.generators import generators_kept, generators_of_run
from maze_train.training.outcome import Interruption, Limits, TrainingSummary
from maze_train.training.policy_files import PolicyWriter, TrainedPolicy
from maze_train.training.trainer import Contexts, TrainerServices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from maze_train.config.train_config import TrainConfig
    from maze_train.envs.config import EnvConfig
    from maze_train.learner.learner import Learner
    from maze_train.run.pipeline import PreparedRun
    from maze_train.training.builder import AlgorithmBuilder
    from maze_train.training.callbacks import Callback
    from maze_train.training.checkpoints import Checkpoint
    from maze_train.training.evaluators import Evaluator
    from maze_train.training.trainer import Trainer


LEAST_RUN_S = 5.0
"""Seconds of a run from which on its speed is worth a line."""

LARGE_IMAGE = 10_000
"""Pixels of an image from which on it is worth a line."""

LARGE_ONE_HOT = 10_000
"""Inputs of a one-hot observation from which on it is worth a line."""


def start_notes(config: TrainConfig, observation_space: spaces.Space[Any]) -> Iterator[str]:
    """The lines that a run begins with.

    Args:
        config: The configuration.
        observation_space: Observation space of one environment.
    """
    limit = config.evaluation.max_episode_steps if config.evaluation.n_episodes else 0
    if lacks_time_limit(config.env):
        cut = f"; evaluation cuts it after {limit:,} steps (evaluation.max_episode_steps)"
        yield (
            f"{env_name(config.env)} declares no time limit: an episode continues until it ends "
            f"by itself{cut if limit else ''}; env.max_episode_steps sets one for training as well"
        )
    for key, leaf in flat_spaces(observation_space).items():
        name = f"the observation {key!r}" if key else "the observation"
        if is_mask_key(key) or config.model.policy is not None:
            continue
        if is_float_image(leaf) and config.model.image_encoder != "flat":
            yield (
                f"{name} has the shape {leaf.shape} of an image, but numbers of type {leaf.dtype}: "
                f"it is flattened to {np.prod(leaf.shape or ()):,} inputs; convolutions read uint8"
            )
        size = sum(choice_sizes(leaf))
        if size >= LARGE_ONE_HOT:
            yield (
                f"{name} is one-hot with {size:,} inputs: nothing that is learned about one value "
                "holds for others; numbers that describe them are easier to learn from"
            )
    yield from large_image_notes(config.env, observation_space)


def large_image_notes(config: EnvConfig, space: spaces.Space[Any]) -> Iterator[str]:
    """The line about the largest image, if it is so large that updates take long."""
    images = {
        key: image_layout(leaf)
        for key, leaf in flat_spaces(space).items()
        if isinstance(leaf, spaces.Box) and is_image(leaf)
    }
    key = max(images, key=lambda key: images[key].height * images[key].width, default=None)
    if key is None:
        return
    image = images[key]
    factor = math.ceil(math.sqrt(image.height * image.width / LARGE_IMAGE))
    if factor > 1:
        small = f"{image.height // factor} x {image.width // factor}"
        remedy = f"let the environment give smaller ones, such as {small}"
        if config.backend == "gymnasium":
            node = f"{{_target_: maze_train.ShrinkImagesWrapper, factor: {factor}}}"
            also = "..., " if config.wrappers else ""
            remedy = f"with {small} it is faster: 'env.wrappers=[{also}{node}]'"
        yield (
            f"{f'the observation {key!r}' if key else 'the observation'} is an image of "
            f"{image.height} x {image.width} pixels, and the network reads all of them: {remedy}"
        )


def end_notes(
    rows: Sequence[Mapping[str, float]],
    info_keys: Sequence[str],
    builder: AlgorithmBuilder[Any],
    policy: TrainedPolicy,
) -> Iterator[str]:
    """The lines that a run ends with.

    Args:
        rows: Metrics of the epochs of this process.
        info_keys: Keys of infos that are to be metrics.
        builder: What the run was built with.
        policy: The policy of the run.
    """
    names = {name for row in rows for name in row}
    for key in info_keys:
        if rows and not names & {f"train/info/{key}", f"eval/info/{key}"}:
            yield f"tracking.info_keys: no episode ended with a number under {key!r} in its info"
    if sum(row.get("time/epoch_s", 0.0) for row in rows) >= LEAST_RUN_S:
        yield from speed_notes(rows, builder, policy)


def lacks_time_limit(config: EnvConfig) -> bool:
    """Whether nothing cuts the episodes of training, as far as it is known without playing."""
    wrappers = [str(node[TARGET]) for node in (*config.wrappers, *config.training_wrappers)]
    if config.max_episode_steps is not None or any("TimeLimit" in name for name in wrappers):
        return False
    if config.target is not None:
        # The environment that a function returns may have a limit.
        return inspect.isclass(locate(config.target, key="env._target_"))
    spec = gymnasium.registry.get((config.id or "").rpartition(":")[2])
    # Atari games have their own limit, in frames.
    is_game = spec is not None and spec.kwargs.get("max_num_frames_per_episode")
    return spec is not None and spec.max_episode_steps is None and not is_game


def is_float_image(space: spaces.Space[Any]) -> bool:
    """Whether a space would be an image if its numbers were bytes."""
    if not isinstance(space, spaces.Box) or space.dtype == np.uint8 or len(space.shape) < 3:
        return False
    return is_image(spaces.Box(0, 255, space.shape, np.uint8))


# Files of a run are imported when it reads or writes them; evaluators when it has them.


class TrainingRunner:
    """Builds everything that a configuration asks for, trains, and cleans up.

    `config.algorithm` names the builder of its algorithm, `config.runner` the place where workers
    live.

    Args:
        prepared: The configuration, and what the run begins with; see `prepare`.

    Attributes:
        callbacks: Callbacks of the run; one may add some that are not among its settings.

    Raises:
        ConfigError: If parts of the configuration do not fit.
    """

    def __init__(self, prepared: PreparedRun) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.resumed_dir = prepared.resumed_dir
        assert self.config.seed is not None
        self.seeds = Seeds(self.config.seed)
        self.run_dir: Path | None = None
        self.config_text = config_text(self.config)
        self._outputs = Path("outputs").absolute()  # an environment may change the directory
        self._tell_once = cache(lambda text: notify(f"note: {text}"))
        self._final_evaluator: Evaluator | None = None
        self._closing = contextlib.ExitStack()
        self.callbacks: list[Callback] = []
        self.builder = make_builder(self._context())

    def _context(self) -> BuildContext[Any]:
        """Everything that the algorithm is built from."""
        config = self.config
        own = config.learner_group.device
        key = "learner_group.device" if own else "algorithm.device"
        return BuildContext(
            algorithm=config.algorithm,
            env=config.env,
            env_factory=EnvFactory(config.env),
            place=config.runner.place(),
            seeds=self.seeds,
            device=find_device(own or config.algorithm.device, key),
            concurrency=config.runner.concurrency,
            envs_per_actor=config.runner.envs_per_actor,
            learner_group=config.learner_group,
            run_dir=self.resumed_dir or Path(config.run_dir or ".").absolute(),
            model=config.model,
            policies=config.policies,
            policies_to_train=config.policies_to_train,
            evaluation=config.evaluation,
            checkpoint=config.checkpoint,
            total_steps=config.total_steps or 0,
            info_keys=config.tracking.info_keys,
            dataset=config.runner.dataset,
            is_trial=config.runner.fast_dev_run,
            has_checkpoint=self.prepared.checkpoint is not None,
            read_checkpoint=self._read_checkpoint,
            closing=self._closing,
            notify=self._tell_once,
        )

    def _read_checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint from which the run continues."""
        if self.resumed_dir is None:
            return None
        found = RunCheckpoints(self.resumed_dir, self.config.resume)
        return found.load()

    def __enter__(self) -> TrainingRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all environments and evaluators; calling it again does nothing."""
        self._closing.close()

    def restored_learner(self) -> Learner[Any, Any, Any]:
        """The learner as it is in the checkpoint from which the run continues.

        Raises:
            RunDirectoryError: If there is no checkpoint, or all are damaged.
        """
        checkpoint, builder = self._read_checkpoint(), self.builder
        if checkpoint is None:
            raise RunDirectoryError(f"{self.resumed_dir} has no checkpoint, which holds a learner")
        with self, generators_kept():
            model = builder.build_model()
            if self.config.algorithm.learns_from == "dataset":
                builder.prepare(model)  # the loss depends on the data
            learner = builder.build_learner(model)
        with fitting(checkpoint):
            state = checkpoint.state["learners"]["learner"]
            if learner.modules.keys() != state["modules"].keys():
                make_snapshots(learner, state["modules"])
            learner.load_state_dict(state)
        return learner

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> TrainingResult:
        """Train until a limit is reached; a run that is continued continues at its checkpoint.

        Raises:
            ConfigError: Before anything is written, if the parts of the configuration do not fit.
            Interrupted: After SIGINT, SIGTERM, SIGHUP or SIGUSR1; a checkpoint was saved.
            MazeTrainError: If training failed; what was written up to then stays.
            RunDirectoryError: If another process trains in the directory, or every checkpoint of a
                run that is continued is damaged.
        """
        with (
            self,
            generators_of_run(self.seeds.integer("global")),
            torch_threads(self.config.runner.torch_threads),
        ):
            self.config.check_start()
            if self.resumed_dir is None:
                check_is_free(self.config.run_dir)
                for note in start_notes(self.config, self.builder.spaces[0]):
                    self._tell_once(note)  # first: networks for large images take their time
            builder = self.builder
            for base in self.prepared.bases:
                base.check_spaces(builder.spaces)
            model = builder.build_model()
            builder.prepare(model)
            for base in self.prepared.bases:
                notify(base.take_over(model))
            evaluator = self._build_evaluator()
            self._final_evaluator = builder.build_final_evaluator()
            with generators_kept():  # rich draws from `random` when it is imported
                writers = build_writers(self.config.tracking)
                if self.config.callbacks:
                    self.callbacks += own_callbacks(self.config.callbacks)
            self.run_dir = self.resumed_dir or make_run_dir(self.config.run_dir, self._parent)
            with exclusive(self.run_dir):
                if self.resumed_dir is None:
                    check_is_free(self.run_dir)  # another process may have been faster
                return self._run_in(self.run_dir, model, evaluator, writers)

    def _run_in(
        self,
        run_dir: Path,
        model: nn.Module,
        evaluator: Evaluator | None,
        writers: list[MetricsWriter],
    ) -> TrainingResult:
        """Train in a directory that no other process uses."""
        config = self.config
        is_on, is_resumed = config.checkpoint.is_on, self.resumed_dir is not None
        saved: RunCheckpoints | None = None
        if is_on or is_resumed:
            keep, mode = config.checkpoint, self.selection_mode
            saved = RunCheckpoints(run_dir, config.resume, keep, mode, self.config_text)
        resumed = saved.take_up() if saved and is_resumed else None
        write_config(run_dir, self.config_text)
        selection = self._build_model_selection(model, run_dir)
        tracker = Tracker(writers, self._run_info(run_dir, resumed))
        clock = UpdateClock(self._contexts(run_dir), self._tell_once)
        interruption = Interruption(clock.remaining)
        services = TrainerServices(
            tracker=tracker,
            evaluator=evaluator,
            model_selection=selection,
            limits=Limits(
                n_epochs=config.algorithm.n_epochs,
                total_steps=config.total_steps or 0,
                patience=config.algorithm.patience,
                max_wall_time_s=config.runner.max_wall_time_s,
            ),
            evaluation_interval=config.evaluation.interval,
            selection_metric=self.builder.selection_metric,
            contexts=clock,
            checkpoints=saved.schedule(resumed) if saved and is_on else None,
            interruption=interruption,
            callbacks=self.callbacks,
        )
        trainer = self.builder.build_trainer(model, services)
        clock.watch(trainer.learners.first)
        if resumed is not None:
            load_checkpoint(trainer, resumed)
        with interruption:
            summary = self._train(trainer, tracker, selection)
        rows = tracker.history[len(tracker.run_info.past_rows) :]
        selection.keep_if_none(trainer.epoch)
        selection.reset_to_best()
        missing = missing_results(trainer, tracker, selection, run_dir)
        seed = self.seeds.integer("acting")
        acting: Any = model.cpu()
        policy = TrainedPolicy(acting, *self.builder.spaces, seed)
        for note in end_notes(rows, config.tracking.info_keys, self.builder, policy):
            self._tell_once(note)
        return TrainingResult(run_dir, summary, tracker.history, policy, missing)

    def _train(
        self, trainer: Trainer, tracker: Tracker, selection: BestModelSelection
    ) -> TrainingSummary:
        """Train and test, and write a summary whatever happens."""
        tests: dict[str, dict[str, float]] = {}
        with contextlib.closing(tracker):
            with generators_kept():  # writers of users may draw from them
                tracker.start()
            try:
                with trainer.contexts.training():
                    self.builder.before_training(trainer)
                    trainer.train()
                with trainer.contexts.testing():
                    tests = self._test(trainer, selection)
            except BaseException as error:
                is_signal = isinstance(error, KeyboardInterrupt)
                trainer.stop_reason = "interrupted" if is_signal else "error"
                raise
            finally:
                summary = replace(trainer.summary(), final_test=tests)
                tracker.finish(summary.as_dict())
                if trainer.stop_reason in ("interrupted", "error"):
                    tell_stop(trainer, how_to_go_on(self.run_dir, self.config))
        return summary

    def _test(self, trainer: Trainer, selection: BestModelSelection) -> dict[str, dict[str, float]]:
        """Test the policies, unless the run had ended before and was tested then."""
        if self._final_evaluator is None:
            return {}
        assert self.run_dir is not None
        path, n_episodes = self.run_dir / SUMMARY, self.config.evaluation.final_episodes
        found: dict[str, dict[str, float]] = {}
        if self.resumed_dir is not None:
            found = earlier_test(path, trainer.summary(), n_episodes)
        return found or final_test(self._final_evaluator, selection, trainer.epoch)

    # -- parts -----------------------------------------------------------------------------------

    @property
    def _agents(self) -> tuple[str, ...]:
        """Names of the agents, where there are several."""
        several = agent_spaces(*self.builder.spaces)
        return several.agents if several else ()

    @property
    def selection_mode(self) -> Literal["max", "min"]:
        """Whether a larger or a smaller value of it is better."""
        return self.config.evaluation.selection_mode(self.builder.selection_metric)

    def _build_evaluator(self) -> Evaluator | None:
        """Build the evaluator of the policy; it reports the metric that selects the best one.

        Raises:
            ConfigError: If that is not so, or an evaluator cannot be built.
        """
        check_selection(self.config.evaluation, self._agents)
        evaluators = self.builder.build_evaluators()
        if self.config.evaluation.evaluators:
            own = own_evaluators(self.config.evaluation, *self.builder.spaces)
            for evaluator in own:
                self._closing.callback(evaluator.close)
            evaluators = [*evaluators, *own]
        if self.config.evaluation.opponents:
            evaluators.append(opponent_evaluator(self.config, self.builder))
        if len(evaluators) > 1:
            joined: Evaluator = MultiEvaluator(evaluators)
            return joined
        return evaluators[0] if evaluators else None

    def _build_model_selection(self, model: nn.Module, run_dir: Path) -> BestModelSelection:
        writer = PolicyWriter(*self.builder.spaces, self.config_text)
        return BestModelSelection(
            model,
            save=writer,
            best_dir=run_dir / "best",
            dump_dir=run_dir / "policies",
            dump_interval=self.config.evaluation.dump_interval,
            mode=self.selection_mode,
            may_cancel=bool(self._agents)
            and self.builder.selection_metric in (EVAL_RETURN, TRAIN_RETURN),
        )

    def _contexts(self, run_dir: Path) -> Contexts:
        """Modes of PyTorch and the profiler, where the settings ask for them."""
        runner, profile = self.config.runner, self.config.tracking.profile
        if not (runner.deterministic or runner.detect_anomaly or profile):
            return Contexts()
        found: Contexts = RunContexts(
            run_dir,
            deterministic=runner.deterministic,
            detect_anomaly=runner.detect_anomaly,
            profile=profile,
        )
        return found

    def _run_info(self, run_dir: Path, resumed: Checkpoint | None) -> RunInfo:
        config = self.config
        title = f"{config.algorithm.name.upper()} on {self.builder.task_name}"
        if resumed is not None:
            title = f"{title}, continued from {resumed.path.name}"
        return RunInfo(
            run_dir=run_dir,
            title=title,
            past_rows=(past_rows(run_dir, resumed, config.tracking.csv) if resumed else ()),
            # From its beginning if there was no checkpoint yet.
            resumed_at_step=(resumed.env_steps if resumed else 0) if self.resumed_dir else None,
            config=config_to_dict(config),
            total_env_steps=config.total_steps or None,
            n_epochs=config.algorithm.n_epochs or None,
            max_wall_time_s=config.runner.max_wall_time_s or None,
            step_label=self.builder.step_label,
            metric=self.builder.selection_metric,
            mode=self.selection_mode,
        )

    @property
    def _parent(self) -> Path:
        """Directory in which that of a new run is made, unless one is named."""
        config = self.config
        return (
            self._outputs / f"{self.builder.task_name}-{config.algorithm.name}-{config.runner.name}"
        )
