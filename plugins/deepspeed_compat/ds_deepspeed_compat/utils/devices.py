"""`OnDevice`: build a model on a device, in a dtype."""

from __future__ import annotations

from typing import Any

import torch


class OnDevice:
    """Context: modules made inside have their parameters on `device` ("meta" allocates nothing) and
    in `dtype`.
    """

    def __init__(
        self, dtype: torch.dtype | None, device: Any = "meta", enabled: bool = True
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.enabled = enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._default = torch.get_default_dtype()
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._default)
