"""Writers for experiment trackers (optional packages)."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from http.client import HTTPException
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from maze_train.core.checks import expanded
from maze_train.core.errors import ConfigError
from maze_train.core.files import one_at_a_time, open_own
from maze_train.core.folders import files_below, make_folders
from maze_train.core.names import BEST
from maze_train.core.run_directory import FAILURES
from maze_train.core.targets import import_extra
from maze_train.core.text import flattened
from maze_train.tracking.tracker import ENV_STEPS, MetricsWriter, RunInfo

FILMS = "*.mp4"
"""Patterns of files in the run directory that are uploaded besides the best policy."""

WANDB, ARTIFACTS = COPIES = ("wandb", "mlartifacts")
"""Directories of the tracking packages, which contain copies of the run's files."""

ANSWER_S = 10.0
"""Time-out in seconds for the server to answer at the start of a run."""

SQLITE = "sqlite:///"

_MLFLOW_PARAMS_PER_CALL = 100  # limit of MLflow's REST interface
_MLFLOW_PARAM_LENGTH = 500  # limit of MLflow versions before 2.8 on a database


class ServiceWriter(MetricsWriter):
    """Base class of the writers for experiment trackers; finds the files to upload."""

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._is_finished = False

    def _note_outcome(self, summary: Mapping[str, Any]) -> None:
        self._is_finished = summary.get("stop_reason") not in FAILURES

    @property
    def _best_policy(self) -> dict[str, Path]:
        """Files of the best policy by name; empty if none was saved."""
        directory = self._run_dir and self._run_dir / BEST
        return {} if not directory or directory.is_symlink() else _named_files(directory, "*")

    @property
    def _films(self) -> dict[str, Path]:
        """Videos below the run directory by relative name."""
        found = {} if self._run_dir is None else _named_files(self._run_dir, FILMS)
        return {name: p for name, p in found.items() if name.partition("/")[0] not in COPIES}


def _named_files(directory: Path, pattern: str) -> dict[str, Path]:
    """Return the regular files below a directory by relative name, without following links."""
    found = files_below(directory, pattern)
    return {path.relative_to(directory).as_posix(): path for path in found}


class WandbWriter(ServiceWriter):
    """Writer for Weights & Biases, with environment steps as the step.

    At the end of the run, the best policy is uploaded as an artifact of type `model`, and videos
    below the run directory are logged.

    Args:
        project: Project that the run belongs to.
        name: Name of the run; None for the title of the run.
        **init: Additional arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`.

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
        """Open a new run in this process, next to any other wandb runs.

        A resumed run starts a new wandb run that contains the earlier rows.

        Raises:
            ConfigError: If `wandb.init` fails, for example without a login.
            OSError: If `wandb` in the run directory is a link.
        """
        self._run_dir = run.run_dir
        if run.run_dir is not None:
            make_folders(run.run_dir / WANDB)
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
        # A TypeError names unknown arguments, a ValueError is one of pydantic.
        except (self._wandb.Error, TypeError, ValueError) as error:
            problem = f"wandb.init refused it ({error}); mode=offline needs no login"
            raise ConfigError("WandbWriter", problem, self._init or self._project) from error
        self._remove_links()
        for row in run.past_rows:
            self.write(row)

    def _remove_links(self) -> None:
        """Remove wandb's links to logs in the home directory, since no link may leave the run."""
        if self._run_dir is not None:
            for path in self._run_dir.glob(f"{WANDB}/*/logs/*"):
                if path.is_symlink():
                    path.unlink()

    def write(self, row: Mapping[str, float]) -> None:
        """Log one row."""
        self._env_steps = int(row[ENV_STEPS])
        self._run.log(dict(row), step=self._env_steps)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, and upload policy and videos."""
        self._note_outcome(summary)
        self._run.summary.update(dict(summary))
        video = self._wandb.Video
        films = {name[: -len(".mp4")]: video(str(path)) for name, path in self._films.items()}
        if films:
            self._run.log(films, step=self._env_steps)
        if policy := self._best_policy:
            artifact = self._wandb.Artifact(f"policy-{self._run.id}", type="model")
            for name, path in policy.items():
                artifact.add_file(str(path), name)
            self._run.log_artifact(artifact, aliases=[BEST])

    def close(self) -> None:
        """End the run; an unfinished one is marked as failed."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._is_finished else 1)
            self._remove_links()


