"""Runs of a small model, with and without replays and planted faults, for the tests of dscore-numerics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ds_testing.truth import start, tiny, train, whole_weights
from torch import Tensor, nn

from ds_core import comm
from ds_core.comm import Interceptor
from ds_core.comm.interceptor import Collective
from ds_core.errors import PluginError

ADAM: Mapping[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2}}


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks between tied embeddings, with a layer that is used twice, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(30, 8)
        self.shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.statistics = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor, shift: float | Tensor = 0.0) -> Any:
        h = self.shared(self.tok(x[:, :-1])) + shift
        for block in self.blocks:
            h = block(h)
        h = self.statistics(h.transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.shared(h))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def batches(step: int, index: int) -> Tensor:
    """A micro-batch of 2 x 7 tokens."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, 30, (2, 7), generator=generator)


def loss_of(model: Any, x: Tensor) -> Tensor:
    """The model's own loss, and something of its logits."""
    out = model(x)
    loss: Tensor = out["loss"] + out["logits"].float().square().mean() * 1e-3
    return loss


@dataclass
class Result:
    """What a run has come to."""

    losses: list[float]
    weights: dict[str, Tensor]
    statistics: Tensor
    random: Tensor
    norm: float | None
    said: list[str]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lines_of_numerics() -> _Lines:
    """What dscore-numerics logs from now on."""
    handler = _Lines()
    logger = logging.getLogger("ds_numerics")
    for other in [h for h in logger.handlers if isinstance(h, _Lines)]:
        logger.removeHandler(other)
    logger.addHandler(handler)
    return handler


def run(
    sections: Mapping[str, Any],
    make: Callable[[], nn.Module] = Net,
    steps: int = 3,
    loss: Any = loss_of,
    direct: bool = False,
    loop: Callable[[Any, int], list[float]] | None = None,
) -> Result:
    """Train some steps.

    loop: in the place of `train`.
    """
    torch.manual_seed(0)
    said = lines_of_numerics()
    model = make()
    engine = start(model, **{"optimizer": ADAM, "clip": 0.1, **sections})
    torch.manual_seed(7 + engine.ctx.mesh.index("batch"))
    if loop is not None:
        losses = loop(engine, steps)
    else:
        losses = train(engine, batches, steps, loss=loss, direct=direct)
    buffers = [b.detach().clone().double().flatten() for b in engine.module.buffers()]
    result = Result(
        losses,
        whole_weights(engine),
        torch.cat(buffers) if buffers else torch.zeros(0),
        torch.rand(3),
        engine.get_global_grad_norm(),
        said.lines,
    )
    engine.destroy()
    return result


def compared(
    sections: Mapping[str, Any], numerics: Mapping[str, Any], how: Mapping[str, Any]
) -> list[str]:
    """Assert that a run is the same, bit for bit, with and without replays; what was logged.

    how: arguments of `run`.
    """
    wanted = run(sections, **how)
    replays = count_replays()
    found = run({**sections, "numerics": numerics}, **how)
    assert found.losses == wanted.losses
    for name, value in wanted.weights.items():
        assert torch.equal(found.weights[name], value), name
    assert torch.equal(found.statistics, wanted.statistics)
    assert torch.equal(found.random, wanted.random)
    assert repr(found.norm) == repr(wanted.norm)
    return [*found.said, f"{replays[0]} replays"]


def count_replays() -> list[int]:
    """How many passes were made by replays from now on; one count, which grows."""
    from ds_numerics import replay

    counted = [0]
    original = getattr(replay.Passes, "original_run", replay.Passes.run)

    def counting(self: Any) -> None:
        counted[0] += 1
        original(self)

    replay.Passes.original_run = original  # type: ignore[attr-defined]
    replay.Passes.run = counting  # type: ignore[method-assign]
    return counted


# -- loops and models of other kinds ---------------------------------------------------------------


class Counting(Net):
    """Computes something else with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: Tensor, shift: float | Tensor = 0.0) -> Any:
        out = super().forward(x, shift)
        return {"loss": self.counter(out["loss"]), "logits": out["logits"]}


class Counter(nn.Module):
    """See `Counting`."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, loss: Tensor) -> Tensor:
        self.calls += 1
        return loss * self.weight * (1 + self.calls % 7)


def _two_forwards(model: Any, x: Tensor) -> Tensor:
    return (loss_of(model, x) - loss_of(model, x.flip(0))).square()


def _changed_input(model: Any, x: Tensor) -> Tensor:
    shift = torch.ones(8)
    loss: Tensor = model(x, shift)["loss"]
    shift.zero_()
    return loss


