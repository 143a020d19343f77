"""One row of the matrix: trained in its layout, and by plain torch in one process in fp64.

The model is the decoder of tests/combinations, which is one module, the same as a pipeline, and
with experts. A step trains on the same micro-batches in every layout.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "combinations"))

import models as m
import torch
from ds_sequence_parallel import RingAttention
from ds_testing.kits.layouts.runs import merged
from ds_testing.kits.matrix.covering import Row
from features import ALONE, FEATURES, NAMES, RANKS, ranks_together
from optimizer_trials import made
from torch import Tensor, nn

STEPS = 4
THAWED_AT = 1
"""The step before which the frozen parameters are thawed."""
FROZEN = ("layers.1.attention.k_proj.weight", "layers.2.mlp.", "layers.2.first.bias")
Trained = tuple[list[float], dict[str, Tensor]]
"""The losses of steps, and weights in the end."""


# -- what both sides have --------------------------------------------------------------------------


def freeze(model: nn.Module, trained: str) -> None:
    if trained != "all":
        for name, param in model.named_parameters():
            if name.startswith(FROZEN):
                param.requires_grad_(False)


def thaw(model: nn.Module) -> None:
    model.requires_grad_(True)


def groups_of(model: nn.Module, row: Row) -> list[dict[str, Any]]:
    """What the optimizer is given; parameters that are thawed later belong to it from the start."""
    given = [p for p in model.parameters() if p.requires_grad or row["trained"] == "thawed"]
    if row["groups"] == "one":
        return [{"params": given}]
    rest = {"params": [p for p in given if p.dim() < 2], "weight_decay": 0.0, "lr": 0.005}
    return [{"params": [p for p in given if p.dim() > 1]}, rest]


def number(micro: int) -> tuple[int, int]:
    """The micro-batch of this number in its step, for `models.batch`: of uneven numbers of labels."""
    return micro, micro % 4


# -- in its layout ---------------------------------------------------------------------------------


def settings(row: Row, folder: str, gas: int) -> dict[str, Any]:
    """The config of a row."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": m.MICRO}
    for name, value in row.items():
        config = merged(config, FEATURES[name][value].config)
    config["gradient_accumulation_steps"] = gas
    section = config.setdefault("zero_optimization", {})
    section |= {"reduce_bucket_size": 300, "param_persistence_threshold": 8}
    if row["offload"] == "nvme":
        section["offload_optimizer"]["nvme_path"] = folder
    if "size" in config.get("sequence_parallel", {}):
        whole = row["pp"] == "none"
        config["sequence_parallel"]["inputs"] = m.INPUTS if whole else {"inputs": 1, "labels": 1}
    return config


def model_of(row: Row) -> nn.Module:
    block = {"none": m.Block, "experts": m.ExpertBlock, "ep": m.DividedExpertBlock}[row["ep"]]
    if row["pp"] == "none":
        model: nn.Module = m.Decoder(block)
    else:
        model = m.pipeline(block, chunks=2 if row["pp"] == "interleaved" else 1)
    return prepared(model, row)


def prepared(model: nn.Module, row: Row) -> nn.Module:
    """The model with what a row has in its modules."""
    if row["random"] == "dropout":
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.25
    if row["sp"] == "ring":
        for module in model.modules():
            if isinstance(module, m.Attention):
                module.core = Ring()
    return model.double() if row["precision"] == "fp64" else model


