"""The section ``mlflow`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option


class MLflowConfig(Section):
    """Recording with MLflow.

    Log-ins are MLflow's affair: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_TOKEN, ...
    """

    writes_outside = ("enabled",)

    enabled: bool = option(False, "Record the run with MLflow.")
    tracking_uri: str | None = option(
        None,
        "Where runs are kept: a server, a database, or a folder; null: MLFLOW_TRACKING_URI, or the "
        "folder mlruns.",
    )
    experiment: str | None = option(
        None,
        "Experiment of the run, made where there is none; null: MLFLOW_EXPERIMENT_NAME, or "
        "deepspeed.",
    )
    run_name: str | None = option(None, "Name of the run; null: MLflow makes one up.")
    run_id: str | None = option(
        None, "Continue this run, for example when training is resumed; null: a new one."
    )
