"""Every error a user can meet, each saying what is wrong, where, and the fix.

`ValueError`-family classes are for mistakes the user can correct; an `assert` elsewhere in the core
marks an invariant that only we can break.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class DSError(Exception):
    """The base of every error that ds_core raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a config.

    path: full dotted path of the key (``"fp16.loss_scale"``); ``""`` for the file as a whole.
    message: what is wrong, with the offending value and what was expected.
    fix: what to do about it; may be empty when the message says it all.
    """

    path: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.path}: {self.message}" if self.path else self.message
        return f"{head}; {self.fix}" if self.fix else head


class ConfigError(DSError, ValueError):
    """One or more problems in a config; `problems` lists all that can be found at once.

    Rules between keys are checked when each key is right, and the number of processes after that;
    `dscore config check` lists all of them.
    """

    def __init__(self, problems: Iterable[Problem] | str, origin: str = "config") -> None:
        self.problems = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        self.origin = origin
        lines = [str(p) for p in self.problems]
        if len(lines) == 1:
            super().__init__(f"{origin}: {lines[0]}")
        else:
            super().__init__(
                f"{origin}: {len(lines)} problems\n" + "\n".join(f"  - {line}" for line in lines)
            )


class PluginError(DSError, RuntimeError):
    """A plugin that is needed is missing, broken, or in conflict with another."""


class AcceleratorError(DSError, RuntimeError):
    """No usable accelerator, or one that cannot do what was asked."""


class KernelError(DSError, RuntimeError):
    """A kernel that was asked for cannot be served."""


class CommError(DSError, RuntimeError):
    """The process group could not be started or used."""


class LostRankError(CommError):
    """Another rank did not take part in a collective: it has ended, given up, or is too late."""


class RankMismatchError(CommError):
    """Ranks started with different plugins, configs or kernels."""


class CheckpointError(DSError, RuntimeError):
    """A checkpoint cannot be written or read; nothing was changed by the attempt."""


class LossScaleError(DSError, FloatingPointError):
    """The dynamic loss scale reached its floor and gradients still overflow."""


class UsageError(DSError, RuntimeError):
    """The engine was driven in a way that cannot give a right result."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    pool: dict[str, Any] = {k.lower(): k for k in known}
    hits = difflib.get_close_matches(name.lower(), list(pool), n=1, cutoff=0.6)
    return pool[hits[0]] if hits else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """ "did you mean 'x'?" of the known name most like `name`, or `otherwise` when nothing is
    close.
    """
    close = nearest(name, known)
    return f"did you mean {close!r}?" if close else otherwise


def join(path: str, key: str | int) -> str:
    """`path` extended by a key (``a.b``) or a list index (``a[0]``); overlong keys are cut."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    key = key.encode("utf-8", "backslashreplace").decode()
    key = key if len(key) <= 120 else key[:117] + "..."
    return f"{path}.{key}" if path else key


def path_text(keys: Sequence[str | int], root: str = "") -> str:
    """The path of `keys` below `root`."""
    for key in keys:
        root = join(root, key)
    return root
