"""A monitor for ds_core that writes TensorBoard event files.

Nothing is imported here. `plugin` declares it, `config` is the section ``tensorboard``, `records`
is the file format and `monitor` does the writing.
"""

from __future__ import annotations

__version__ = "0.1.0"
