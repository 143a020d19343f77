"""A monitor for ds_core that records runs with Comet.

Nothing is imported here. `plugin` declares it, `config` is the section ``comet``, `monitor` does
the work.
"""

from __future__ import annotations

__version__ = "0.1.0"
