"""The autocasts of a thread, to be restored when a tile runs again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Autocasts:
    """Which autocasts are on."""

    device: str
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    """Of the device and of the CPU; None: off."""

    @classmethod
    def now(cls, device: str) -> Autocasts:
        """Those of this thread."""
        return cls(device, (_autocast_dtype(device), _autocast_dtype("cpu")))

    @property
    def enabled(self) -> bool:
        """Whether any is on."""
        return any(dtype is not None for dtype in self.dtypes)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are as they were."""
        with contextlib.ExitStack() as stack:
            for device, dtype in zip(
                dict.fromkeys((self.device, "cpu")), self.dtypes, strict=False
            ):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
            yield


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
