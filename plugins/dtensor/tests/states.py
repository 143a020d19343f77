"""What ranks check of optimizer states, and of what does not fit; as in `views`."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ds_dtensor import EngineOptimizer, PieceTensor
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.utils._pytree import tree_map

from ds_core import comm
from ds_core.errors import UsageError
from plugins.dtensor.tests.nets import batch, opened, stepped
from plugins.dtensor.tests.views import FULL, app, load, trained, whole

BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def flat(states: Any) -> dict[str, Any]:
    """Values by path, tensors whole and copied."""
    found: dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{path}/{key}" if path else key, item)
        elif isinstance(value, Tensor):
            found[path] = whole(value).clone()
        else:
            found[path] = value

    walk("", states)
    return found


def unequal(what: str, found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    if found.keys() != wanted.keys():
        return [f"{what}: {sorted(found.keys() ^ wanted.keys())}"]
    wrong = []
    for key, value in wanted.items():
        equal = torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value
        if not equal:
            wrong.append(f"{what}: {key}")
    return wrong


def optimizer_options(stage: int, dtype: str, tp: int) -> list[str]:
    """Optimizer states through all options of torch's functions, and back."""
    engine = trained((stage, dtype, tp))
    now = EngineOptimizer(engine)
    wanted = flat(get_optimizer_state_dict(engine, now)["state"])
    wrong = []
    if not any(v.abs().sum() for k, v in wanted.items() if k.endswith("exp_avg")):
        wrong.append("no momentum")
    full = get_optimizer_state_dict(engine, now, options=FULL)
    wrong += unequal("full", flat(full["state"]), wanted)
    sharded = get_optimizer_state_dict(engine, now)
    ways: list[tuple[str, Any, StateDictOptions]] = [
        ("full", full, FULL),
        ("broadcast", full if comm.rank() == 0 else {}, BROADCAST),
        ("sharded", copy.deepcopy(sharded), StateDictOptions()),
        (
            "flattened",
            get_optimizer_state_dict(
                engine, now, options=StateDictOptions(flatten_optimizer_state_dict=True)
            ),
            StateDictOptions(flatten_optimizer_state_dict=True),
        ),
    ]
    for what, given, options in ways:
        given = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given)
        if what != "flattened":  # those are views of what the next line would change
            stepped(engine, range(2, 3))
        set_optimizer_state_dict(engine, EngineOptimizer(engine), given, options=options)
        found = flat(get_optimizer_state_dict(engine, EngineOptimizer(engine))["state"])
        wrong += unequal(f"set {what}", found, wanted)
    engine.param_groups()[0]["lr"] = 0.5
    set_optimizer_state_dict(engine, EngineOptimizer(engine), copy.deepcopy(sharded))
    if engine.param_groups()[0]["lr"] != 0.05:
        wrong.append("the learning rate was not loaded")
    engine.destroy()
    return wrong


def in_background(stage: int, dtype: str, folder: str) -> list[str]:
    """`async_save` writes the values of its call, while training goes on."""
    engine = trained((stage, dtype))
    saved = dcp.async_save(app(engine), checkpoint_id=folder)
    losses = stepped(engine, range(2, 4))
    saved.result()
    engine.destroy()
    again = load((stage, dtype), folder, 2)
    return [] if again == losses else [f"{again}, not {losses}"]


def by_keys(more: dict[str, Any], folder: str, warm: int = 0) -> list[str]:
    """A run with `more` in its config: saved and loaded, it goes on as if nothing had been.

    warm: steps before the load, for optimizers whose states cannot be foreseen.
    """
    engine = opened(**more)
    stepped(engine, range(2))
    dcp.save(app(engine), checkpoint_id=folder)
    losses = stepped(engine, range(2, 4))
    engine.destroy()
    engine = opened(**more)
    stepped(engine, range(warm))
    state = app(engine)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        engine,
        EngineOptimizer(engine),
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(strict=False),  # a parameter that nobody uses may have no states
    )
    again = stepped(engine, range(2, 4))
    engine.destroy()
    return [] if again == losses else [f"{again}, not {losses}"]


def refusal(more: dict[str, Any]) -> str:
    """What is said where a view cannot be, the same on all ranks."""
    engine = opened(**more)
    stepped(engine, range(1))
    with pytest.raises(UsageError) as caught:
        get_state_dict(engine, EngineOptimizer(engine))
    engine.destroy()
    return str(caught.value)


def refused(call: Callable[[], Any]) -> str:
    """The message of the error that `call` must raise."""
    try:
        call()
    except (RuntimeError, UsageError) as error:
        return str(error)
    raise AssertionError("nothing was refused")


