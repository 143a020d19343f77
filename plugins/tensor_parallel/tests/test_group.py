"""What ranks of one group have alike, and what is each one's own: random numbers and inputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from tp_models import hugging_face, ids, settings

WIDTH = 64
RATE = 0.25


def block() -> Any:
    import torch
    from ds_tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from torch import nn

    class Drop(nn.Dropout):
        def forward(self, x: Any) -> Any:
            y = super().forward(torch.ones_like(x))
            self.dropped = y == 0
            return x * y

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inside, self.after = (Drop(RATE) for _ in range(3))
            self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH)
            self.down = RowParallelLinear(2 * WIDTH, WIDTH)
            self.fails = False

        def forward(self, x: Any) -> Any:
            x = self.inside(self.up(self.before(x)))
            if self.fails:
                raise RuntimeError("inside")
            return self.after(self.down(x)).square().mean()

    return Block()


def masks() -> dict[str, Any]:
    """What is dropped where, on ranks that are seeded differently; and the random state after an
    error.
    """
    import torch

    import ds_core
    from ds_core import comm

    torch.manual_seed(comm.rank())
    engine, *_ = ds_core.initialize(model=block(), config=settings(2))
    x = torch.ones(64, WIDTH)
    model = engine.module
    losses = []
    found = []
    for _ in range(2):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        found.append({n: getattr(model, n).dropped.clone() for n in ("before", "inside", "after")})
    model.fails = True
    with pytest.raises(RuntimeError, match="inside"):
        engine(x)
    state = torch.get_rng_state()
    model.fails = False
    engine.eval()
    engine(x)
    unchanged = torch.equal(torch.get_rng_state(), state)
    engine.destroy()
    return {"losses": losses, "masks": found, "state": state, "unchanged": unchanged}


def test_dropout_is_alike_outside_and_each_ranks_own_inside() -> None:
    import torch

    one, two = run_ranks(2, masks)
    assert (
        one["losses"] == two["losses"]
        and torch.equal(one["state"], two["state"])
        and one["unchanged"]
    )
    for mine, other in zip(one["masks"], two["masks"], strict=True):
        assert torch.equal(mine["before"], other["before"]) and torch.equal(
            mine["after"], other["after"]
        )
        # Of independent masks both drop an element with the square of the rate.
        both = (mine["inside"] & other["inside"]).float().mean().item()
        assert abs(both - RATE**2) < 0.02
        for mask in (*mine.values(), other["inside"]):
            assert abs(mask.float().mean().item() - RATE) < 0.03
    first, second = (found["inside"] for found in one["masks"])
    assert not torch.equal(first, second), "the stream does not go on"


def with_divided_tokens() -> dict[str, Any]:
    """What each rank drops outside of blocks, in them on its tokens, and in regions on all
    tokens."""
    import torch
    from torch import nn

    import ds_core
    from ds_core import comm

    drop: Any = type(block().inside)
    dropped: dict[str, Any] = {}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = drop(RATE)
            self.last = drop(RATE)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x).square().mean()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lead = drop(RATE)
            self.region = Region()
            self.trail = drop(RATE)

        def forward(self, x: Any) -> Any:
            return x + self.trail(self.region(self.lead(x)))

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = block()
            self.before, self.up, self.inside, self.down, self.after = (
                getattr(made, name) for name in ("before", "up", "inside", "down", "after")
            )

        def forward(self, x: Any) -> Any:
            return self.after(self.down(self.inside(self.up(self.before(x)))))

    torch.manual_seed(comm.rank())
    engine, *_ = ds_core.initialize(model=Outer(), config=settings(2, sequence_parallel=True))
    losses = []
    for _ in range(3):  # in the first steps ranks compare their random states
        loss = engine(torch.ones(4, 16, WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    for name, module in engine.module.named_modules():
        if isinstance(module, nn.Dropout) and hasattr(module, "dropped"):
            dropped[name] = module.dropped.clone()
    state = torch.get_rng_state()
    engine.destroy()
    return {"losses": losses, "masks": dropped, "state": state}


def test_with_divided_tokens_each_rank_drops_by_masks_of_its_own() -> None:
    import torch

    one, two = run_ranks(2, with_divided_tokens)
    assert one["losses"] == two["losses"] and torch.equal(one["state"], two["state"])
    alike = {"first", "last", "blocks.0.region.before", "blocks.1.region.before"}
    assert len(one["masks"]) == 12 and alike < set(one["masks"])
    for name, mine in one["masks"].items():
        other = two["masks"][name]
        assert mine.shape[:2] == (4, 16 if name in alike or name.endswith("inside") else 8), name
        if name in alike:
            assert torch.equal(mine, other), name
        else:
            both = (mine & other).float().mean().item()
            assert abs(both - RATE**2) < 0.03, name


def different(what: str) -> str:
    import torch

    import ds_core
    from ds_core import comm
    from ds_core.errors import UsageError

    dropout = {"resid_pdrop": 0.1} if what == "random" else {}
    engine, *_ = ds_core.initialize(model=hugging_face("gpt2", **dropout), config=settings(2))
    if what == "random":
        torch.manual_seed(comm.rank())
    batch = ids(0, comm.rank() if what == "inputs" else 0)
    try:
        for _ in range(2):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
    except UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.fast_cases(
    "inputs-ranks 0 and 1 are given different inputs: input_ids, labels;", "random-random state"
)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("", ""),
        ("inputs", "ranks 0 and 1 are given different inputs: input_ids, labels;"),
        ("random", "random state"),
    ],
)
def test_a_group_must_have_the_same_inputs_and_random_state(what: str, words: str) -> None:
    one, two = run_ranks(2, different, what)
    assert one == two and words in one and bool(one) == bool(words)
