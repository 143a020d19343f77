"""Collectives that gradients flow through: each is named for its forward, and its backward is the
matching collective.

| function | forward | backward |
| --- | --- | --- |
| `copy_to` | identity | all-reduce |
| `reduce_from` | all-reduce | identity |
| `gather` | all-gather | own part |
| `split` | own part | all-gather |
| `gather_to` | all-gather | reduce-scatter |
| `reduce_scatter` | reduce-scatter | all-gather |
| `all_to_all` | exchange | the reverse exchange |
| `mean` | mean | identity |

They go over `ds_core.comm`, so its providers and interceptors serve them too. In a group of one
rank the input itself is returned. Under torch.compile a collective is one operation of the graph.
Names load on first use, so importing this package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
