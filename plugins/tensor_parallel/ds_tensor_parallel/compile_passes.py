"""The compile pass ``autotp``: layers are divided before they are compiled, and their sums are
operations of the graph.

So nothing is to be changed in a graph. Naming the pass asserts that layers are divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.errors import UsageError
from ds_tensor_parallel.config import TensorParallelConfig

if TYPE_CHECKING:
    from ds_core.context import Context


def autotp(ctx: Context) -> None:
    """Layers divided over several ranks."""
    section = ctx.config.section(TensorParallelConfig)
    size = section.size if section is not None else 1
    if size < 2:
        raise UsageError(
            "compile.passes: 'autotp' needs tensor_parallel.autotp_size of 2 or more, and the "
            f"size is {size}; set it, or remove the pass"
        )
