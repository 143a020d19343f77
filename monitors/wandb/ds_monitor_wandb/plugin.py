"""The section ``wandb`` and its monitor, as they are offered to ds_core (torch-free)."""

from ds_monitor_kit import ServicePlugin

PLUGIN = ServicePlugin(
    section="wandb",
    package="wandb",
    requirement="wandb",
    model="ds_monitor_wandb.config:WandbConfig",
    monitor="ds_monitor_wandb.monitor:WandbMonitor",
)

ds_config = PLUGIN.ds_config
ds_check = PLUGIN.ds_check
ds_monitors = PLUGIN.ds_monitors
