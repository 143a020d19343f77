"""The section ``tensorboard`` and its monitor, as they are offered to ds_core (torch-free)."""

from ds_monitor_kit import ServicePlugin

PLUGIN = ServicePlugin(
    section="tensorboard",
    package="tensorboard",
    requirement="tensorboard",
    model="ds_monitor_tensorboard.config:TensorBoardConfig",
    monitor="ds_monitor_tensorboard.monitor:open_monitor",
)

ds_config = PLUGIN.ds_config
ds_check = PLUGIN.ds_check
ds_monitors = PLUGIN.ds_monitors
