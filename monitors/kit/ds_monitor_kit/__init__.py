"""What monitors share: a thread that does their work, how to write files, and how to use a service.

Names load on first use, and none of them loads torch.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
