"""Tracker for MLflow."""

import os
from collections.abc import Mapping

from hpctrain.errors import exit_codes
from hpctrain.monitoring.trackers.base import About, Tracker

__all__ = ["MLflow"]

_STATUS = {
    exit_codes.STATUS[exit_codes.DONE]: "FINISHED",
    exit_codes.STATUS[exit_codes.STOPPED]: "KILLED",
}
# Maximum length of a parameter's value. Source: mlflow.utils.validation.
_LONGEST = 500


class MLflow(Tracker):
    """A run of MLflow, in the experiment of `$MLFLOW_EXPERIMENT_NAME` (default: script name).

    `$MLFLOW_TRACKING_URI` is the address of the server.

    Args:
        about: description of the run.
    """

    package = "mlflow"

    def __init__(self, about: About) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client_class, self._metric, self._param = MlflowClient, Metric, Param
        self._about = about

    def open(self) -> None:
        """Begin the run, or continue it."""
        about = self._about
        client = self._client = self._client_class()
        earlier = about.known_as("mlflow")
        if earlier is not None:
            self._run = earlier
            client.update_run(earlier, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or about.name
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        run = client.create_run(experiment_id, run_name=about.directory.path.name)
        self._run = run.info.run_id
        about.remember("mlflow", self._run)
        params = [self._param(name, str(v)[:_LONGEST]) for name, v in about.options.items()]
        client.log_batch(self._run, params=params)

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Record a row of metrics."""
        milliseconds = int(seconds * 1000)
        metrics = [self._metric(name, value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, status: str) -> None:
        """Record the final status of the run."""
        self._client.set_terminated(self._run, _STATUS.get(status, "FAILED"))
