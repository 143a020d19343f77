"""The 1-bit family: after a warm-up, ranks exchange one sign bit per element instead of gradients.

`compress` is the exchange, with its errors fed back; `base` what the three optimizers share;
`adam`, `zero_one` and `lamb` are the optimizers.
"""

from __future__ import annotations
