"""Client and run state as JSON plus tensors: what comes back is what went in, and nothing else goes
in.
"""

from __future__ import annotations

import collections
import datetime
import json
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ds_checkpoint.folder.values import decode, encode
from hypothesis import given
from hypothesis import strategies as st

from ds_core.errors import CheckpointError


def through(value: Any, own: bool = False) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(
        json.loads(json.dumps(encode(value, "x", tensors, own=own), allow_nan=False)),
        tensors.__getitem__,
        "x",
    )


def alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return bool(a == b)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$tuple"), inner)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(plain)
def test_comes_back_as_it_was(value: Any) -> None:
    assert alike(through(value), value)


@pytest.mark.parametrize(
    "value",
    [float("inf"), -float("inf"), float("nan"), -0.0, 5e-324, 2**4000, "\ud800", {"$t": {"$t": 1}}],
)
def test_odd_values(value: Any) -> None:
    assert alike(through(value), value)


def test_tensors_and_ordered_dicts() -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    back = through(
        {"model": state, "view": torch.arange(6).view(2, 3).T[1:], "none": torch.empty(0, 4)}
    )
    assert type(back["model"]) is collections.OrderedDict
    assert torch.equal(back["model"]["weight"], state["weight"])
    assert back["view"].shape == (2, 2)
    assert back["none"].shape == (0, 4)


def test_own_states_may_count_by_int() -> None:
    value = {"milestones": collections.Counter({2: 1, 40: 3}), "table": {1: "a", "b": 2}}
    back = through(value, own=True)
    assert back == value
    assert type(back["milestones"]) is collections.Counter


class Point(NamedTuple):
    x: int


class Text(str):
    pass


deep: list[Any] = []
deep.append(deep)

BAD = [
    (1 + 2j, "complex", "it.real"),
    ({1, 2}, "set", "sorted"),
    (b"x", "bytes", "hex"),
    (np.float64(1), "numpy.float64", "item()"),
    (np.zeros(2), "numpy.ndarray", "from_numpy"),
    (pathlib.Path("a"), "Path", "str(it)"),
    (Point(1), "Point", "tuple(it)"),
    (Text("a"), "Text", "str(it)"),
    (datetime.datetime(2020, 1, 1), "datetime", "isoformat"),
    (torch.nn.Linear(1, 1), "Linear", "state_dict()"),
    (torch.float32, "dtype", "str(it)"),
    (collections.defaultdict(int), "defaultdict", "dict(it)"),
    ({1: 2}, "key 1", "str(key)"),
    ({("a", "b"): 2}, "tuple", "str(key)"),
    (torch.zeros(2, dtype=torch.complex128), "complex128", "view_as_real"),
    (torch.zeros(2).to_sparse(), "sparse", "to_dense"),
    (torch.zeros(2, device="meta"), "meta", "no values"),
    (1 << 10000, "int", "str(it)"),
    (deep, "nested", "holds itself"),
    (lambda: 0, "function", "tuples"),
]


@pytest.mark.parametrize("value, what, fix", BAD, ids=[w for _, w, _ in BAD])
def test_what_cannot_be_kept_is_named_with_the_fix(value: Any, what: str, fix: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"a": [0, value]}, "client_state", {})
    assert "client_state['a'][1]" in str(caught.value)
    assert what in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {"$nope": 1},
        {"$tuple": 1},
        {"$float": "x"},
        {"$dict": [1]},
        {"$tuple": [], "a": 1},
        {"$tensor": "no"},
    ],
)
def test_damaged_values_are_refused(data: Any) -> None:
    with pytest.raises(CheckpointError, match="here"):
        decode(data, {}.__getitem__, "here")
