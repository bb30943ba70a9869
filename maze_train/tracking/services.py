"""Writers for experiment trackers (optional packages)."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import ssl
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from html import escape
from http.client import HTTPException
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np

from maze_train.core.checks import expanded
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import atomic_write, one_at_a_time, open_own, read_json
from maze_train.core.folders import files_below, make_folders
from maze_train.core.names import BEST, SERVICES
from maze_train.core.run_directory import FAILURES
from maze_train.core.secrets import without_login
from maze_train.core.targets import import_extra
from maze_train.core.text import flattened
from maze_train.core.types import Array
from maze_train.tracking.media import animation
from maze_train.tracking.mlflow_model import MODEL, save_model
from maze_train.tracking.tracker import ENV_STEPS, TOTAL_S, MetricsWriter, RunInfo

VIDEO_FILES = "*.mp4"
"""Pattern of the files in the run directory that are uploaded in addition to the best policy."""

WANDB, ARTIFACTS = COPIES = ("wandb", "mlartifacts")
"""Directories of the tracking packages, which contain copies of the run's files."""

ANSWER_S = 10.0
"""Timeout in seconds for the first response of the server."""

SQLITE = "sqlite:///"

DEFAULT_PROJECT = "maze_train"
"""Default project of Weights & Biases and experiment of MLflow."""

PARENT_RUN, GROUP_TAG = "mlflow.parentRunId", "group_of_runs"
"""Tags of MLflow runs: the id of the parent run, and the group of a parent run."""

WRITTEN_TABLES = (
    *("experiments", "runs", "metrics", "latest_metrics", "params", "tags"),
    *("registered_models", "model_versions"),
)
"""Tables of MLflow that the writer changes."""

VALID_ID = re.compile(r"[\w .-]{1,128}")
"""Ids of runs in a service, without characters of paths and URLs."""

DATA_DIR = "WANDB_DATA_DIR"

MOST_VALUES = 10_000
"""Maximum number of values for which NumPy selects the bins of a histogram."""

_MLFLOW_PARAMS_PER_CALL = 100  # Limit of MLflow's REST interface.
_MLFLOW_PARAM_LENGTH = 500  # Limit of MLflow versions before 2.8 on a database.


