"""dscore-sparse-gradients: gradients of embeddings are reduced row by row, only the rows that a batch
has used.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
