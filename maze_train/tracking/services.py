"""Writers for experiment trackers that are installed as extras."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maze_train.core.errors import ConfigError
from maze_train.core.targets import import_extra
from maze_train.tracking.tracker import ENV_STEPS, FAILURES, MetricsWriter, RunInfo, flattened

BEST_POLICY, FILMS = "best", "*.mp4"
"""Files kept with a run: a directory, and files at any depth of the run directory."""

COPIES = ("wandb", "mlartifacts")
"""Directories in which the packages keep copies of it."""

_MLFLOW_PARAMS_PER_CALL = 100  # limit of MLflow's REST interface
_MLFLOW_PARAM_LENGTH = 500  # limit of MLflow versions before 2.8 on a database


class ServiceWriter(MetricsWriter):
    """Base of the writers for trackers: what is kept with a run in addition to its numbers."""

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._is_finished = False

    def _note_outcome(self, summary: Mapping[str, Any]) -> None:
        self._is_finished = summary.get("stop_reason") not in FAILURES

    @property
    def _best_policy(self) -> Path | None:
        """Directory of the best policy, if it was saved."""
        found = None if self._run_dir is None else self._run_dir / BEST_POLICY
        return found if found is not None and found.is_dir() else None

    @property
    def _films(self) -> dict[str, Path]:
        """Films below the run directory, such as those of a callback, by their names there."""
        root = self._run_dir
        found = {} if root is None else {p.relative_to(root): p for p in sorted(root.rglob(FILMS))}
        return {n.as_posix(): path for n, path in found.items() if n.parts[0] not in COPIES}


class WandbWriter(ServiceWriter):
    """Weights & Biases, with environment steps as the step.

    The best policy becomes an artifact of the type `model`, and films below the run directory are
    logged, both at the end.

    Args:
        project: Project that the run belongs to.
        name: Name of the run; None: the title of the run.
        **init: Further arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`.

    Raises:
        MissingExtraError: If wandb is not installed.
    """

    def __init__(self, project: str = "maze_train", name: str | None = None, **init: Any) -> None:
        super().__init__()
        self._wandb = import_extra("wandb", "wandb", "WandbWriter")
        self._project = project
        self._name = name
        self._init = init
        self._run: Any = None
        self._env_steps = 0

    def start(self, run: RunInfo) -> None:
        """Open its own run; this process may have others.

        A run that is continued is a new one there, with the rows from before.

        Raises:
            ConfigError: If wandb refuses it, as without a login.
        """
        self._run_dir = run.run_dir
        arguments: dict[str, Any] = {
            "project": self._project,
            "name": self._name or run.title or None,
            "config": run.config,
            "dir": None if run.run_dir is None else str(run.run_dir),
            # Without this a second run in the process would take over the first one.
            "reinit": "create_new",
        }
        try:
            self._run = self._wandb.init(**{**arguments, **self._init})
        except (self._wandb.Error, TypeError) as error:  # a TypeError names unknown arguments
            problem = f"wandb.init refused it ({error}); mode=offline needs no login"
            raise ConfigError("WandbWriter", problem, self._init or self._project) from error
        for row in run.past_rows:
            self.write(row)

    def write(self, row: Mapping[str, float]) -> None:
        """Log one row."""
        self._env_steps = int(row[ENV_STEPS])
        self._run.log(dict(row), step=self._env_steps)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Set the summary of the run, and keep policy and films."""
        self._note_outcome(summary)
        self._run.summary.update(dict(summary))
        video = self._wandb.Video
        films = {name[: -len(".mp4")]: video(str(path)) for name, path in self._films.items()}
        if films:
            self._run.log(films, step=self._env_steps)
        if self._best_policy is not None:
            artifact = self._wandb.Artifact(f"policy-{self._run.id}", type="model")
            artifact.add_dir(str(self._best_policy))
            self._run.log_artifact(artifact, aliases=["best"])

    def close(self) -> None:
        """End the run; one that did not come to its end is marked as failed."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._is_finished else 1)


class MLflowWriter(ServiceWriter):
    """MLflow, with environment steps as the step.

    The best policy and films below the run directory become artifacts at the end. In names
    everything but letters, digits and `_-.:/` is an underscore, as MLflow wants it. A server that
    cannot be reached while the run continues is reported in one line, and training continues
    without.

    Args:
        tracking_uri: Where runs are kept, a database or a server; None:
            `sqlite:///<run_dir>/mlflow.db` and `<run_dir>/mlartifacts`, or MLflow's own default if
            the run has no directory.
        experiment: Name of the experiment that the run belongs to.
        name: Name of the run; None: the title of the run.

    Raises:
        MissingExtraError: If mlflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "maze_train",
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._mlflow = import_extra("mlflow", "mlflow", "MLflowWriter")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._name = name
        self._client: Any = None
        self._run_id = ""

    def start(self, run: RunInfo) -> None:
        """Open a run and log the configuration as its parameters.

        A run that is continued is a new one there, with the rows from before.

        Raises:
            ConfigError: If MLflow cannot keep runs there.
        """
        self._run_dir = run.run_dir
        try:
            with self._calls():
                self._open(run)
        except OSError as error:
            raise ConfigError(
                "MLflowWriter.tracking_uri", str(error), self._tracking_uri
            ) from error
        for row in run.past_rows:
            self.write(row)

    def _open(self, run: RunInfo) -> None:
        uri, artifacts = self._tracking_uri, None
        if uri is None and run.run_dir is not None:
            run.run_dir.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{run.run_dir / 'mlflow.db'}"
            # Without one they would be below the working directory, which may belong to other code.
            artifacts = (run.run_dir.absolute() / "mlartifacts").as_uri()
        # A client of our own: mlflow.start_run and mlflow.set_tracking_uri set global state.
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment, artifact_location=artifacts)
            if known is None
            else known.experiment_id
        )
        name = self._name or run.title or None
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id
        param = self._mlflow.entities.Param
        params = [
            param(_mlflow_name(key), str(value)[:_MLFLOW_PARAM_LENGTH])
            for key, value in flattened(run.config).items()
        ]
        for i in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[i : i + _MLFLOW_PARAMS_PER_CALL])

    def write(self, row: Mapping[str, float]) -> None:
        """Log one row."""
        metric = self._mlflow.entities.Metric
        now_ms = int(time.time() * 1000)
        step = int(row[ENV_STEPS])
        metrics = [
            metric(_mlflow_name(name), float(value), now_ms, step) for name, value in row.items()
        ]
        with self._calls():
            self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the outcome as tags, and keep policy and films."""
        self._note_outcome(summary)
        with self._calls():
            for name, value in flattened(summary).items():
                self._client.set_tag(self._run_id, _mlflow_name(f"summary.{name}"), str(value))
            if self._best_policy is not None:
                self._client.log_artifacts(self._run_id, str(self._best_policy), BEST_POLICY)
            for name, path in self._films.items():
                folder = name.rpartition("/")[0] or None
                self._client.log_artifact(self._run_id, str(path), folder)

    def close(self) -> None:
        """End the run; one that did not come to its end is marked as failed."""
        if self._client is not None and self._run_id:
            client, self._client = self._client, None
            with self._calls():
                status = "FINISHED" if self._is_finished else "FAILED"
                client.set_terminated(self._run_id, status=status)

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Calls of MLflow, whose failure is that of the place where runs are kept."""
        try:
            yield
        except self._mlflow.MlflowException as error:
            raise OSError(str(error)) from error


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-.:/ ]", "_", name, flags=re.ASCII)
