"""Where ranks divide a tensor and nothing tells how, a draw is refused on all ranks: no guess that
would show nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ds_tensor_parallel  # noqa: F401  - needs it installed
import pytest
import torch
from dropping_models import DEALT, MICRO, TOKENS, Attention, Block, Tokens, batch, gpt2, ids
from ds_moe import MoE
from ds_reproducibility.placement import Place, Positions, Samples
from ds_testing import run_ranks
from ds_testing.truth import start, train
from torch import Tensor, nn
from torch.nn import functional

from ds_core.errors import UsageError

S = Samples(2, 4)
HERE = Positions(8, ((4, 4),), 1, 2)
HALF = (((6, 6),),)


@pytest.mark.parametrize(
    ("place", "shape", "ranges"),
    [
        # Samples 4 and 5 of the step, in front, flattened with others, or nowhere.
        (Place(S), (2, 3), [((4, 2),), ((0, 3),)]),
        (Place(S), (8, 3), [((4, 2),), ((0, 4),), ((0, 3),)]),
        (Place(S), (5, 3), [((4, 1),), ((0, 5),), ((0, 3),)]),
        (Place(S), (), [((4, 1),)]),
        (Place(Samples(2, 4, 3)), (2,), [((4, 1), (7, 1))]),
        (Place(Samples(2, 4, 1, 1)), (7, 2, 3), [((0, 7),), ((4, 2),), ((0, 3),)]),
        # The second half of the positions.
        (Place(S, HERE), (2, 4, 3), [((4, 2),), ((4, 4),), ((0, 3),)]),
        (Place(S, HERE), (8, 3), [((4, 2),), ((4, 4),), ((0, 3),)]),
        (Place(S, HERE), (2, 1, 1), [((4, 2),), ((0, 1),), ((0, 1),)]),
        (Place(S, HERE), (2, 3), [((4, 2),), ((0, 3),)]),
        (Place(S, HERE, heads=(6,)), (2, 3, 8, 8), [((4, 2),), ((3, 3),), ((0, 8),), ((0, 8),)]),
        (Place(S, HERE), (2, 3, 4, 8), [((4, 2),), ((0, 3),), ((4, 4),), ((0, 8),)]),
        # The second half of a layer's 12 outputs, in 4 heads.
        (Place(S, None, HALF), (2, 8, 6), [((4, 2),), ((0, 8),), ((6, 6),)]),
        (Place(S, None, HALF), (2, 2, 8, 8), [((4, 2),), ((2, 2),), ((0, 8),), ((0, 8),)]),
        (Place(S, HERE, HALF), (2, 4, 6), [((4, 2),), ((4, 4),), ((6, 6),)]),
        # Both: heads 4 to 7 are this rank's along tp, and 6 and 7 along sp.
        (
            Place(S, HERE, (((8, 8),),), (4,)),
            (2, 2, 8, 8),
            [((4, 2),), ((6, 2),), ((0, 8),), ((0, 8),)],
        ),
    ],
)
def test_places(place: Place, shape: tuple[int, ...], ranges: Any) -> None:
    assert place.ranges(shape) == ranges


@pytest.mark.parametrize(
    ("place", "shape"),
    [
        (Place(S, HERE), (5, 3)),
        (Place(S, HERE), (2, 3, 3)),
        (Place(S, HERE), (2, 3, 8, 8)),
        (Place(S, HERE, heads=(5, 7)), (2, 3, 8, 8)),
        (Place(S, None, HALF), (2, 8, 5)),
        (Place(S, None, HALF), (2, 5, 8, 8)),
        (Place(S, None, HALF), (7, 6)),
        (Place(S, HERE, HALF), (2, 4, 5)),
    ],
)
def test_unclear_places(place: Place, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="it is unclear which elements of the full tensor"):
        place.ranges(shape)


class Unnamed(Attention):
    """Says nothing of heads."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (p.reshape(*x.shape[:2], 2, -1) for p in self.qkv(x).chunk(3, -1))
        out: Tensor = self.attend(query, key, value)
        return out.flatten(2)


class Summed(Block):
    """Drops sums over the outputs of a divided layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = (
            hidden
            * functional.dropout(
                hidden[..., :3].sum(-1, keepdim=True).expand(-1, -1, 3), 0.3, self.training
            ).mean()
        )
        out: Tensor = self.down(hidden)
        return out


def unnamed() -> nn.Module:
    model = Tokens()
    model.attention = Unnamed()
    return model


def summed() -> nn.Module:
    model = Tokens()
    model.attention = nn.Identity()  # type: ignore[assignment]
    model.block = Summed()
    return model


X = {"sequence_parallel": {"size": 2, "inputs": {"x": 1}}}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "heads without a name": (unnamed, X, "give the attention module an attribute num_heads"),
    "another width": (
        summed,
        {"tensor_parallel": {"autotp_size": 2}},
        "have 4 outputs on this rank",
    ),
    "tokens along tp": (
        gpt2,
        {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}},
        "set tensor_parallel.sequence_parallel or reproducibility.dropout to false",
    ),
}


def _said(name: str) -> str:
    make, config, _ = REFUSED[name]
    model = make().double()
    try:
        engine = start(model, micro=MICRO, reproducibility=DEALT, **config)
        train(engine, lambda step, index: ids(0, 0) if make is gpt2 else batch(0, 0), 1)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_are_refused(name: str) -> None:
    for said in run_ranks(2, _said, name):
        assert REFUSED[name][2] in said


def test_dropout_inside_of_experts_is_refused() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 5))
            self.moe = MoE(5, expert, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.moe(x)[0]
            return out

    engine = start(Routed().double(), micro=MICRO, reproducibility=DEALT)
    with pytest.raises(UsageError, match=r"'moe.experts.* for rows that are sorted by expert"):
        train(engine, batch, 1)
    engine.destroy()


def test_the_first_input_must_have_positions() -> None:
    found = run_ranks(2, _flat)
    assert all("a dimension of samples and one of positions" in said for said in found)


def _flat() -> str:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.dropout(self.inner(y[..., None]), 0.3, self.training) * x.mean()

    engine = start(
        Flat(),
        micro=MICRO,
        reproducibility=DEALT,
        sequence_parallel={"size": 2, "inputs": {"y": 1}},
    )
    try:
        train(engine, lambda step, index: (torch.ones(MICRO), torch.ones(MICRO, TOKENS)), 1)
    except UsageError as error:
        return str(error)
    return ""
