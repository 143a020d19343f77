"""Computes steps again, and names the rank and module of a bit that has flipped.

A step that is due is recorded while it runs (`recording`): its inputs, random states and buffers
by `events`, and checksums of what each module gives by `trace`. Before the optimizer uses its
gradients, the step is computed again (`replay`), checksums are compared between the passes
(`verdict`) and between ranks that must have the same (`replicas`), and `checking` acts.

Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
