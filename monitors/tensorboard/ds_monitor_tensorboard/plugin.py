"""What this distribution offers to ds_core: the section ``tensorboard`` and its monitor (torch-free)."""

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
