"""The conformance kit for kernels: every available provider against the reference of its operation.

What is compared is in `ds_kernel_kit.comparisons`; an operation of a plugin's own brings its
comparisons as `KernelEntry.check`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_kernel_kit.comparisons import check, has_check

from ds_core import entries as offered
from ds_core.entries import KernelEntry, resolve


class KernelConformance:
    """Inherit, and set `plugin` to the reference of your declaration module.

    ``class TestMine(KernelConformance): plugin = "my_ops.plugin"``: the name must start with Test.
    """

    plugin: str = ""
    device: str = "cpu"

    def entries(self) -> list[KernelEntry]:
        """What the plugin offers for `device`; override to leave some out."""
        found: Iterable[KernelEntry] = resolve(self.plugin).ds_kernels()
        return [e for e in found if not e.devices or self.device in e.devices]

    def test_offers_something_that_runs_here(self) -> None:
        """At least one entry is for this device, and says None when asked whether it is
        available."""
        entries = self.entries()
        assert entries, f"{self.plugin} offers no kernel for {self.device}"
        reasons = {
            e.provider: why for e in entries if (why := offered.ask(e.available)) is not None
        }
        assert len(reasons) < len({e.provider for e in entries}), f"none is available: {reasons}"

    def test_every_operation_has_a_check(self) -> None:
        """An operation of the plugin's own needs a check of its own: `KernelEntry.check`."""
        assert not (bare := sorted({e.op for e in self.entries() if not has_check(e)})), (
            f"no check for {bare}"
        )

    def test_against_the_reference(self) -> None:
        """Every available provider gives what the reference gives, to rounding."""
        for entry in self.entries():
            if entry.provider != "reference" and offered.ask(entry.available) is None:
                check(entry, self.device)
