"""How a run gives the model back: what was changed of it is changed back, the last change first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Undo:
    """The steps that give a model back as it was.

    A transform adds its own: ``ctx.undo(handle.remove)``.

    They run in reverse order when the engine is destroyed, or when `initialize` fails. With
    ``collective=True`` a step talks to other ranks. Where an exception ends training, these may not
    come: such a step then waits for the next `initialize` on the model, and the model stays as the
    step finds it.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], object], bool]] = []

    def __call__(self, step: Callable[[], object], *, collective: bool = False) -> None:
        """Add a step; what it returns is ignored."""
        self._steps.append((step, collective))

    def run(self, *, alone: bool = False) -> None:
        """Change everything back.

        alone: without other ranks.

        A step that fails does not stop the others.
        """
        with contextlib.ExitStack() as now:
            for step, collective in self._steps:
                if not (alone and collective):
                    now.callback(step)
            self._steps = [row for row in self._steps if alone and row[1]]

    def __reduce__(self) -> Any:
        """A copy of the model, by copy or pickle, belongs to no run: it has an empty dict
        instead."""
        return dict, ()