class Ring(RingAttention):
    """Of [batch, positions, heads, size], as the model has them."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (query, key, value))
        return super().forward(*heads).transpose(1, 2)


def ranks_of(row: Row) -> tuple[int, int]:
    """How many ranks a row takes, and how many of them have data of their own."""
    together = ranks_together(row)
    places = max(1, RANKS // together) if together > 1 else 2
    return together * places, places


def train_in_layout(
    row: Row, folder: str, gas: int, steps: Sequence[int], load: bool, save: bool
) -> Trained:
    """On every rank: some steps, and the whole weights that this rank has a part of."""
    from ds_testing.truth import whole_weights

    import ds_core

    model = model_of(row)
    freeze(model, row["trained"])
    grouped = row["groups"] == "two" or row["trained"] == "thawed"
    engine, *_ = ds_core.initialize(
        model=model,
        model_parameters=groups_of(model, row) if grouped else None,
        config=settings(row, folder, gas),
    )
    if load:
        engine.load_checkpoint(folder)
    losses = []
    for step in steps:
        if row["trained"] == "thawed" and step >= THAWED_AT:
            thaw(engine.module)
        losses.append(one_step(engine, row, step, gas))
    if save:
        engine.save_checkpoint(folder)
    found = whole_weights(engine)
    engine.destroy()
    return losses, found


def one_step(engine: Any, row: Row, step: int, gas: int) -> float:
    """The mean loss of a step, of all ranks."""
    from ds_core import comm

    mesh = engine.ctx.mesh
    # A micro-batch to each rank in turn, as one process is to draw its random numbers.
    numbers = range(mesh.index("batch"), gas * mesh.size("batch"), mesh.size("batch"))
    if row["pp"] != "none":
        batches = [m.pipe_batch(step, *number(place)) for place in numbers]
        return float(engine.train_batch(iter(batches)))
    total = torch.zeros((), dtype=torch.float64)
    for place in numbers:
        loss = engine(**m.batch(step, *number(place)))
        engine.backward(loss)
        engine.step()
        total += loss.detach().double() / gas
    comm.all_reduce(total)
    return float(total) / comm.world_size()


def in_layout(ranks: Any, row: Row, folder: str) -> Trained:
    """Losses and whole weights of a row, perhaps saved and loaded half-way."""
    world, places = ranks_of(row)
    gas = int(row["gas"])
    if row["moved"] == "none":
        return _together(
            ranks(world, train_in_layout, dict(row), folder, gas, list(range(STEPS)), False, False)
        )
    half = STEPS // 2
    first = _together(
        ranks(world, train_in_layout, dict(row), folder, gas, list(range(half)), False, True)
    )
    then, world, gas = _moved(row, world, places, gas)
    last = _together(
        ranks(world, train_in_layout, then, folder, gas, list(range(half, STEPS)), True, False)
    )
    return first[0] + last[0], last[1]


def _moved(row: Row, world: int, places: int, gas: int) -> tuple[dict[str, str], int, int]:
    """The row that goes on, its ranks and accumulation."""
    then = dict(row)
    bound = row["offload"] in ("param", "zenflow") or row["wires"] != "none"
    bound = bound or row["optimizer"] == "OneBitAdam"
    if row["moved"] == "stage" and not bound:
        others = {"z0": "z1", "z1": "z3", "z2": "z1", "z3": "z2"}
        then["stage"] = others[row["stage"]]
    if row["moved"] == "world" and places == 2 and row["ep"] != "ep" and row["wires"] == "none":
        return then, world // 2, gas * 2
    return then, world, gas


def _together(found: Sequence[Trained]) -> Trained:
    """What ranks have, checked to be the same on all that have it."""
    losses, _ = found[0]
    whole: dict[str, Tensor] = {}
    for own, weights in found:
        assert own == losses, f"losses differ between ranks: {own}, {losses}"
        for name, weight in weights.items():
            other = whole.setdefault(name, weight)
            assert torch.equal(other, weight), f"{name} differs between ranks"
    return losses, whole


# -- in one process --------------------------------------------------------------------------------


def plainly(row: Row, total: int) -> Trained:
    """Plain torch in fp64, `total` micro-batches a step."""
    model = m.experts() if row["ep"] != "none" else m.whole()
    model = model.double()
    freeze(model, row["trained"])
    stepper = optimizer_of(row, model)
    schedule = schedule_of(row, stepper)
    losses = []
    for step in range(STEPS):
        if row["trained"] == "thawed" and step >= THAWED_AT:
            thaw(model)
        stepper.zero_grad()
        losses.append(0.0)
        for micro in range(total):
            loss = model(**m.batch(step, *number(micro))) / total
            loss.backward()
            losses[-1] += loss.item()
        if row["clip"] == "clip":
            having = [p for p in model.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(having, 0.3)
        stepper.step()
        if schedule is not None:
            schedule.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def optimizer_of(row: Row, model: nn.Module) -> Any:
    """torch's own; or ours, which has its own tests, on a model that is not divided."""
    section = FEATURES["optimizer"][row["optimizer"]].config["optimizer"]
    groups = groups_of(model, row)
    if section["type"] in ("AdamW", "SGD", "Adagrad"):
        return getattr(torch.optim, section["type"])(groups, **section["params"])
    return made(section["type"], groups, model, **section["params"])


