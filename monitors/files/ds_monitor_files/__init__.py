"""What monitors that write files share; see `ds_monitor_files.buffered` (torch-free)."""

from ds_monitor_files.buffered import *  # noqa: F403
from ds_monitor_files.buffered import __all__ as __all__