class ServiceWriter(MetricsWriter):
    """Base class of the writers for experiment trackers, with the files to upload."""

    is_kept = False  # The run directory is complete without the service.

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._is_finished = False

    @abstractmethod
    def _log_row(self, row: Mapping[str, float], timestamp: float) -> None:
        """Log a row; skip rows that the service already has from before a resume."""

    def write(self, row: Mapping[str, float]) -> None:
        """Log one row."""
        self._log_row(row, time.time())

    def _write_past(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Log the rows before a checkpoint, with times relative to the last of these rows."""
        for row in rows:
            self._log_row(row, time.time() + row.get(TOTAL_S, 0.0) - rows[-1].get(TOTAL_S, 0.0))

    def _known_run(self, run: RunInfo, key: str) -> str | None:
        """Return the id of this run in a service; None for a new run.

        Args:
            run: The run.
            key: Service and project, such as `wandb:<entity>/<project>`.
        """
        is_resumed = run.run_dir is not None and run.resumed_at_step
        return service_ids(run.run_dir).get(key) if run.run_dir and is_resumed else None

    def _keep_id(self, run: RunInfo, key: str, run_id: str) -> None:
        """Store the id of this run in a service in the run directory."""
        if run.run_dir is not None:
            ids = {**service_ids(run.run_dir), key: run_id}
            with atomic_write(run.run_dir / SERVICES) as file:
                file.write(json.dumps(ids, indent=1).encode())

    def _note_outcome(self, summary: Mapping[str, Any]) -> None:
        self._is_finished = summary.get("stop_reason") not in FAILURES

    @property
    def _best_policy(self) -> dict[str, Path]:
        """Files of the best policy by name; empty if no policy was saved."""
        directory = self._run_dir and self._run_dir / BEST
        return {} if not directory or directory.is_symlink() else _named_files(directory, "*")

    @property
    def _videos(self) -> dict[str, Path]:
        """Videos below the run directory by relative name."""
        found = {} if self._run_dir is None else _named_files(self._run_dir, VIDEO_FILES)
        return {name: p for name, p in found.items() if name.partition("/")[0] not in COPIES}


def service_ids(run_dir: Path) -> dict[str, str]:
    """Return the valid ids of a run by service; empty if the file is missing or damaged."""
    with suppress(RunDirectoryError):
        ids = read_json(run_dir / SERVICES).items()
        return {key: i for key, i in ids if isinstance(i, str) and VALID_ID.fullmatch(i)}
    return {}


def _named_files(directory: Path, pattern: str) -> dict[str, Path]:
    """Return the regular files below a directory by relative name, without following links."""
    found = files_below(directory, pattern)
    return {path.relative_to(directory).as_posix(): path for path in found}


class WandbWriter(ServiceWriter):
    """Writer for Weights & Biases, with environment steps as the step.

    At the end of the run, the best policy is uploaded as an artifact of type `model`, and videos
    below the run directory are logged. A resumed run continues the same wandb run.

    Args:
        project: Project of the run; None: `WANDB_PROJECT`, or `maze_train`.
        name: Name of the run; None: `WANDB_NAME`, or in a sweep the settings that vary, otherwise
            the title of the run.
        **init: Additional arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`.

    Raises:
        MissingExtraError: If wandb is not installed.
    """

    def __init__(self, project: str | None = None, name: str | None = None, **init: Any) -> None:
        super().__init__()
        self._wandb = import_extra("wandb", "wandb", "WandbWriter")
        self._project = project or os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT)
        self._name = name or os.environ.get("WANDB_NAME")
        self._init = init
        self._run: Any = None
        self._folder: Path | None = None
        self._env_steps = 0

    def start(self, run: RunInfo) -> None:
        """Open a wandb run; this process may have other wandb runs.

        A resumed run continues the wandb run with the id in `services.json`. If there is no such
        id, for example because the project has changed, a new wandb run receives all earlier rows.

        Raises:
            ConfigError: If `wandb.init` fails, for example without a login, or because the wandb
                run of a resumed run was deleted.
            OSError: If `wandb` in the run directory is a link.
        """
        self._run_dir = run.run_dir
        key = f"wandb:{self._init.get('entity', '')}/{self._project}"
        known = self._known_run(run, key)
        given = self._init.get("dir") or os.environ.get("WANDB_DIR")
        self._folder = Path(given) if given else run.run_dir
        if self._folder is not None:
            make_folders(self._folder / WANDB)
        arguments: dict[str, Any] = {
            "project": self._project,
            "name": self._name or run.name or run.title or None,
            "group": run.group or None,
            "config": run.config,
            "dir": None if self._folder is None else str(self._folder),
            # Without this argument, a second run in the process would replace the first run.
            "reinit": "create_new",
        }
        if known is not None:
            arguments |= {"id": known, "resume": "must", "allow_val_change": True}
        try:
            self._run = self._wandb.init(**{**arguments, **self._init})
        # TypeError: unknown arguments; ValueError: raised by pydantic.
        except (self._wandb.Error, TypeError, ValueError) as error:
            remedy = "mode=offline requires no login"
            if known is not None:
                remedy = f"remove {SERVICES} from the run directory to start a new wandb run"
            problem = f"wandb.init failed ({error}); {remedy}"
            raise ConfigError("WandbWriter", problem, self._init or self._project) from error
        self._remove_links()
        self._keep_id(run, key, self._run.id)
        if known is None:
            self._write_past(run.past_rows)

    def _remove_links(self) -> None:
        """Remove wandb's links to the home directory; run directories must not contain links."""
        if self._run_dir is not None:
            for path in self._run_dir.glob(f"{WANDB}/*/logs/*"):
                if path.is_symlink():
                    path.unlink()

    def _log_row(self, row: Mapping[str, float], timestamp: float) -> None:
        self._env_steps = int(row[ENV_STEPS])
        if self._env_steps >= self._run.step:
            self._run.log({**row, "_timestamp": timestamp}, step=self._env_steps)

    def log_image(self, name: str, image: Array, env_steps: int) -> bool:
        """Log an image."""
        return self._log(name, self._wandb.Image(image), env_steps)

    def log_histogram(self, name: str, values: Array, env_steps: int) -> bool:
        """Log a histogram."""
        return self._log(name, self._wandb.Histogram(values), env_steps)

    def log_video(self, name: str, frames: Array, fps: float, env_steps: int) -> bool:
        """Log a video as an animated GIF."""
        video = self._wandb.Video(BytesIO(animation(frames, fps)), format="gif")
        return self._log(name, video, env_steps)

    def log_text(self, name: str, text: str, env_steps: int) -> bool:
        """Log a text."""
        return self._log(name, self._wandb.Html(f"<pre>{escape(text)}</pre>"), env_steps)

    def _log(self, name: str, value: object, env_steps: int) -> bool:
        self._run.log({name: value}, step=env_steps)
        return True

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, and upload policy and videos."""
        self._note_outcome(summary)
        self._run.summary.update(dict(summary))
        video = self._wandb.Video
        videos = {name[: -len(".mp4")]: video(str(path)) for name, path in self._videos.items()}
        if videos:
            self._run.log(videos, step=self._env_steps)
        if policy := self._best_policy:
            artifact = self._wandb.Artifact(f"policy-{self._run.id}", type="model")
            with self._data_below():
                for name, path in policy.items():
                    artifact.add_file(str(path), name)
                self._run.log_artifact(artifact, aliases=[BEST])

    @contextmanager
    def _data_below(self) -> Iterator[None]:
        """Make wandb copy artifacts to the run directory instead of the home directory.

        With these copies, an offline run can be uploaded from a different machine.
        """
        if self._folder is None or DATA_DIR in os.environ:
            yield
            return
        os.environ[DATA_DIR] = str(self._folder.absolute() / WANDB)  # No argument of wandb.init.
        try:
            yield
        finally:
            del os.environ[DATA_DIR]

    def close(self) -> None:
        """End the run; an unfinished run is marked as failed."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._is_finished else 1)
            self._remove_links()


class MLflowWriter(ServiceWriter):
    """Writer for MLflow, with environment steps as the step.

    At the end of the run, the best policy and videos below the run directory are stored as
    artifacts. A resumed run continues the same MLflow run. Characters that MLflow does not allow in
    names are replaced by underscores. If the server becomes unreachable during training, a message
    is printed and training continues.

    Args:
        tracking_uri: Database or server for the runs; None: `MLFLOW_TRACKING_URI`, or
            `sqlite:///<run_dir>/mlflow.db` and `<run_dir>/mlartifacts`, or MLflow's default if the
            run has no directory.
        experiment: Name of the experiment; None: `MLFLOW_EXPERIMENT_NAME`, or `maze_train`.
        name: Name of the run; None: in a sweep the settings that vary, otherwise the title of the
            run.
        registered_model: Name of a registered model in MLflow, which gets the best policy as a new
            version when training finishes without an error or interruption; None: the policy is not
            registered.

    Raises:
        MissingExtraError: If mlflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        registered_model: str | None = None,
    ) -> None:
        super().__init__()
        self._model = registered_model
        self._mlflow = import_extra("mlflow", "mlflow", "MLflowWriter")
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT)
        self._name = name
        self._group = ""
        self._client: Any = None
        self._run_id = ""
        self._last_step = -1
        """Environment steps of the last row in MLflow."""

    def start(self, run: RunInfo) -> None:
        """Open a run and log the configuration as parameters.

        A resumed run continues the MLflow run with the id in `services.json`. If there is no such
        id, for example because the experiment has changed, a new MLflow run receives all earlier
        rows.

        Raises:
            ConfigError: If MLflow cannot store runs at the given URI.
        """
        self._run_dir = run.run_dir
        try:
            with self._calls():
                self._open(run)
        except OSError as error:
            uri = without_login(self._tracking_uri or "") or None
            raise ConfigError("MLflowWriter.tracking_uri", str(error), uri) from error
        self._write_past(run.past_rows)

    def _open(self, run: RunInfo) -> None:
        uri, artifacts, database = self._tracking_uri, None, Path()
        if uri is not None and uri.startswith(SQLITE):
            uri = SQLITE + expanded(uri.removeprefix(SQLITE))
        if uri is None and run.run_dir is not None:
            make_folders(run.run_dir / ARTIFACTS)
            database = run.run_dir / "mlflow.db"
            os.close(open_own(database, os.O_RDWR))  # SQLite itself follows links.
            _check_triggers(database)
            uri = f"sqlite:///{database}"
            # Without a location, MLflow would store artifacts in the working directory.
            artifacts = (run.run_dir.absolute() / ARTIFACTS).as_uri()
        # Use a client, because mlflow.start_run and mlflow.set_tracking_uri set global state.
        check_answers(uri or "")
        with _database_opened(uri or ""):
            self._client = self._mlflow.MlflowClient(tracking_uri=uri)
            experiment = self._experiment_id(artifacts)
        self._group = run.group if self._tracking_uri is not None else ""
        key = f"mlflow:{without_login(self._tracking_uri or '')}/{self._experiment}"
        known = self._known_run(run, key)
        if known is not None and self._continue(known, artifacts):
            return
        name = self._name or run.name or run.title or None
        created = self._client.create_run(experiment, run_name=name)
        self._run_id = created.info.run_id
        if artifacts is not None and created.info.artifact_uri != _place(artifacts, self._run_id):
            raise OSError(f"{database} stores artifacts at {created.info.artifact_uri}; remove it")
        self._keep_id(run, key, self._run_id)
        param = self._mlflow.entities.Param
        params = [
            param(mlflow_name(key), str(value)[:_MLFLOW_PARAM_LENGTH])
            for key, value in flattened(run.config).items()
        ]
        for i in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[i : i + _MLFLOW_PARAMS_PER_CALL])

    def _continue(self, run_id: str, artifacts: str | None) -> bool:
        """Continue an MLflow run; return False if the run was deleted.

        Also return False if the artifacts of the run are not in the run directory, because a
        database from another user could name any file or server.
        """
        try:
            info = self._client.get_run(run_id).info
        except self._mlflow.MlflowException:
            return False
        is_elsewhere = artifacts is not None and info.artifact_uri != _place(artifacts, run_id)
        if info.lifecycle_stage != "active" or is_elsewhere:
            return False
        self._run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        history = self._client.get_metric_history(run_id, ENV_STEPS)
        self._last_step = max((point.step for point in history), default=-1)
        return True

    def _join(self, group: str) -> None:
        """Set the parent run of the group as the parent of this run."""
        run = self._client.get_run(self._run_id)
        if PARENT_RUN not in run.data.tags:
            parent = self._parent(run.info.experiment_id, group)
            self._client.set_tag(self._run_id, PARENT_RUN, parent)

    def _parent(self, experiment: str, group: str) -> str:
        """Return the id of the parent run of a group; the first run of the group creates it."""
        tag = quote(group, safe=" ,=+")  # Quotes cannot be escaped in the filter.
        text = f"tags.`{GROUP_TAG}` = '{tag}'"

        def oldest() -> str | None:
            order = ["attributes.start_time"]
            found = self._client.search_runs([experiment], text, order_by=order)
            return str(found[0].info.run_id) if found else None

        known = oldest()
        if known is not None:
            return known
        created = self._client.create_run(experiment, run_name=group, tags={GROUP_TAG: tag})
        run_id = str(created.info.run_id)
        self._client.set_terminated(run_id)
        kept = oldest() or run_id
        if kept != run_id:  # Another process has created the parent run.
            self._client.delete_run(run_id)
        return kept

    def _log_row(self, row: Mapping[str, float], timestamp: float) -> None:
        step = int(row[ENV_STEPS])
        if step <= self._last_step:
            return
        with self._calls():
            self._log_metrics(row, timestamp, step)
            if self._group:  # Not in `start`: other writers could prevent the start.
                self._join(self._group)
                self._group = ""

    def _log_metrics(self, values: Mapping[str, float], timestamp: float, step: int) -> None:
        metric, time_ms = self._mlflow.entities.Metric, int(timestamp * 1000)
        metrics = [metric(mlflow_name(k), float(v), time_ms, step) for k, v in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_image(self, name: str, image: Array, env_steps: int) -> bool:
        """Store an image as an artifact."""
        with self._calls():
            self._client.log_image(self._run_id, image, f"{_artifact(name, env_steps)}.png")
        return True

    def log_histogram(self, name: str, values: Array, env_steps: int) -> bool:
        """Store counts and edges of the bins as an artifact."""
        counts, edges = np.histogram(values, "auto" if len(values) < MOST_VALUES else 64)
        content = {"counts": counts.tolist(), "edges": edges.tolist()}
        with self._calls():
            self._client.log_dict(self._run_id, content, f"{_artifact(name, env_steps)}.json")
        return True

    def log_video(self, name: str, frames: Array, fps: float, env_steps: int) -> bool:
        """Store a video as an animated GIF artifact."""
        path = _artifact(name, env_steps)
        with TemporaryDirectory() as folder, self._calls():
            file = Path(folder, f"{Path(path).name}.gif")
            file.write_bytes(animation(frames, fps))
            self._client.log_artifact(self._run_id, str(file), str(Path(path).parent))
        return True

    def log_text(self, name: str, text: str, env_steps: int) -> bool:
        """Store a text as an artifact."""
        with self._calls():
            self._client.log_text(self._run_id, text, f"{_artifact(name, env_steps)}.md")
        return True

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the outcome as metrics and tags, and upload policy and videos."""
        self._note_outcome(summary)
        outcome = {f"summary.{name}": value for name, value in flattened(summary).items()}
        numbers = {
            name: value
            for name, value in outcome.items()
            if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
        }
        with self._calls():
            self._log_metrics(numbers, time.time(), int(summary.get(ENV_STEPS, 0)))
            for name in outcome.keys() - numbers:
                self._client.set_tag(self._run_id, mlflow_name(name), str(outcome[name]))
            policy = {f"{BEST}/{name}": path for name, path in self._best_policy.items()}
            for name, path in {**policy, **self._videos}.items():
                folder = name.rpartition("/")[0] or None
                self._client.log_artifact(self._run_id, str(path), folder)
            if self._model and self._is_finished and policy and self._run_dir is not None:
                self._register(self._model, self._run_dir.absolute() / BEST)

    def _register(self, name: str, policy: Path) -> None:
        """Store a policy as an MLflow model, as the next version of a registered model."""
        with TemporaryDirectory() as folder:
            save_model(policy, Path(folder))
            self._client.log_artifacts(self._run_id, str(Path(folder, MODEL)), MODEL)
        with suppress(self._mlflow.MlflowException):  # The registered model exists.
            self._client.create_registered_model(name)
        source = f"{self._client.get_run(self._run_id).info.artifact_uri}/{MODEL}"
        self._client.create_model_version(name, source, self._run_id)

    def close(self) -> None:
        """End the run; an unfinished run is marked as failed."""
        if self._client is not None and self._run_id:
            client, self._client = self._client, None
            with self._calls():
                status = "FINISHED" if self._is_finished else "FAILED"
                client.set_terminated(self._run_id, status=status)

    def _experiment_id(self, artifacts: str | None) -> str:
        """Return the id of the experiment; create the experiment if it does not exist.

        Args:
            artifacts: Required artifact location; None: any location. If the location of an
                existing experiment differs (the run was moved, or was made by a different user), a
                new experiment with a number in its name is created.
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
        raise AssertionError("unreachable")

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Convert MLflow errors to OSError, omitting the server's login data."""
        try:
            yield
        except self._mlflow.MlflowException as error:
            raise OSError(without_login(str(error))) from error


def check_answers(uri: str) -> None:
    """Check that an HTTP server answers; MLflow itself would retry for minutes.

    Raises:
        OSError: If the server cannot be reached. Error responses are accepted, since the server may
            require a login.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        # The URI is set by the user, never by a stored configuration.
        with urlopen(without_login(uri, ""), timeout=ANSWER_S):
            pass
    except HTTPError:
        pass
    except (OSError, HTTPException) as error:  # A URLError is an OSError.
        cause = getattr(error, "reason", error)
        if not isinstance(cause, ssl.SSLError):  # MLflow has separate certificate settings.
            problem = f"the server does not answer ({cause}); start it (mlflow server), or remove "
            raise OSError(
                f"{problem}tracking_uri to store everything in the run directory"
            ) from error


def _place(artifacts: str, run_id: str) -> str:
    """Return the location of the artifacts of a run, as chosen by MLflow."""
    return f"{artifacts}/{run_id}/artifacts"


def _check_triggers(database: Path) -> None:
    """Check that no trigger can change the place of artifacts; the database may be untrusted.

    Raises:
        OSError: If a table that the writer changes has a trigger, or the file cannot be read.
    """
    import sqlite3

    try:
        with closing(sqlite3.connect(database)) as connection:
            query = "SELECT name, lower(tbl_name) FROM sqlite_master WHERE type = 'trigger'"
            triggers = connection.execute(query).fetchall()
    except sqlite3.Error as error:
        raise OSError(f"{database} is damaged: {error}") from error
    if names := [name for name, table in triggers if table in WRITTEN_TABLES]:
        raise OSError(f"{database} has triggers, which MLflow never creates: {', '.join(names)}")


@contextmanager
def _database_opened(uri: str) -> Iterator[None]:
    """Open a SQLite file under a lock, since each process creates missing tables, silently."""
    folder = Path(uri.removeprefix(SQLITE)).parent
    log = logging.getLogger("mlflow.store.db.utils")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with one_at_a_time(folder) if uri.startswith(SQLITE) else nullcontext():
            yield
    finally:
        log.setLevel(level)


def _artifact(name: str, env_steps: int) -> str:
    """Return the artifact path of an object that a callback logged, without a file extension."""
    return f"{mlflow_name(name)}/step_{env_steps:012d}"


def mlflow_name(name: str) -> str:
    """Return a valid MLflow name; different names (also in other scripts) remain different."""
    forbidden = re.compile(r"[^\w\-.:/ ]", re.ASCII)
    return forbidden.sub(lambda m: "_" if m[0].isascii() else f"_{ord(m[0]):x}", name)
