"""Activation checkpointing for ds_core: activations are computed again in backward instead of being
kept.

By config with the section ``activation_checkpointing``, by hand with `checkpoint`. `configure` and
its kin have the names and the meaning of ``deepspeed.checkpointing``. Names load on first use, so
importing this package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
