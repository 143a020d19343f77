"""What monitors share: a thread that does their work, and how to write files (torch-free)."""

from ds_monitor_kit.background import Background
from ds_monitor_kit.buffered import BufferedMonitor, Buffering, JobFolder, Sink, append_whole

__all__ = ["Background", "BufferedMonitor", "Buffering", "JobFolder", "Sink", "append_whole"]
