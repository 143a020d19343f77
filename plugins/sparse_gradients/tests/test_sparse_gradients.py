"""Gradients of embeddings by rows: the weights of plain torch on any number of ranks, and fewer
bytes on the way.
"""

from __future__ import annotations

import copy
from typing import Any

import ds_pipeline  # noqa: F401  - these need them installed
import ds_zero  # noqa: F401
import pytest
import torch
from ds_sparse_gradients.rows import RowTensor
from ds_testing import Traffic, run_ranks
from ds_testing.truth import difference, plain
from torch import Tensor, nn

import ds_core
from ds_core import comm
from ds_core.errors import ConfigError

ROWS = 400
WIDTH = 6
GLOBAL = 8


class Net(nn.Module):
    """Tables of words and of bags, the output layer's own weight or the table's, and a table nobody
    reads.
    """

    def __init__(self, sparse: bool, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
        self.unread = nn.Embedding(7, WIDTH)
        self.last = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.last.weight = self.words.weight

    def forward(self, ids: Tensor, with_bags: bool = True) -> Tensor:
        hidden = self.words(ids).tanh().mean(dim=1)
        if with_bags:
            hidden = hidden + self.bags(ids)
        logits: Tensor = self.last(hidden)
        return logits


def ids_of(step: int) -> Tensor:
    return torch.randint(0, ROWS, (GLOBAL, 3), generator=torch.Generator().manual_seed(step))


def reads_bags(sample: int) -> bool:
    """Only the first samples do, so that not every rank has a gradient for the bags."""
    return sample < 2


def loss_of(model: Any, ids: Tensor, first: int) -> Tensor:
    """The mean over samples, each of which decides which tables it reads."""
    losses = [
        nn.functional.cross_entropy(model(row[None], reads_bags(first + i)), row[:1])
        for i, row in enumerate(ids)
    ]
    return torch.stack(losses).mean()


def alone(case: dict[str, Any], steps: int) -> nn.Module:
    model = Net(False, case["tied"]).double()
    plain(
        model,
        lambda step, _: ids_of(step),
        steps,
        clip=case.get("clip", 0.0),
        optimizer={"type": "Adam", "params": {"lr": 0.05, "weight_decay": 0.01}},
        loss=lambda model, ids: loss_of(model, ids, 0),
    )
    return model


def ours(case: dict[str, Any]) -> tuple[float, int]:
    """How far weights are from plain torch's after three steps, and the bytes sent for the last
    one.
    """
    rank = comm.rank()
    world = comm.world_size()
    gas = case.get("gas", 1)
    micro = GLOBAL // world // gas
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": case.get("clip", 0.0),
        "sparse_gradients": case.get("on", True),
        **case.get("config", {}),
    }
    made = Net(case["sparse"], case["tied"]).double()
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05, weight_decay=0.01)
    engine, *_ = ds_core.initialize(model=made, optimizer=optimizer, config=config)
    sent = 0
    for step in range(3):
        with Traffic() as traffic:
            for part in range(gas):
                first = (rank * gas + part) * micro
                engine.backward(loss_of(engine, ids_of(step)[first : first + micro], first))
                engine.step()
        sent = sum(each.bytes for each in traffic.sent)
    truth = alone(case, 3)
    error = difference(made, truth)
    engine.destroy()
    return error, sent


