"""Modules that work along the axis ``sp`` while an engine has them, and alone before and
afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ds_core.comm import ALONE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Along:
    """The ranks that divide the sequence of a module."""

    def __init__(self, group: ProcessGroup | None, given: bool) -> None:
        self.group = ALONE if group is None else group
        # By the user, so that no engine changes them.
        self.given = given
        # Whether they have compared the shapes that the module is called with.
        self.checked = False

    def __deepcopy__(self, memo: Any) -> _Along:
        """Groups cannot be copied: copies of a module share this object until its engine ends."""
        return _Along(None, False) if self.group is ALONE else self


class AlongSequence(nn.Module):
    """A module with a `group`: the one given, else that of the engine that has the model; `ALONE`
    without one.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self._along = _Along(group, group is not None)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that divide the sequence."""
        return self._along.group

    def bind_sequence(self, group: ProcessGroup, zigzag: bool) -> None:
        """Use `group`, if none was given."""
        if not self._along.given:
            self._along = _Along(group, False)

    def unbind_sequence(self) -> None:
        """The engine ends: work alone, and so do copies of the module."""
        if not self._along.given:
            self._along.group = ALONE
