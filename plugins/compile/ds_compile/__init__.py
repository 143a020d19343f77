"""torch.compile for ds_core: what is compiled, and passes over the graphs that it captures.

The engine's `compile` is `compile_model` of `ds_compile.compile_model`; importing this package
loads no torch.
"""

from __future__ import annotations

__all__: list[str] = []