CASES: dict[str, dict[str, Any]] = {
    "dense": {"sparse": False, "tied": False},
    "sparse": {"sparse": True, "tied": False, "clip": 0.01, "gas": 2},
    "tied": {"sparse": False, "tied": True, "gas": 2},
    "predivide": {"sparse": True, "tied": False, "config": {"gradient_predivide_factor": 2.0}},
    "prescale": {"sparse": False, "tied": False, "config": {"prescale_gradients": True}},
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_weights_are_those_of_plain_torch(name: str, world: int) -> None:
    case = CASES[name]
    if world == 4:
        case = {**case, "gas": 1}
    for error, _ in run_ranks(world, ours, case):
        assert error < 1e-12


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_are_fewer_bytes(sparse: bool) -> None:
    case = {"sparse": sparse, "tied": False}
    (_, rows), *_ = run_ranks(2, ours, case)
    (_, whole), *_ = run_ranks(2, ours, {**case, "on": False})
    tables = 2 * ROWS * WIDTH * 8
    assert whole > 3 * tables / 2
    assert rows < whole - 0.8 * tables


def many_rows() -> float:
    """Where a batch reads every row, the whole table is reduced, once."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten()).double()
    before = made[0].weight.detach().clone()  # type: ignore[union-attr]
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "sparse_gradients": True,
        "gradient_clipping": 0.0,
    }
    engine, *_ = ds_core.initialize(
        model=made, optimizer=torch.optim.SGD(made.parameters(), lr=1.0), config=config
    )
    with Traffic() as traffic:
        engine.backward(engine(torch.arange(5)[:, None]).sum() * (comm.rank() + 1))
        engine.step()
    assert [each.op for each in traffic.sent if each.bytes > 8 * 5] == ["all_reduce"]
    error = float((made[0].weight - (before - 1.5)).abs().max())  # type: ignore[operator]
    engine.destroy()
    return error


def test_a_table_that_is_read_whole_is_reduced_whole() -> None:
    assert max(run_ranks(2, many_rows)) < 1e-12


def in_bf16(accumulate: str) -> float:
    """bf16 weights: distance from fp32 training of the same start, relative to how far it went."""
    truth = Net(False, False).bfloat16().float()
    made = Net(True, False)
    start = copy.deepcopy(truth)
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL // comm.world_size() // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": accumulate},
        "sparse_gradients": True,
    }
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    engine, *_ = ds_core.initialize(model=made, optimizer=optimizer, config=config)
    plain = torch.optim.SGD(truth.parameters(), lr=1.0)
    for step in range(2):
        for part in range(2):
            micro = GLOBAL // comm.world_size() // 2
            first = (comm.rank() * 2 + part) * micro
            engine.backward(loss_of(engine, ids_of(step)[first : first + micro], first))
            engine.step()
        plain.zero_grad()
        loss_of(truth, ids_of(step), 0).backward()
        plain.step()
    error = float((made.words.weight.float() - truth.words.weight).norm())
    went = float((truth.words.weight - start.words.weight).norm())
    engine.destroy()
    return error / went


@pytest.mark.parametrize("accumulate", ["bf16", "fp32"])
def test_sixteen_bits(accumulate: str) -> None:
    assert max(run_ranks(2, in_bf16, accumulate)) < 0.2


def refused(config: dict[str, Any]) -> str:
    model = Net(False, False)
    whole = {"train_micro_batch_size_per_gpu": 1, "sparse_gradients": True, **config}
    with pytest.raises(ConfigError) as caught:
        ds_core.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=whole
        )
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_refused_by_both_names(stage: int) -> None:
    said = refused({"zero_optimization": {"stage": stage}})
    assert "sparse_gradients" in said and "zero_optimization.stage" in said


@pytest.mark.parametrize("sparse", [False, True])
def test_a_row_tensor_adds_and_comes_back(sparse: bool) -> None:
    table = nn.Embedding(9, 2, sparse=sparse)
    table(torch.tensor([1, 1, 7])).sum().backward()
    assert table.weight.grad is not None
    rows = RowTensor(table.weight.grad)
    assert rows.indices.tolist() == [1, 7] and rows.sparse_size() == (6, 18)
    rows.add(RowTensor(table.weight.grad))
    assert torch.equal(
        rows.to_dense(), 2 * (table.weight.grad.to_dense() if sparse else table.weight.grad)
    )
    with pytest.raises(ValueError, match="cannot be added"):
        rows.add(RowTensor(torch.ones(3, 2)))


def project(table: Any, hidden: Tensor) -> Tensor:
    return hidden @ table.weight.t()


def in_a_pipeline(tied: bool) -> float:
    """Two stages over two ranks each: distance from the same run without the key, whose sums plain
    torch has.
    """
    from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec

    head = TiedLayerSpec("t", nn.Embedding, ROWS, WIDTH, forward_fn=project)
    specs = [
        TiedLayerSpec("t", nn.Embedding, ROWS, WIDTH)
        if tied
        else LayerSpec(nn.Embedding, ROWS, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        head if tied else LayerSpec(nn.Linear, WIDTH, ROWS),
    ]
    options = {
        "loss_fn": nn.functional.cross_entropy,
        "partition_method": "uniform",
        "seed_layers": True,
    }
    found = []
    for on in (False, True):
        model = PipelineModule(specs, num_stages=2, **options).double()  # type: ignore[arg-type]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.05,
            "sparse_gradients": on,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        }
        engine, *_ = ds_core.initialize(model=model, config=config)
        first = 4 * engine.ctx.mesh.index("dp")
        for step in range(2):
            mine = ids_of(step)[first : first + 4, 0].chunk(2)
            engine.train_batch(iter([(part, part.flip(0)) for part in mine]))
        found.append([p.detach().clone() for p in model.parameters()])
        engine.destroy()
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_trains_the_same(tied: bool) -> None:
    assert max(run_ranks(4, in_a_pipeline, tied)) < 1e-12
