"""All that a resumed run needs, as one record, for authors of checkpointers.

`RunState(engine)` gives what is to be saved and puts it back; `SavedRun` is what it takes. `slices`
says which part of a full parameter this rank has. Names load on first use, so importing this
package loads no torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
