"""The section ``comet`` and its monitor, as they are offered to ds_core (torch-free)."""

from ds_monitor_kit import ServicePlugin

PLUGIN = ServicePlugin(
    section="comet",
    package="comet_ml",
    requirement="comet_ml",
    model="ds_monitor_comet.config:CometConfig",
    monitor="ds_monitor_comet.monitor:CometMonitor",
)

ds_config = PLUGIN.ds_config
ds_check = PLUGIN.ds_check
ds_monitors = PLUGIN.ds_monitors