def schedule_of(row: Row, optimizer: Any) -> Any:
    if row["schedule"] == "none":
        return None
    from ds_lr_schedules import schedules

    section = FEATURES["schedule"][row["schedule"]].config["scheduler"]
    return getattr(schedules, section["type"])(optimizer, **section["params"])


def alone(row: Row, precision: str) -> dict[str, str]:
    """The row for the engine in one process: without what divides, sends or moves."""
    kept = {name: NAMES[name][0] if name in ALONE else value for name, value in row.items()}
    kept["precision"] = precision
    if row["offload"] != "zenflow":
        kept |= {"offload": "none", "stage": "z0"}
    if row["ep"] != "none":
        kept["ep"] = "experts"
    return kept


@functools.cache
def _engine_alone(ranks: Any, row: tuple[tuple[str, str], ...], total: int, folder: str) -> Trained:
    found = ranks(1, train_in_layout, dict(row), folder, total, list(range(STEPS)), False, False)
    return found[0]  # type: ignore[no-any-return]


@functools.cache
def begin(experts: bool) -> dict[str, Tensor]:
    model = m.experts() if experts else m.whole()
    return {name: p.detach().double() for name, p in model.named_parameters()}


# -- compared --------------------------------------------------------------------------------------


def way(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The length of the way from `a` to `b`, all weights together."""
    return sum(float((a[n].double() - b[n].double()).square().sum()) for n in b) ** 0.5


def worst(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> str:
    def off(name: str) -> float:
        scale = float(truth[name].abs().max()) or 1.0
        return float((found[name].double() - truth[name].double()).abs().max()) / scale

    return max(truth, key=off)


ROUNDING = 1e-9
"""Of fp64, as a part of the way that weights went."""
TIMES = 4.0
"""How much more than the engine in one process a layout may be off in less than fp64."""


def run(ranks: Any, row: Row, folder: Path) -> dict[str, Any]:
    """The verdict of a row: how far losses and weights are off, and how far they may be."""
    world, places = ranks_of(row)
    total = int(row["gas"]) * places
    losses, weights = in_layout(ranks, row, _folder(folder, "subject"))
    with_engine = any(FEATURES[name][value].with_engine for name, value in row.items())

    def engine(precision: str) -> Trained:
        kept = tuple(alone(row, precision).items())
        return _engine_alone(ranks, kept, total, _folder(folder, "alone"))

    truth = engine("fp64") if with_engine else plainly(row, total)
    start = begin(row["ep"] != "none")
    went = way(start, truth[1])
    allowed = max(ROUNDING, *(FEATURES[name][value].within for name, value in row.items()))
    if row["precision"] != "fp64":
        low = engine(row["precision"])
        unsteady = max(FEATURES[name][value].unsteady for name, value in row.items())
        allowed = max(allowed, unsteady, TIMES * way(low[1], truth[1]) / went)
    assert weights.keys() == truth[1].keys(), weights.keys() ^ truth[1].keys()
    off = way(weights, truth[1]) / went
    ours = torch.tensor(losses, dtype=torch.float64)
    theirs = torch.tensor(truth[0], dtype=torch.float64)
    loss = float(((ours - theirs).abs() / theirs.abs()).max())
    verdict = {"off": off, "allowed": allowed, "loss": loss, "world": world}
    if not off <= allowed:
        return {"kind": "wrong", "worst": worst(weights, truth[1]), **verdict}
    exact = allowed == ROUNDING
    if exact and not loss <= ROUNDING:
        return {"kind": "wrong", "worst": "loss", **verdict}
    documented = any(FEATURES[name][value].within for name, value in row.items())
    return {"kind": "documented" if documented else "exact", **verdict}


def _folder(folder: Path, name: str) -> str:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    return str(path)
