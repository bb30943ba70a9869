"""Training: `train_run` trains a built run, `train` is the Python interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv

from maze_train.config.compose import PRESETS, load_config, merged
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.core.conversion import key_of_field
from maze_train.core.errors import ConfigError
from maze_train.core.files import link_latest, writable
from maze_train.core.names import LATEST
from maze_train.core.notices import notify
from maze_train.core.run_directory import FAILURES
from maze_train.core.targets import TARGET
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory
from maze_train.run.build import build_run
from maze_train.run.notes import end_notes, missing_results, tell_stop
from maze_train.run.provenance import record_start
from maze_train.run.resuming import resume_hint, resumed_config
from maze_train.training.callbacks import Callback
from maze_train.training.contexts import modes
from maze_train.training.evaluators import BestModelSelection, Evaluator, earlier_test, final_test
from maze_train.training.generators import generators_kept
from maze_train.training.outcome import TrainingSummary
from maze_train.training.policy_files import TrainedPolicy
from maze_train.training.trainer import Run
from maze_train.workers.backends import refuse_import

LIMIT_KEYS = {
    "total_steps": "total_steps",
    "n_epochs": "algorithm.n_epochs",
    "patience": "algorithm.patience",
    "max_wall_time_s": "runner.max_wall_time_s",
}
"""Settings of the limits, by stop reason."""

SHORT = {
    "evaluators": "evaluation.evaluators",
    "writers": "tracking.writers",
    "wrappers": "env.wrappers",
}
"""Settings with short names in `train`."""


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

    def __repr__(self) -> str:
        summary = self.summary
        values = {
            "run_dir": str(self.run_dir),
            "stop_reason": summary.stop_reason,
            "epochs": summary.epochs,
            "env_steps": summary.env_steps,
            "wall_time_s": round(summary.wall_time_s, 1),
            "best_metric": summary.best_metric,
            "best_epoch": summary.best_epoch,
            **({"missing": self.missing} if self.missing else {}),
        }
        lines = [f"    {name}={value!r}," for name, value in values.items()]
        return "\n".join(["TrainingResult(", *lines, ")"])


class TrainingRunner:
    """Trains with a configuration; see `build_run` and `train_run`.

        result = TrainingRunner(load_config({"algorithm": "ppo", "env": "CartPole-v1"})).run()

    Args:
        config: The configuration; nothing is written or built before `run`.
        callbacks: Callbacks in addition to those of the configuration.
    """

    def __init__(self, config: TrainConfig, callbacks: Sequence[Callback] = ()) -> None:
        self.config = config
        self.callbacks = list(callbacks)

    def run(self) -> TrainingResult:
        """Build the run and train until a limit is reached; see `build_run` and `train_run`."""
        with build_run(self.config, callbacks=self.callbacks) as run:
            return train_run(run)


def train_run(run: Run) -> TrainingResult:
    """Train until a limit is reached; a resumed run starts at its checkpoint.

    Args:
        run: Result of `build_run`.

    Raises:
        Interrupted: If SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 was received. Raised
            after a checkpoint was saved.
        MazeTrainError: If training failed. Results written so far are kept.
    """
    config, trainer, selection = run.config, run.trainer, run.model_selection
    assert isinstance(config, TrainConfig)
    assert selection is not None
    leftover = run.directory.results
    with run.interruption, closing(run.tracker):
        with generators_kept():  # Custom writers may use the random number generators.
            run.tracker.start()
        begin(run, config, leftover)
        selection.write_best()
        tests: dict[str, dict[str, float]] = {}
        deterministic = config.runner.deterministic
        try:
            with (
                modes(deterministic=deterministic, detect_anomaly=config.runner.detect_anomaly),
                ExitStack() as stack,
            ):
                stack.callback(run.profiler.stop)
                trainer.before_training()
                trainer.train()
            if run.checkpoint is not None and trainer.updates == run.checkpoint.updates:
                limit = LIMIT_KEYS.get(trainer.stop_reason)
                more = f"set a larger {limit}; " if limit else ""
                hint = resume_hint(run.directory.path, config)
                notify(f"note: the run has already ended ({trainer.stop_reason}); {more}{hint}")
            if run.final_evaluator is not None:
                with modes(deterministic=deterministic):
                    tests = final_results(run, run.final_evaluator, selection)
        except BaseException as error:
            is_signal = isinstance(error, KeyboardInterrupt)
            trainer.stop_reason = "interrupted" if is_signal else "error"
            raise
        finally:
            summary = replace(trainer.summary(), final_test=tests)
            run.tracker.finish(summary.as_dict())
            if trainer.stop_reason in FAILURES:
                tell_stop(trainer, resume_hint(run.directory.path, config))
    selection.keep_if_none(trainer.epoch)
    selection.reset_to_best()
    missing = missing_results(trainer, run.tracker, selection, run.directory)
    missing += () if run.log.is_complete else (run.directory.log.name,)
    rows = run.tracker.history[len(run.past_rows) :]
    for note in end_notes(rows, config.tracking.info_keys):
        run.notify(note)
    seed = run.seeds.integer("acting")
    policy = TrainedPolicy(run.model.cpu(), *run.spaces, seed, settings=run.text)
    return TrainingResult(run.directory.path, summary, run.tracker.history, policy, missing)


def begin(run: Run, config: TrainConfig, leftover: list[Path]) -> None:
    """Write the first files of the run; called after all checks have passed.

    Args:
        run: The run.
        config: Configuration of the run.
        leftover: Results of an earlier run in the directory.
    """
    directory, checkpoint = run.directory, run.checkpoint
    assert run.store is not None
    if not run.ranks.is_first:
        if checkpoint is not None:
            run.store.point_to(checkpoint)
        return
    directory.clean()
    run.store.clean()
    with writable("run_dir", directory.path):
        if checkpoint is None:
            directory.put_aside(leftover)
        else:
            if run.has_damaged_metrics:
                os.replace(directory.metrics, directory.damaged_metrics)
            run.store.point_to(checkpoint)
    record_start(directory, config, run.text, checkpoint.path.name if checkpoint else None)
    if run.is_new and config.run_dir is None:
        link_latest(directory.path.parents[1] / LATEST, directory.path)
    run.log.open(directory.log)
    run.ranks.started(str(directory.path))


def final_results(
    run: Run, evaluator: Evaluator, selection: BestModelSelection
) -> dict[str, dict[str, float]]:
    """Return the test results of the last and the best policy.

    If the resumed run had already finished, its results are returned.
    """
    found: dict[str, dict[str, float]] = {}
    if not run.is_new:
        summary, n_episodes = run.trainer.summary(), run.config.evaluation.final_episodes
        found = run.ranks.first(lambda: earlier_test(run.directory, summary, n_episodes))
    return found or final_test(evaluator, selection, run.trainer.epoch)


def train(
    env: str
    | Callable[..., Env[Any, Any]]
    | VectorEnv[Any, Any, Any]
    | EnvConfig
    | TrainConfig
    | Mapping[str, Any]
    | None = None,
    algorithm: str | Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a policy, or resume a run.

        result = train(env="CartPole-v1", algorithm="ppo", total_steps=50_000)
        action = result.policy.act(observation)
        result = train(resume=result.run_dir, total_steps=100_000)
        result = train(experiment="ppo/HalfCheetah-v5", seed=1)

    Args:
        env: Registered ID, environment class, factory function, vector environment, or settings of
            the `env` section as a mapping or an `EnvConfig`. None: no environment (for algorithms
            that learn from datasets). Also accepts a whole configuration: a mapping such as a
            `DictConfig` that Hydra composed, overridden by the other arguments; or a `TrainConfig`,
            without other arguments.
        algorithm: Name of an algorithm, or its settings as a mapping with `_target_`. None: the
            algorithm of `experiment`, otherwise PPO.
        overrides: Settings by dotted name as on the command line: `{"algorithm.lr": 1e-3}`.
        **settings: Settings by top-level name: `total_steps=50_000`, `seed=1`, `runner="local"`;
            sections: `evaluation={"n_episodes": 20}`; or dotted names: `**{"algorithm.lr": 1e-3}`.
            `experiment="ppo/CartPole-v1"` selects a preset; other settings override the preset.
            With `resume=<run directory>`, settings override the stored settings of the run.
            Classes, functions and objects can be passed in place of names:
            `callbacks=[StopAtReturn(475)]`, `model={"policy": MyNet}`. Objects that cannot be
            imported by name must be passed again with `resume`. `evaluators`, `writers` and
            `wrappers` are short for the settings in `evaluation`, `tracking` and `env`.

    Returns:
        Result with metrics, run directory and the best policy.

    Raises:
        ConfigError: If a setting is invalid. Raised before anything is written.
        Interrupted: If SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 was received. Raised
            after a checkpoint was saved.
        MazeTrainError: If training failed.
    """
    refuse_import()
    settings = {
        SHORT.get(name, name): value for name, value in {**settings, **(overrides or {})}.items()
    }
    if isinstance(env, TrainConfig):
        if algorithm is not None or settings:
            problem = "a TrainConfig takes no other arguments; use dataclasses.replace(config, ...)"
            raise ConfigError("train", problem)
        return TrainingRunner(env).run()
    if isinstance(env, Mapping) and env.keys() & {*TrainConfig.hints(), PRESETS}:
        named = {} if algorithm is None else {"algorithm": algorithm}
        settings = merged(env, {**named, **settings})
        env, algorithm = settings.pop("env", None), settings.pop("algorithm", None)
    given: dict[str, Any] = {} if env is None else {"env": env}  # Not needed for datasets.
    if not isinstance(env, str | Mapping | None):
        config = EnvFactory.from_any(env).config
        names = config.hints() if isinstance(env, EnvConfig) else ("id", "target", "backend")
        given["env"] = {key_of_field(name): config.value_of(name) for name in names}
    if algorithm is None and settings.get("resume") not in (None, AUTO):
        if not isinstance(env, str | Mapping | EnvConfig | None):
            given = {"env._target_": given["env"][TARGET]}
        changes = {**settings, **given}
        return TrainingRunner(resumed_config(str(changes["resume"]), changes)).run()
    runner = settings.get("runner")
    if isinstance(env, VectorEnv) and not (isinstance(runner, Mapping) and "concurrency" in runner):
        given["runner.concurrency"] = env.num_envs
    if algorithm is not None or settings.get(PRESETS) is None:
        given["algorithm"] = algorithm or "ppo"
    return TrainingRunner(load_config({**given, **settings})).run()
