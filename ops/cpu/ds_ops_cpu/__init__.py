"""CPU kernels for ds_core: optimizer steps, norms, gradient accumulation and quantisation in C++.

Nothing is imported here. `plugin` declares the kernels, `extension` says what is compiled,
`kernels` are the functions, and `cpp` holds the sources.
"""

from __future__ import annotations

__version__ = "0.1.0"
