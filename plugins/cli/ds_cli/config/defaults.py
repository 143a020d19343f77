"""Defaults of ds_core that are not torch's: what ``dscore config check`` says of a config that
leaves them open.

A script that comes from plain torch would train differently, and no error says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_core.errors import Problem


def defaults_unlike_torch(config: Mapping[str, Any]) -> Iterator[Problem]:
    """A note for each key that `config`, as it was given, leaves at a default that torch does not
    have.
    """
    fp16 = config.get("fp16")
    if config.get("gradient_clipping") is None and not (
        isinstance(fp16, Mapping) and fp16.get("clip") is not None
    ):
        yield Problem(
            "gradient_clipping",
            "is not given, so gradients are clipped at a norm of 1.0; a torch loop does not clip",
            "write 1.0 to keep it, or 0 to switch it off",
        )
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return
    name = str(optimizer.get("type", "")).lower()
    given = optimizer.get("params")
    params: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    decay = params.get("weight_decay")
    if name == "adamw" and decay is None:
        yield Problem(
            "optimizer.params.weight_decay",
            "is not given, so AdamW's is 0; that of torch.optim.AdamW is 0.01",
            "write the one that you want",
        )
    elif name == "adam" and decay not in (None, 0) and "adam_w_mode" not in params:
        yield Problem(
            "optimizer.params.adam_w_mode",
            "is not given, so Adam's weight decay is that of AdamW; torch.optim.Adam adds it to the "
            "gradient",
            "write true to keep it, or false for torch's",
        )
