"""The conformance kit for monitors: subclass `MonitorConformance` in a test module and give it your
monitor.

It writes events and reads them back from where the monitor put them, so it tests what users will
see.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ds_core.engine import Monitor
from ds_core.entries import Event, resolve
from ds_core.errors import PluginError
from ds_testing.kits.tools.plugin import PluginConformance

Row = tuple[str, float, int]


class MonitorConformance:
    """Inherit, and implement `make_monitor` and `read_events`.

    ``class TestMine(MonitorConformance)``: the name must start with Test, so that pytest collects
    it.
    """

    relative_tolerance: float = 1e-6
    """How far a value read back may be off; the default allows a monitor to keep float32."""

    def make_monitor(self, tmp_path: Path) -> Monitor:
        """A new monitor that writes below `tmp_path` (or to a fake service); called more than once
        in no test.
        """
        raise NotImplementedError

    def read_events(self, tmp_path: Path) -> list[Row]:
        """What others can read now, as ``(name, value, step)``; within one name in the order
        written.

        Called at any time: before anything was written it returns an empty list.
        """
        raise NotImplementedError

    def stored_name(self, name: str) -> str:
        """The name under which `read_events` shows `name`; override when your storage cannot hold
        every name.
        """
        return name

    def test_is_a_monitor(self, tmp_path: Path) -> None:
        """It has the contract's methods and a name to show in warnings."""
        monitor = self.make_monitor(tmp_path)
        assert isinstance(monitor, Monitor), (
            f"{type(monitor).__name__} lacks a method of ds_core.engine.Monitor"
        )
        assert isinstance(monitor.name, str) and monitor.name, "a monitor needs a name"
        monitor.close()

    def test_flush_makes_events_readable(self, tmp_path: Path) -> None:
        """After `flush`, and before `close`, everything written is there."""
        monitor = self.make_monitor(tmp_path)
        events = [
            Event("Train/loss", 2.5, 8),
            Event("Train/lr", 1e-4, 8),
            Event("Train/loss", 0.0, 16),
        ]
        monitor.write_events(events)
        monitor.flush()
        self.check(tmp_path, events)
        monitor.close()

    def test_order_is_kept(self, tmp_path: Path) -> None:
        """Events of one name are read in the order written, over several calls."""
        monitor = self.make_monitor(tmp_path)
        events = [Event("loss", 1.0 / (i + 1), i) for i in range(20)]
        for start in range(0, 20, 5):
            monitor.write_events(events[start : start + 5])
        monitor.close()
        self.check(tmp_path, events)

    def test_many_events(self, tmp_path: Path) -> None:
        """A thousand events of ten names arrive, none lost and none twice."""
        monitor = self.make_monitor(tmp_path)
        events = [Event(f"group/metric_{i % 10}", float(i), i // 10) for i in range(1000)]
        for start in range(0, 1000, 100):
            monitor.write_events(events[start : start + 100])
        monitor.flush()
        monitor.close()
        self.check(tmp_path, events)

    def test_unflushed_events_are_a_beginning(self, tmp_path: Path) -> None:
        """Buffering is allowed, but what is readable early is a beginning of what was written, and
        comes once.
        """
        monitor = self.make_monitor(tmp_path)
        events = [Event("loss", float(i), i) for i in range(50)]
        monitor.write_events(events[:25])
        early = self.read_events(tmp_path)
        monitor.write_events(events[25:])
        assert len(early) <= 25, f"{len(early)} events are readable after 25 were written"
        self.check_rows(early, events[: len(early)])
        monitor.flush()
        self.check(tmp_path, events)
        monitor.close()

    def test_close_flushes(self, tmp_path: Path) -> None:
        """`close` alone is enough."""
        monitor = self.make_monitor(tmp_path)
        monitor.write_events([Event("loss", 3.0, 1)])
        monitor.close()
        self.check(tmp_path, [Event("loss", 3.0, 1)])

    def test_close_twice_is_harmless(self, tmp_path: Path) -> None:
        """A second `close` neither raises nor repeats or loses an event."""
        monitor = self.make_monitor(tmp_path)
        monitor.write_events([Event("loss", 3.0, 1)])
        monitor.close()
        monitor.close()
        self.check(tmp_path, [Event("loss", 3.0, 1)])

    def test_flush_twice_is_harmless(self, tmp_path: Path) -> None:
        """A second `flush` repeats nothing; writing goes on after it."""
        monitor = self.make_monitor(tmp_path)
        monitor.write_events([Event("loss", 3.0, 1)])
        monitor.flush()
        monitor.flush()
        monitor.write_events([Event("loss", 2.0, 2)])
        monitor.close()
        self.check(tmp_path, [Event("loss", 3.0, 1), Event("loss", 2.0, 2)])

    def test_nothing_to_write(self, tmp_path: Path) -> None:
        """An empty batch, and a flush and close without any event, do nothing."""
        monitor = self.make_monitor(tmp_path)
        monitor.flush()
        monitor.write_events([])
        monitor.close()
        assert self.read_events(tmp_path) == []

    def test_values_that_are_not_finite(self, tmp_path: Path) -> None:
        """NaN and infinities do not raise; they may be dropped or kept, but the events around them
        arrive.
        """
        monitor = self.make_monitor(tmp_path)
        odd = [
            Event("loss", value, i + 1) for i, value in enumerate((math.nan, math.inf, -math.inf))
        ]
        finite = [Event("loss", 1.0, 0), Event("loss", 2.0, 4)]
        monitor.write_events([finite[0], *odd, finite[1]])
        monitor.close()
        rows = self.read_events(tmp_path)
        self.check_rows([row for row in rows if math.isfinite(row[1])], finite)
        for name, value, step in (row for row in rows if not math.isfinite(row[1])):
            written = odd[step - 1].value
            same = value == written or (math.isnan(value) and math.isnan(written))
            assert same, f"{name} at step {step} was written as {written} and is read as {value}"

    def test_extreme_values_and_steps(self, tmp_path: Path) -> None:
        """Zero, tiny, huge and negative values, and steps beyond 32 bits: samples are counted, not
        steps.
        """
        monitor = self.make_monitor(tmp_path)
        values = (0.0, -1.5, 1e-30, 1e30, 16777216.0)
        events = [Event("value", value, 2**40 + i) for i, value in enumerate(values)]
        monitor.write_events([Event("value", 1.0, 0), *events])
        monitor.close()
        self.check(tmp_path, [Event("value", 1.0, 0), *events])

    def test_odd_names(self, tmp_path: Path) -> None:
        """Names with slashes, spaces, dots, quotes, commas or letters beyond ASCII keep apart and
        keep their values.
        """
        names = (
            "a/b/c",
            "a.b",
            "with space",
            "comma,quote\"'",
            "back\\slash",
            "../up",
            "größe",
            "%d {0}",
            "a:b|c*?<>",
        )
        monitor = self.make_monitor(tmp_path)
        events = [Event(name, float(i), 1) for i, name in enumerate(names)]
        stored = {self.stored_name(name) for name in names}
        assert len(stored) == len(names), "stored_name maps two names to one"
        monitor.write_events(events)
        monitor.close()
        self.check(tmp_path, events)

    def test_written_below_the_given_directory(self, tmp_path: Path) -> None:
        """A name cannot make the monitor write outside the directory it was given."""
        inside = tmp_path / "inside"
        inside.mkdir()
        monitor = self.make_monitor(inside)
        monitor.write_events(
            [Event("../escaped", 1.0, 1), Event(str(tmp_path / "absolute"), 2.0, 1)]
        )
        monitor.close()
        assert [path.name for path in tmp_path.iterdir()] == ["inside"]

    def check(self, tmp_path: Path, written: Iterable[Event]) -> None:
        """Assert that exactly the events `written` are readable, each name's in order."""
        self.check_rows(self.read_events(tmp_path), list(written))

    def check_rows(self, rows: Sequence[Row], written: Sequence[Event]) -> None:
        """Assert that `rows` are the events `written`; the order between different names is
        free."""
        expected: dict[str, list[tuple[float, int]]] = {}
        for event in written:
            expected.setdefault(self.stored_name(event.name), []).append((event.value, event.step))
        found: dict[str, list[tuple[float, int]]] = {}
        for name, value, step in rows:
            found.setdefault(name, []).append((value, step))
        assert sorted(found) == sorted(expected), (
            f"names read {sorted(found)}, names written {sorted(expected)}"
        )
        for name, pairs in expected.items():
            steps = [step for _, step in found[name]]
            assert steps == [step for _, step in pairs], (
                f"{name}: steps read {steps}, written {[s for _, s in pairs]}"
            )
            for (value, step), (want, _) in zip(found[name], pairs, strict=True):
                close = math.isclose(value, want, rel_tol=self.relative_tolerance)
                assert close, (
                    f"{name} at step {step} was written as {want!r} and is read as {value!r}"
                )


class ServicePluginConformance(PluginConformance):
    """A `PluginConformance` for the monitor of a service whose package may be missing.

    Set `defaults`, `package` and `requirement` too.
    """

    defaults: ClassVar[Mapping[str, Any]]
    """What the section holds where the config gives nothing; its model has a field `enabled`."""
    package: ClassVar[str]
    """The service's package, as it is imported."""
    requirement: ClassVar[str]
    """The service's package, as pip installs it."""

    def test_defaults(self) -> None:
        """The section's defaults are the documented ones."""
        (model,) = self.models()
        assert model().model_dump() == dict(self.defaults)

    def test_a_missing_package_matters_only_when_enabled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the section is off nothing is said; where it is on, both hooks name the cure."""
        monkeypatch.setitem(sys.modules, self.package, None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        plugin = resolve(self.entry_point)
        (model,) = self.models()
        for section in (None, model()):
            off = self._context(section)
            assert list(plugin.ds_check(off.config)) == []
            assert list(plugin.ds_monitors(off)) == []
        on = self._context(model(enabled=True))
        (problem,) = plugin.ds_check(on.config)
        missing = f"the package {self.package} is not installed; pip install {self.requirement}"
        assert str(problem) == f"{self.section}.enabled: {missing}"
        failed = f"section {self.section} is enabled, but the package {self.package} cannot be"
        with pytest.raises(PluginError, match=failed):
            plugin.ds_monitors(on)

    def _context(self, section: Any) -> Any:
        """As much of a context as the hooks of monitors read."""
        config = SimpleNamespace(section={self.section: section}.get, redacted=dict)
        return SimpleNamespace(config=config)