class MLflowWriter(ServiceWriter):
    """Writer for MLflow, with environment steps as the step.

    At the end of the run, the best policy and videos below the run directory are stored as
    artifacts. Characters that MLflow does not allow in names are replaced by underscores. If the
    server becomes unreachable during training, a message is printed and training continues.

    Args:
        tracking_uri: Database or server that stores the runs; None:
            `sqlite:///<run_dir>/mlflow.db` and `<run_dir>/mlartifacts`, or MLflow's default if the
            run has no directory.
        experiment: Name of the experiment that the run belongs to.
        name: Name of the run; None for the title of the run.

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

        A resumed run starts a new MLflow run that contains the earlier rows.

        Raises:
            ConfigError: If MLflow cannot store runs at the given URI.
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
        if uri is not None and uri.startswith(SQLITE):
            uri = SQLITE + expanded(uri.removeprefix(SQLITE))
        if uri is None and run.run_dir is not None:
            make_folders(run.run_dir / ARTIFACTS)
            database = run.run_dir / "mlflow.db"
            os.close(open_own(database, os.O_RDWR))  # SQLite follows links
            uri = f"sqlite:///{database}"
            # Without one they would be below the working directory, which may belong to other code.
            artifacts = (run.run_dir.absolute() / ARTIFACTS).as_uri()
        # A separate client, because mlflow.start_run and mlflow.set_tracking_uri set global state.
        check_answers(uri or "")
        with _database_opened(uri or ""):
            self._client = self._mlflow.MlflowClient(tracking_uri=uri)
            experiment = self._experiment_id(artifacts)
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
        """Log the outcome as tags, and upload policy and videos."""
        self._note_outcome(summary)
        with self._calls():
            for name, value in flattened(summary).items():
                self._client.set_tag(self._run_id, _mlflow_name(f"summary.{name}"), str(value))
            policy = {f"{BEST}/{name}": path for name, path in self._best_policy.items()}
            for name, path in {**policy, **self._films}.items():
                folder = name.rpartition("/")[0] or None
                self._client.log_artifact(self._run_id, str(path), folder)

    def close(self) -> None:
        """End the run; an unfinished one is marked as failed."""
        if self._client is not None and self._run_id:
            client, self._client = self._client, None
            with self._calls():
                status = "FINISHED" if self._is_finished else "FAILED"
                client.set_terminated(self._run_id, status=status)

    def _experiment_id(self, artifacts: str | None) -> str:
        """Return the experiment; it is created unless another process was faster.

        Args:
            artifacts: Required artifact location; None for any. If an existing experiment stores
                artifacts elsewhere (the run was moved, or made by another user), a new experiment
                with a number in its name is created.
        """
        for name in chain([self._experiment], (f"{self._experiment}-{i}" for i in count(2))):
            known = self._client.get_experiment_by_name(name)
            if known is None:
                try:
                    return str(self._client.create_experiment(name, artifact_location=artifacts))
                except self._mlflow.MlflowException as error:
                    known = self._client.get_experiment_by_name(name)
                    if known is None:
                        raise error
            if artifacts in (None, known.artifact_location):
                return str(known.experiment_id)
        raise AssertionError("names do not end")

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Turn MLflow errors into OSError."""
        try:
            yield
        except self._mlflow.MlflowException as error:
            raise OSError(str(error)) from error


def check_answers(uri: str) -> None:
    """Check that an HTTP server answers; MLflow itself would retry for minutes.

    Raises:
        OSError: If the server cannot be reached. Any response counts, since it may need a login.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        with urlopen(uri, timeout=ANSWER_S):  # of the user, never of a stored configuration
            pass
    except HTTPError:
        pass
    except (OSError, HTTPException) as error:  # an URLError is an OSError
        cause = getattr(error, "reason", error)
        if not isinstance(cause, ssl.SSLError):  # MLflow has its own settings of certificates
            problem = f"the server does not answer ({cause}): start it (mlflow server), or leave "
            raise OSError(f"{problem}tracking_uri out, which keeps all in the run") from error


@contextmanager
def _database_opened(uri: str) -> Iterator[None]:
    """Let one process at a time open a SQLite file, since each creates missing tables."""
    folder = Path(uri.removeprefix(SQLITE)).parent
    with one_at_a_time(folder) if uri.startswith(SQLITE) else nullcontext():
        yield


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-.:/ ]", "_", name, flags=re.ASCII)
