"""Working on some tensors while others are being prepared (torch-free).

[Note: portions] A function that updates many tensors in place may have an attribute ``together``: a
function that takes one argument, ``body``, and calls it. Calls of the kernel inside ``body`` may
return before their work is done; all of it is done when ``together`` returns. Until then their
arguments must not change. So one portion of the tensors is worked on while the next one is prepared
in Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator


def portion_sizes() -> Iterator[int]:
    """How many tensors to pass in each call: few at first, so that work begins soon.

    See [Note: portions].
    """
    return itertools.chain((32, 64, 128), itertools.repeat(256))
