"""The order in which units were needed in the last pass, and predictions from it.

Arithmetic only, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence


class Trace:
    """One pass over the model, compared with the pass before.

    Units are numbers. A pass that departs from the recorded order predicts nothing more; when it
    ends, its own order is recorded.
    """

    def __init__(self) -> None:
        # The order of the last pass that has ended.
        self._expected: list[int] = []
        # What this pass has needed so far.
        self._seen: list[int] = []
        # Whether this pass has departed from `_expected`.
        self._diverged = False

    def visit(self, unit: int, *, opening: bool = False) -> bool:
        """A unit is needed. Returns False when another one was expected.

        opening: a new forward begins with it; if the expected one is not `unit`, and the pass began
        with it, then the last forward had no backward, and a new pass begins.
        """
        if opening and self._seen and self._seen[0] == unit and self.ahead()[:1] != [unit]:
            self._seen = []
            self._diverged = False
        position = len(self._seen)
        self._seen.append(unit)
        # Without a prediction nothing is unexpected: one departure is reported once.
        if self._diverged or not self._expected:
            return True
        self._diverged = position >= len(self._expected) or self._expected[position] != unit
        return not self._diverged

    def seen(self) -> list[int]:
        """The units that this pass has needed so far."""
        return list(self._seen)

    def last(self) -> list[int]:
        """The units that the last pass needed."""
        return list(self._expected)

    def ahead(self) -> list[int]:
        """The units that are expected next, in order."""
        return [] if self._diverged else self._expected[len(self._seen) :]

    def distance(self, unit: int, sizes: Sequence[int]) -> int | None:
        """Elements of other units that are needed before `unit` is needed again.

        None: it is not needed again, or nothing is known.

        sizes: of all units, in elements.
        """
        between = 0
        for index in range(len(self._seen), 0 if self._diverged else len(self._expected)):
            if self._expected[index] == unit:
                return between
            between += sizes[self._expected[index]]
        return None

    def end(self) -> None:
        """The pass is over."""
        # A pass is ended again where it may have been ended before; that must not erase the order.
        if self._seen:
            self._expected = self._seen
        self._seen = []
        self._diverged = False
