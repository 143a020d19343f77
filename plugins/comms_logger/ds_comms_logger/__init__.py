"""Counts, sizes and times collectives: the section ``comms_logger``, and `log_summary`, which
prints the table.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
