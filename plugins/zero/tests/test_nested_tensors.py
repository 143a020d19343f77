"""`ds_zero.gather.nested_tensors`."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from ds_zero.gather.nested_tensors import tensors_of


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    logits: Any
    cache: Any = None


def test_tensors_are_found_in_order_in_every_container() -> None:
    a, b, c, d, e = (torch.full((), float(i)) for i in range(5))
    value = [
        a,
        Pair("text", (b,)),
        collections.OrderedDict(x={"y": c}),
        Output(d, cache=Output([e])),
        Output,
        None,
        3,
    ]
    assert [t.item() for t in tensors_of(value)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(tensors_of({a})) == [a]
