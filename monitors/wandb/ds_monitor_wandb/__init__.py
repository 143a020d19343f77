"""A monitor for ds_core that records runs with Weights & Biases.

Nothing is imported here. `plugin` declares it, `config` is the section ``wandb``, `monitor` does
the work.
"""

from __future__ import annotations

__version__ = "0.1.0"