def does_not_fit(stage: int) -> dict[str, str]:
    """Messages of what does not fit, after which nothing has changed on any rank."""
    engine = trained((stage, "bf16"))
    before = flat(engine.state_dict(view="dtensor"))
    full = {k: v.clone() for k, v in before.items()}
    alone = comm.rank() == 1 or comm.world_size() == 1
    wrong_shape = full | ({"up_proj.weight": torch.zeros(3, 3)} if alone else {})
    view = engine.state_dict(view="dtensor")["up_proj.weight"]
    wrong_kind = full | ({"up_proj.weight": view} if alone else {})
    missing = {k: v for k, v in full.items() if k != "up_proj.bias"}
    said = {
        "shape": refused(lambda: engine.load_state_dict(wrong_shape)),
        "missing": refused(lambda: engine.load_state_dict(missing)),
        "unexpected": refused(lambda: engine.load_state_dict(full | {"other": torch.ones(1)})),
        "view": refused(lambda: engine.state_dict(view="numpy")),
    }
    if isinstance(view, PieceTensor):
        said["kind"] = refused(lambda: engine.load_state_dict(wrong_kind))
        said["matmul"] = refused(lambda: view @ view)
        said["mixed"] = refused(lambda: view + torch.ones(view.shape))
    again = flat(engine.state_dict(view="dtensor"))
    said["changed"] = ", ".join(unequal("changed", again, before))
    loose = engine.load_state_dict(missing | {"other": torch.ones(1)}, strict=False)
    said["loose"] = f"{loose.missing_keys} {loose.unexpected_keys}"
    engine.destroy()
    return said


def pickled(stage: int) -> list[str]:
    """``torch.save`` of a state dict does not fail; one warning says what was kept."""
    engine = trained((stage, "fp32"))
    heard: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger = logging.getLogger("ds_dtensor")
    logger.addHandler(handler := Hear())
    wrong = []
    try:
        views = engine.state_dict()
        for _ in range(2):
            file = io.BytesIO()
            torch.save(views, file)
        file.seek(0)
        found = torch.load(file, weights_only=False)
        before = flat(views)
        stepped(engine, range(2, 3))
        engine.load_state_dict(found)
        wrong += unequal("pickled", flat(engine.state_dict()), before)
    finally:
        logger.removeHandler(handler)
    sharded = any(isinstance(v, PieceTensor) for v in views.values())
    if len(heard) != sharded:
        wrong.append(f"warnings: {heard}")
    engine.destroy()
    return wrong


def modules_own(stage: int) -> list[str]:
    """The module's own methods beside the engine's: nothing stops a script."""
    engine = trained((stage, "fp32"))
    before = flat(engine.state_dict())
    own = engine.module.state_dict()
    torch.save(own, io.BytesIO())
    stepped(engine, range(2, 3))
    engine.module.load_state_dict({k: v.clone() for k, v in before.items()})
    wrong = unequal("module", flat(engine.state_dict()), before)
    stepped(engine, range(2, 3))
    engine.load_state_dict({k: v.clone() for k, v in before.items()})
    wrong += unequal("engine", flat(engine.state_dict()), before)
    kept = copy.deepcopy(engine.state_dict(view="dtensor"))
    stepped(engine, range(2, 3))
    engine.module.load_state_dict(kept)
    wrong += unequal("module, of DTensors", flat(engine.state_dict()), before)
    logits = engine(batch(0))
    if not logits.isfinite().all():
        wrong.append("forward")
    engine.destroy()
    return wrong


def arithmetic(stage: int) -> list[str]:
    """What is computed element by element is computed where the elements are."""
    engine = trained((stage, "fp32"))
    wrong = []
    for name, view in engine.state_dict().items():
        if not isinstance(view, PieceTensor):
            continue
        full = view.full_tensor()
        for what, found, wanted in (
            ("mul", view * 2, full * 2),
            ("sub", view - view / 3, full - full / 3),
            ("abs", view.abs(), full.abs()),
            ("to", view.to(torch.float64), full.double()),
            ("clone", view.clone(), full),
            ("zeros", torch.zeros_like(view), torch.zeros_like(full)),
            ("foreach", torch._foreach_mul([view], 3.0)[0], full * 3),
        ):
            if not isinstance(found, PieceTensor) or not torch.equal(found.full_tensor(), wanted):
                wrong.append(f"{name} {what}")
        copied = torch.zeros_like(view).copy_(full)
        if not torch.equal(copied.full_tensor(), full):
            wrong.append(f"{name} copy_")
        if not torch.equal(view.redistribute(placements=shard()).full_tensor(), full):
            wrong.append(f"{name} redistribute")
    engine.destroy()
    return wrong


def shard() -> list[Any]:
    from torch.distributed.tensor import Replicate

    return [Replicate()]


def refused_layout(kind: str) -> str:
    """What is said of a pipeline, and of experts that ranks divide."""
    import ds_core
    from plugins.dtensor.tests.nets import config

    engine = ds_core.initialize(model=divided(kind), config=config(1)).engine
    said = refused(lambda: engine.state_dict(view="dtensor"))
    if said != refused(lambda: engine.load_state_dict({})):
        said = "loading says something else"
    engine.destroy()
    return said


def divided(kind: str) -> torch.nn.Module:
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    if kind == "pipeline":
        from ds_pipeline import PipelineModule

        return PipelineModule(layers, loss_fn=torch.nn.functional.mse_loss, num_stages=2)
    from ds_moe import MoE

    return torch.nn.Sequential(MoE(4, layers[0], 2, ep_size=2))
