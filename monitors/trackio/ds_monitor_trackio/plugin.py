"""The section ``trackio`` and its monitor, as they are offered to ds_core (torch-free)."""

from ds_monitor_kit import ServicePlugin

PLUGIN = ServicePlugin(
    section="trackio",
    package="trackio",
    requirement="trackio",
    model="ds_monitor_trackio.config:TrackioConfig",
    monitor="ds_monitor_trackio.monitor:TrackioMonitor",
)

ds_config = PLUGIN.ds_config
ds_check = PLUGIN.ds_check
ds_monitors = PLUGIN.ds_monitors
