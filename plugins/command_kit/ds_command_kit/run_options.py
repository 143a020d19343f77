"""`RunOption`: what the hook ``ds_run_options`` gives (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.entries import Ref


@dataclass(frozen=True, slots=True)
class RunOption:
    """An option of ``dscore run``."""

    load: Ref
    """Called as ``load(value, words)`` when the option is given, before anything starts.

    value: what was given; true for a flag. words: those after ``dscore run``, without this option.
    It returns variables for the processes, by name; or the exit code, where it has done what was
    asked for and nothing is to be run any more.
    """
    help: str
    """Its line in ``dscore run --help``."""
    metavar: str = ""
    """What the help calls the value; "" for a flag."""
    choices: tuple[str, ...] = ()
    """The values that there are; empty: any."""
    panel: str = "Other packages"
    """The heading in ``dscore run --help`` that it stands under."""
