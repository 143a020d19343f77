"""Quantisation-aware training, pruning and layer reduction, by the config section
``compression_training``.

`init_compression` prepares a model, training follows the config's schedule, and `redundancy_clean`
bakes the result into plain weights. The documented calls are here; `apply`, `clean` and `student`
have them.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
