"""Tensor parallelism: layers whose weights are divided over the ranks along ``tp``.

With the section ``tensor_parallel`` models of transformers are divided without a changed line;
models of one's own are written with the layers of this package. Names load on first use, so that
this package loads no torch when imported.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
