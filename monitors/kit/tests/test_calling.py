"""What a service may not do: end the program, show a secret, or keep training waiting without a
word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ds_monitor_kit import Background, hiding, service_monitors

from ds_core.engine import MonitorMaster
from ds_core.entries import Event
from ds_core.errors import PluginError


class Service:
    """A monitor; writing raises `fails`."""

    name = "slow"
    fails: BaseException | None = None

    def write_events(self, events: Sequence[Event]) -> None:
        if self.fails is not None:
            raise self.fails

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


KEY = "0123456789abcdef-of-nobody"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_service_that_ends_the_program_is_switched_off(error: BaseException, caplog: Any) -> None:
    slow = Service()
    slow.fails = error
    master = MonitorMaster([Background(slow)])
    for step in range(3):
        master.write_events([Event("a", 1.0, step)])
        master.flush()
    assert master.monitors == []
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "switched off and training continues" in warning
    assert (
        "called sys.exit(3)" if isinstance(error, SystemExit) else type(error).__name__
    ) in warning


def test_one_that_ends_the_program_in_its_end_does_not(caplog: Any) -> None:
    class Ends(Service):
        def close(self) -> None:
            raise SystemExit(4)

    for written in (False, True):
        ends = Ends()
        master = MonitorMaster([Background(ends)])
        if written:
            master.write_events([Event("a", 1.0, 1)])
        master.close()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2 and all("called sys.exit(4)" in text for text in said)


def _monitors(make: Any) -> Any:
    config = SimpleNamespace(section={"x": SimpleNamespace(enabled=True)}.get)
    return service_monitors(SimpleNamespace(config=config), "x", "x", "x", make)  # type: ignore[arg-type]


def test_a_start_that_fails_shows_no_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("X_API_KEY", KEY)

    def refused(section: Any) -> Any:
        raise ValueError(f"the key {KEY} is of no account")

    with pytest.raises(
        PluginError, match=r"x: ValueError: the key \*\*\* is of no account"
    ) as caught:
        _monitors(refused)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__

    def ends(section: Any) -> Any:
        raise SystemExit(f"no log-in for {KEY}")

    with pytest.raises(PluginError, match=r"x: it called sys.exit\('no log-in for \*\*\*'\)"):
        _monitors(ends)
    with pytest.raises(KeyError), hiding("x"):  # what holds no secret stays as it is
        raise KeyError("a")


def test_an_error_in_the_thread_shows_no_secret_either(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("X_API_KEY", KEY)
    slow = Service()
    slow.fails = OSError(f"cannot reach https://x/?key={KEY}")
    master = MonitorMaster([Background(slow)])
    master.write_events([Event("a", 1.0, 1)])
    master.flush()
    assert KEY not in caplog.text and "cannot reach https://x/?key=***" in caplog.text


def test_a_start_and_an_end_that_block_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("ds_monitor_kit.calling.LONG", 0.05)

    class Sleepy(Service):
        def close(self) -> None:
            time.sleep(0.2)

    def starts(section: Any) -> Any:
        time.sleep(0.2)
        return Sleepy()

    (monitor,) = _monitors(starts)
    monitor.write_events([Event("a", 1.0, 1)])
    monitor.close()
    assert [r.getMessage() for r in caplog.records] == [
        "monitor x: its start takes longer than 0.05 s, and training waits for it",
        "monitor slow: its end takes longer than 0.05 s, and training waits for it",
    ]
