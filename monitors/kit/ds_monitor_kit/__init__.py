"""What monitors share: a thread that does their work, how to write files, and how to use a service
(torch-free).
"""

from ds_monitor_kit.background import Background
from ds_monitor_kit.buffered import BufferedMonitor, Buffering, JobFolder, Sink, append_whole
from ds_monitor_kit.calling import hiding, telling
from ds_monitor_kit.services import check_package, flat, rows, service_monitors

__all__ = [
    "Background",
    "BufferedMonitor",
    "Buffering",
    "JobFolder",
    "Sink",
    "append_whole",
    "check_package",
    "flat",
    "hiding",
    "rows",
    "service_monitors",
    "telling",
]
