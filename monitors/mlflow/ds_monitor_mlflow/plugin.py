"""The section ``mlflow`` and its monitor, as they are offered to ds_core (torch-free)."""

from ds_monitor_kit import ServicePlugin

PLUGIN = ServicePlugin(
    section="mlflow",
    package="mlflow",
    requirement="mlflow-skinny",
    model="ds_monitor_mlflow.config:MLflowConfig",
    monitor="ds_monitor_mlflow.monitor:MLflowMonitor",
)

ds_config = PLUGIN.ds_config
ds_check = PLUGIN.ds_check
ds_monitors = PLUGIN.ds_monitors
