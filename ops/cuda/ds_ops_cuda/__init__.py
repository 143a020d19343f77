"""CUDA kernels for ds_core, and the transformer layer made of them.

Nothing is imported here. `plugin` declares the kernels, `extension` says what is compiled,
`kernels` are the core's operations on CUDA tensors, `formulas` and `fused` the operations of this
package (meaning, and functions with gradients), `checks` their comparisons, `transformer` the
layer, and `cuda` holds the sources.
"""

from __future__ import annotations

__version__ = "0.1.0"
