"""Every stage and world size loads every other's checkpoint: weights, masters and moments are the
same bits.

Each target loads and saves again; then the two checkpoints must not differ, whatever way they are
cut into files.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from ds_checkpoint.offline import differences, open_saved
from ds_testing import run_ranks
from ds_testing.kits.train.partitioner import PRODUCTS, _axes_data, _coords, _head, _head_names
from ds_testing.models import Case, build_model, micro_batch
from ds_testing.truth import start
from ds_zero.buckets.layout import Layout
from hypothesis import given
from hypothesis import strategies as st

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 4)
CASES = {
    "bf16": Case(dtype="bfloat16", model="shared"),
    "fp32": Case(dtype="float32", model="frozen"),
}
SMALL = {"reduce_bucket_size": 100, "param_persistence_threshold": 6}


def engine_of(name: str, stage: int) -> Any:
    from ds_core import comm

    case = CASES[name]
    zero = {"stage": stage, **SMALL}
    model = build_model(case, seed=comm.rank())
    return start(model, **case.config(comm.world_size()), zero_optimization=zero)


def save(folder: Path, name: str, stage: int) -> None:
    from ds_core import comm

    engine = engine_of(name, stage)
    for step in range(2):
        engine.backward(engine(**micro_batch(CASES[name], step, 0, comm.rank())))
        engine.step()
    engine.save_checkpoint(str(folder), tag="from")
    engine.destroy()


def again(folder: Path, name: str, stage: int, tag: str) -> None:
    engine = engine_of(name, stage)
    engine.load_checkpoint(str(folder), tag="from")
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    engine.destroy()


def product(few: Collection[tuple[Any, ...]], *columns: Iterable[Any]) -> list[Any]:
    """Every combination; those that are not among the `few` are slow."""
    return [
        c if c in few else pytest.param(*c, marks=pytest.mark.slow)
        for c in itertools.product(*columns)
    ]


@pytest.mark.fast_cases("bf16-3-2")
@pytest.mark.parametrize(
    ("name", "stage", "world"),
    product([("fp32", 2, 1), ("bf16", 3, 2)], CASES, STAGES, WORLDS),
)
def test_every_layout_loads_every_other(name: str, stage: int, world: int, tmp_path: Path) -> None:
    run_ranks(world, save, tmp_path, name, stage)
    with open_saved(tmp_path, "from") as first:
        assert any(n.startswith("optimizer/exp_avg/") for n in first.source.names())
        for other_world in WORLDS:
            for other in STAGES:
                tag = f"stage{other}x{other_world}"
                run_ranks(other_world, again, tmp_path, name, other, tag)
                with open_saved(tmp_path, tag) as second:
                    assert list(differences(first, second)) == [], tag


def axes_engine(axes: dict[str, int], stage: int) -> Any:
    import torch

    import ds_core
    from ds_core import comm

    world = comm.world_size()
    mine = _coords(axes, world, comm.rank())
    model = torch.nn.ModuleDict({n: _head(n, mine) for n in _head_names(axes)}).double()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "fake_axes": {"axes": axes},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
        "zero_optimization": {"stage": stage, **SMALL},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    return engine, model, mine


def axes_save(folder: Path, axes: dict[str, int], stage: int, others: list[int]) -> None:
    engine, model, mine = axes_engine(axes, stage)
    engine.backward(sum(model[n](_axes_data(0, mine["dp"], 0)).square().mean() for n in model))
    engine.step()
    engine.save_checkpoint(str(folder), tag="from")
    engine.destroy()
    for other in others:
        engine, *_ = axes_engine(axes, other)
        engine.load_checkpoint(str(folder), tag="from")
        engine.save_checkpoint(str(folder), tag=f"stage{other}")
        engine.destroy()


@pytest.mark.fast_cases("tp2-3")
@pytest.mark.parametrize(
    ("name", "stage"),
    product([("tp2", 3), ("ep4", 2), ("pp2-ep2", 1)], PRODUCTS, STAGES),
)
def test_states_that_differ_over_axes(name: str, stage: int, tmp_path: Path) -> None:
    import json

    run_ranks(4, axes_save, tmp_path, PRODUCTS[name], stage, list(STAGES))
    texts = [
        json.loads((tmp_path / tag / "manifest.json").read_text())
        for tag in ("from", *map("stage{}".format, STAGES))
    ]
    held = [
        {
            (s["name"], tuple(sorted(s["at"].items()))): _values(tmp_path / t["tag"], s)
            for s in t["states"]
        }
        for t in texts
    ]
    assert any(at for _, at in held[0])
    for other in held[1:]:
        assert other == held[0]


def _values(folder: Path, state: dict[str, Any]) -> list[float]:
    from ds_checkpoint.folder.tensorfile import TensorFile

    values: list[float] = []
    for chunk in state["chunks"]:
        file = TensorFile(folder / chunk["file"])
        values += file.read(chunk["key"]).tolist()
        file.close()
    return values


# -- the arithmetic --------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_pieces_of_any_layout_are_covered_by_those_of_any_other(
    sizes: Any, one: int, two: int, seed: int
) -> None:
    """What a rank of the second layout needs of a tensor can be put together from what the first
    one's ranks have.
    """
    truth = [
        [random.Random(seed + i).random() for _ in range(size)] for i, size in enumerate(sizes)
    ]
    first = Layout.of(sizes, one)
    second = Layout.of(sizes, two)
    for index, values in enumerate(truth):
        stored = [
            (s.start, s.stop, values[s.start : s.stop])
            for s in (first.span(index, r) for r in range(one))
        ]
        rebuilt: list[float] = []
        for rank in range(two):
            need = second.span(index, rank)
            for begin, stop, chunk in stored:
                low = max(begin, need.start)
                high = min(stop, need.stop)
                rebuilt += chunk[low - begin : high - begin] if low < high else []
        assert rebuilt == values
