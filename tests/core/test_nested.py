"""`ds_core.nested`: tensors in what modules take and return."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ds_core.nested import map_leaves, tensors_of


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    logits: Any
    cache: Any = None


def test_tensors_are_found_in_order_in_every_container() -> None:
    a, b, c, d, e = (torch.full((), float(i)) for i in range(5))
    value = [a, Pair("text", (b,)), collections.OrderedDict(x={"y": c}), Output(d, cache=Output([e])), Output, None, 3]
    assert [t.item() for t in tensors_of(value)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(tensors_of({a})) == [a]


def test_map_leaves_keeps_containers_and_what_is_no_tensor() -> None:
    value = [Pair(torch.ones(2), "text"), {"size": torch.Size([2, 3])}, (1, None)]
    out = map_leaves(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, value)
    assert type(out[0]) is Pair and torch.equal(out[0].first, torch.full((2,), 2.0)) and out[0].second == "text"
    assert out[1] == {"size": torch.Size([2, 3])} and out[2] == (1, None)
    assert map_leaves(lambda x: type(x).__name__, value) == [("Tensor", "str"), {"size": "Size"}, ("int", "NoneType")]
