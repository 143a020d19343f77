"""What monitors of tracking services share: their package, the config as they record it, and
secrets (torch-free).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_core.entries import Event
from ds_core.errors import PluginError, Problem
from ds_monitor_kit.background import Background
from ds_monitor_kit.calling import hiding, telling

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Monitor


def check_package(
    config: RunConfig, section: str, package: str, requirement: str
) -> Iterable[Problem]:
    """For `ds_check`: that `package` is there where `section` is enabled; asked on every rank, so
    that all stop.
    """
    if getattr(config.section(section), "enabled", False):
        spec = importlib.util.find_spec(package)
        # no origin: a folder of that name, such as one for logs
        if spec is None or spec.origin is None:
            why = f"the package {package} is not installed"
            yield Problem(f"{section}.enabled", why, f"pip install {requirement}")


def service_monitors(
    ctx: Context, name: str, package: str, requirement: str, make: Callable[[Any], Monitor]
) -> list[Monitor]:
    """For `ds_monitors`: one monitor in the background when ``name.enabled``, else none.

    make: imports `package`, and makes the monitor of the section.

    Raises PluginError where the import fails.
    """
    section = ctx.config.section(name)
    if section is None or not getattr(section, "enabled", False):
        return []
    try:
        with hiding(name), telling(name, "start"):
            return [Background(make(section))]
    except ImportError as error:
        raise PluginError(
            f"the section {name} is enabled, but the package {package} cannot be imported "
            f"({error}); "
            f"pip install {requirement}, or set {name}.enabled to false"
        ) from error


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`config` as dotted keys: for services that record single parameters."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        else:
            found[path] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return found


def rows(events: Sequence[Event]) -> Iterator[tuple[int, dict[str, float]]]:
    """`events` as rows of one step, in order: ``(step, {name: value})``; a name comes once in a
    row.
    """
    step = 0
    row = dict[str, float]()
    for event in events:
        if row and (event.step != step or event.name in row):
            yield step, row
            row = {}
        step = event.step
        row[event.name] = event.value
    if row:
        yield step, row
