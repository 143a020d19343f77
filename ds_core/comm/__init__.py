"""Everything that crosses ranks: starting the process group, collectives, interceptors around them,
agreement.

Names load on first use, so that `import ds_core.comm` brings in no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