def _part(model: Any, x: Tensor) -> Tensor:
    return model.module.head(model.module.shared(model.module.tok(x))).square().mean()  # type: ignore[no-any-return]


def compared_loop(way: str) -> list[str]:
    """`compared`, of a training loop of another kind."""
    how: dict[str, Any] = {"steps": 3}
    sections: dict[str, Any] = {"gas": 2}
    if way == "direct":
        how["direct"] = True
    elif way == "two forwards":
        how["loss"] = _two_forwards
    elif way == "input":
        how["loss"] = _changed_input
    elif way == "part":
        how["loss"] = _part
    elif way in ("whole batches", "no_sync", "dropped"):
        how["loop"] = {"whole batches": _whole, "no_sync": _no_sync, "dropped": _dropping}[way]
    return compared(sections, {"every": 2}, how)


def _whole(engine: Any, steps: int) -> list[float]:
    index = engine.ctx.mesh.index("dp")
    return [
        engine.train_batch(iter([batches(step, 2 * index + micro) for micro in (0, 1)])).item()
        for step in range(steps)
    ]


def _no_sync(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        with engine.no_sync():
            loss = loss_of(engine, batches(step, 0))
            engine.backward(loss)
        engine.step()
        engine.backward(loss_of(engine, batches(step, 1)))
        engine.step()
        losses.append(loss.item())
    return losses


def _dropping(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        engine.backward(loss_of(engine, batches(step, 7)))
        engine.zero_grad()
        for micro in range(2):
            loss = loss_of(engine, batches(step, micro))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses


def counted() -> list[str]:
    """What is logged of a program that never computes the same."""
    replays = count_replays()
    found = run({"gas": 2, "numerics": {"every": 2}}, Counting, 5)
    return [*found.said, f"{replays[0]} replays"]


def compared_transformer(kind: str, sections: Mapping[str, Any]) -> list[str]:
    """`compared`, of a small model of transformers."""
    dropout = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1} if kind == "gpt2" else {}

    def loss(model: Any, x: Tensor) -> Tensor:
        found: Tensor = model(input_ids=x, labels=x).loss
        return found

    return compared(sections, {"every": 2}, {"make": lambda: tiny(kind, **dropout), "loss": loss})


def pipeline(sections: Mapping[str, Any]) -> None:
    """Begin a run of a pipeline of one stage."""
    from ds_pipeline import PipelineModule

    start(PipelineModule([nn.Linear(4, 4)], num_stages=1), **{"optimizer": ADAM, **sections})


def drifted(rank: int) -> str:
    """Why a run ends in which a weight of `rank` flips between two steps."""
    torch.manual_seed(0)
    engine = start(Net(), optimizer=ADAM, numerics={"every": 1})
    index = engine.ctx.mesh.index("dp")
    train(engine, lambda step, _: batches(step, index), 1, loss=loss_of)
    if engine.global_rank == rank:
        flip(engine.module.shared.weight.data)
    try:
        train(engine, lambda step, _: batches(step, index), 1, loss=loss_of)
    except PluginError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def poisoned() -> dict[str, Any]:
    """A step whose loss is NaN; it is due, and skipped."""
    said = lines_of_numerics()
    replays = count_replays()
    torch.manual_seed(0)
    engine = start(Net(), optimizer=ADAM, numerics={"every": 2})
    for step in range(4):
        loss = loss_of(engine, batches(step, 0))
        # The third step is due; the fourth is replayed in its place.
        engine.backward(loss * torch.nan if step == 2 else loss)
        engine.step()
    finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    skipped = engine.skipped_steps
    engine.destroy()
    return {"skipped": skipped, "replays": replays[0], "said": said.lines, "finite": finite}


def left_behind() -> list[str]:
    """What a destroyed engine has left on its model, and in the process."""
    model = Net()
    engine = start(model, optimizer=ADAM, numerics={"every": 1})
    index = engine.ctx.mesh.index("dp")
    train(engine, lambda step, _: batches(step, index), 2, loss=loss_of)
    loss_of(engine, batches(9, index))
    engine.destroy()
    left = [type(i).__name__ for i in comm.interceptors()]
    for name, module in model.named_modules():
        left += [f"{name}: {h}" for h in (*module._forward_hooks, *module._forward_pre_hooks)]
    for name, param in model.named_parameters():
        left += [f"{name}: {h}" for h in param._backward_hooks or ()]
    return left


# -- planted faults --------------------------------------------------------------------------------


def flip(tensor: Tensor, place: int = 3, bit: int = 20) -> None:
    """Flip one bit of one element of a fp32 tensor, in place."""
    with torch.no_grad():
        flat = tensor.view(-1)
        word = flat[place : place + 1].clone().view(torch.int32)
        flat[place] = (word ^ (1 << bit)).view(torch.float32)[0]


class Once:
    """Says at which of its calls a fault strikes: once, when it is armed and has passed `skip`."""

    def __init__(self) -> None:
        self.left = -1

    def arm(self, skip: int) -> None:
        """It will strike after `skip` more calls."""
        self.left = skip + 1

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


class Wire(Interceptor):
    """Flips a bit of what arrives by one collective of gradients."""

    def __init__(self, once: Once) -> None:
        self.once = once

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        work = call()
        if collective.label.startswith("gradients of") and self.once():
            if work is not None:
                work.wait()
            flip(collective.arguments.get("output", collective.arguments.get("tensor")))
        return work


def _changed(once: Once, value: Tensor) -> Tensor | None:
    if not once():
        return None
    changed = value.clone()
    flip(changed)
    return changed


def plant(engine: Any, fault: str, once: Once) -> Callable[[], None]:
    """Plant a fault on this rank; what is to be called after the last backward of each step."""
    up = engine.module.get_submodule("blocks.1.up")
    after: Callable[[], None] = lambda: None  # noqa: E731
    if fault == "activation":
        up.register_forward_hook(lambda module, args, output: _changed(once, output))
    elif fault == "gradient":
        up.weight.register_hook(partial(_changed, once))
    elif fault == "wire":
        comm.add_interceptor(Wire(once))
    elif fault == "failure":

        def fail(module: Any, args: Any) -> None:
            if once():
                raise ValueError("planted")

        up.register_forward_pre_hook(fail)
    elif fault == "reduced":

        def after() -> None:
            if once():
                flip(_reduced(engine)[0])
    else:

        def after() -> None:
            if once():
                flip(_shard(engine) if fault == "shard" else up.weight.data)

    return after


def _shard(engine: Any) -> Tensor:
    """This rank's part of the first layer's weight."""
    from ds_run_state import RunState

    states = RunState(engine).states(None)
    return next(s.tensor for s in states if s.name == "module/shared.weight" and s.tensor.numel())


def _reduced(engine: Any) -> list[Tensor]:
    """This rank's reduced gradients."""
    reducer = getattr(engine.partitioner, "reducer", None)
    if reducer is None:
        return [p.grad for p in engine.ctx.trained if p.grad is not None]
    return [shard for bucket in reducer.buckets for shard in reducer.reduced(bucket)]


@dataclass
class Outcome:
    """How a run with a fault has ended."""

    error: str
    step: int
    """The last step that was begun."""
    kept: bool
    """Whether all weights are what they were before the last step."""
    weights: dict[str, Tensor]
    said: list[str]


def faulty(
    sections: Mapping[str, Any], fault: str, rank: int = 1, skip: int = 0, steps: int = 3
) -> dict[str, Any]:
    """Train with a fault on one rank in the second step: the fields of an `Outcome`.

    skip: calls of what is faulty that go well in that step.
    """
    torch.manual_seed(0)
    said = lines_of_numerics()
    sections = {"numerics": {"every": 1}, **sections}
    engine = start(Net(), **{"optimizer": ADAM, "clip": 0.1, **sections})
    torch.manual_seed(7 + engine.ctx.mesh.index("batch"))
    once = Once()
    mine = engine.global_rank == rank
    after = plant(engine, fault, once) if mine else lambda: None
    index = engine.ctx.mesh.index("dp")
    gas = engine.gradient_accumulation_steps()
    dp = engine.ctx.mesh.size("dp")
    error = ""
    before: dict[str, Tensor] = {}
    step = 0
    try:
        for step in range(steps):
            before = whole_weights(engine)
            if step == 1:
                once.arm(skip)
            for micro in range(gas):
                engine.backward(loss_of(engine, batches(step, micro * dp + index)))
                if micro == gas - 1:
                    after()
                engine.step()
    except PluginError as failure:
        # The other ranks are in the middle of their replay.
        if fault == "failure" and dp > 1:
            raise
        error = str(failure)
    now = whole_weights(engine)
    # The planted one is a flipped weight itself.
    ours = {n: v for n, v in before.items() if fault != "weight" or "up" not in n}
    kept = all(torch.equal(now[name], value) for name, value in ours.items())
    for interceptor in comm.interceptors():
        if isinstance(interceptor, Wire):
            comm.remove_interceptor(interceptor)
    engine.destroy()
    return vars(Outcome(error, step, kept, now, said.lines))
