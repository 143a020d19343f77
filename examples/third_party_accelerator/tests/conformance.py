"""ds_core's kit for accelerators, on the abacus: ``pytest tests/conformance.py``."""

from __future__ import annotations

from ds_testing import AcceleratorConformance
from torch_abacus.plugin import ds_accelerators


class TestAbacus(AcceleratorConformance):
    (entry,) = ds_accelerators()
