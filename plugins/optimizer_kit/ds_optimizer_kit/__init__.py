"""For authors of optimizers that look at more than one element at a time, under any layout.

`layout_of` says where each tensor of an engine's optimizer lies in its full parameter;
`Layout.sums` adds up what ranks compute of their parts; `MatrixExchange` brings whole matrices to
the ranks that transform them, and what comes of them back. Names load on first use, so importing
this package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
