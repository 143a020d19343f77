"""`ds_core.nested`: containers of what modules take and return."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ds_core.nested import map_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


def test_map_leaves_keeps_containers_and_what_is_no_tensor() -> None:
    value = [Pair(torch.ones(2), "text"), {"size": torch.Size([2, 3])}, (1, None)]
    out = map_leaves(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, value)
    assert (
        type(out[0]) is Pair
        and torch.equal(out[0].first, torch.full((2,), 2.0))
        and out[0].second == "text"
    )
    assert out[1] == {"size": torch.Size([2, 3])} and out[2] == (1, None)
    assert map_leaves(lambda x: type(x).__name__, value) == [
        ("Tensor", "str"),
        {"size": "Size"},
        ("int", "NoneType"),
    ]
