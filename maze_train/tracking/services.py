"""Writers for experiment trackers that are installed as extras."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from maze_train.extras import import_extra
from maze_train.tracking.tracker import ENV_STEPS, MetricsWriter, RunInfo

if TYPE_CHECKING:
    from collections.abc import Mapping


FAILURES = ("error", "interrupted")
"""Stop reasons of runs that did not come to their end."""

_MLFLOW_PARAMS_PER_CALL = 100  # limit of MLflow's REST interface
_MLFLOW_PARAM_LENGTH = 500  # limit of MLflow versions before 2.8 on a database


class WandbWriter(MetricsWriter):
    """Weights & Biases, with environment steps as the step.

    Args:
        project: Project that the run belongs to.
        name: Name of the run; None: the title of the run.
        **init: Further arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`.

    Raises:
        MissingExtraError: If wandb is not installed.
    """

    def __init__(self, project: str = "maze_train", name: str | None = None, **init: Any) -> None:
        self._wandb = import_extra("wandb", "wandb", "WandbWriter")
        self._project = project
        self._name = name
        self._init = init
        self._run: Any = None
        self._is_finished = False

    def start(self, run: RunInfo) -> None:
        """Open a run of its own; this process may have others.

        A run that is continued is a new one there, with the rows from before.
        """
        arguments: dict[str, Any] = {
            "project": self._project,
            "name": self._name or run.title or None,
            "config": run.config,
            "dir": None if run.run_dir is None else str(run.run_dir),
            # Without this a second run in the process would take over the first one.
            "reinit": "create_new",
        }
        self._run = self._wandb.init(**{**arguments, **self._init})
        for row in run.past_rows:
            self.write(row)

    def write(self, row: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(dict(row), step=int(row[ENV_STEPS]))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Set the summary of the run."""
        self._run.summary.update(dict(summary))
        self._is_finished = summary.get("stop_reason") not in FAILURES

    def close(self) -> None:
        """End the run; one that did not come to its end is marked as failed."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._is_finished else 1)


class MLflowWriter(MetricsWriter):
    """MLflow, with environment steps as the step.

    Args:
        tracking_uri: Where runs are kept; None: `sqlite:///<run_dir>/mlflow.db`, or MLflow's own
            default if the run has no directory.
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
        self._mlflow = import_extra("mlflow", "mlflow", "MLflowWriter")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._name = name
        self._client: Any = None
        self._run_id = ""
        self._is_finished = False

    def start(self, run: RunInfo) -> None:
        """Open a run and log the configuration as its parameters.

        A run that is continued is a new one there, with the rows from before.
        """
        uri = self._tracking_uri
        if uri is None and run.run_dir is not None:
            run.run_dir.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{run.run_dir / 'mlflow.db'}"
        # A client of our own: mlflow.start_run and mlflow.set_tracking_uri set global state.
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        name = self._name or run.title or None
        created = self._client.create_run(self._experiment_id(), run_name=name)
        self._run_id = created.info.run_id
        param = self._mlflow.entities.Param
        params = [
            param(key, str(value)[:_MLFLOW_PARAM_LENGTH])
            for key, value in flattened(run.config).items()
        ]
        for i in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[i : i + _MLFLOW_PARAMS_PER_CALL])
        for row in run.past_rows:
            self.write(row)

    def write(self, row: Mapping[str, float]) -> None:
        """Log one row."""
        metric = self._mlflow.entities.Metric
        now_ms = int(time.time() * 1000)
        step = int(row[ENV_STEPS])
        metrics = [metric(name, float(value), now_ms, step) for name, value in row.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the outcome as tags."""
        for name, value in flattened(summary).items():
            self._client.set_tag(self._run_id, f"summary.{name}", str(value))
        self._is_finished = summary.get("stop_reason") not in FAILURES

    def close(self) -> None:
        """End the run; one that did not come to its end is marked as failed."""
        if self._client is not None and self._run_id:
            client, self._client = self._client, None
            status = "FINISHED" if self._is_finished else "FAILED"
            client.set_terminated(self._run_id, status=status)

    def _experiment_id(self) -> str:
        known = self._client.get_experiment_by_name(self._experiment)
        if known is not None:
            return str(known.experiment_id)
        return str(self._client.create_experiment(self._experiment))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
