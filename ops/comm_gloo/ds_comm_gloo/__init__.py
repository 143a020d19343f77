"""Collectives over gloo on CPU tensors; a kit for other ways to carry them out on the same groups
(torch-free).

`GlooCollectives` composes them of gloo's messages, or hands them to a `Transport` where one opens.
Between hosts that have several ranks each they go in two levels (`ds_comm_gloo.two_level`).
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
