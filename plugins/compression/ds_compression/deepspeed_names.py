"""What DeepSpeed calls things, as its release does them: for scripts that were written for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_compression import clean, clock
from ds_compression.reading import inner


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: None = None) -> nn.Module:
    """`ds_compression.redundancy_clean`, which leaves a module's number of heads to the script, as
    the release does.
    """
    return clean.redundancy_clean(model, deepspeed_config, mpu, tell_heads=False)


def is_prepared(model: nn.Module) -> bool:
    """Whether `init_compression` had this model: only then does the release compress it."""
    return clock.progress_of(inner(model)) is not None
