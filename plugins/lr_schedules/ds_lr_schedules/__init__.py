"""Learning-rate schedules for ds_core: range test, one cycle, and warm-up with constant, linear or
cosine tails.

Nothing is imported here. `plugin` declares the names, `curves` is the arithmetic, `schedules` the
classes that write it into an optimizer, and `config` the models that check ``scheduler.params``.
"""

from __future__ import annotations

__version__ = "0.1.0"
