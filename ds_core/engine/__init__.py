"""What runs a step: the engine, the runner that drives it, data, telemetry and checkpoints.

Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
