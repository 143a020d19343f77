"""A monitor for ds_core that writes each metric to a CSV file of its own.

Nothing is imported here. `plugin` declares it, `config` is the section ``csv_monitor``, `monitor`
does the writing.
"""

from __future__ import annotations

__version__ = "0.1.0"
