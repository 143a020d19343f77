"""What ranks check of views: each function returns what is wrong, nothing where all is right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ds_access import safe_get_full_fp32_param, safe_get_full_grad
from ds_dtensor import EngineOptimizer, PieceTensor, parameters
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from ds_core import comm
from plugins.dtensor.tests.nets import Net, batch, opened, plain_truth, stepped

FULL = StateDictOptions(full_state_dict=True)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def owned(engine: Any, name: str) -> Tensor | None:
    """The full parameter, put together by the package dscore-access; None where it has it not."""
    param = dict(engine.module.named_parameters())[name]
    return safe_get_full_fp32_param(param)


def trained(case: Any, steps: int = 2) -> Any:
    engine = opened(*case)
    stepped(engine, range(steps))
    return engine


def compare_with_torch(stage: int, dtype: str, tp: int) -> list[str]:
    """Views have the values of plain torch, in the engine's memory, and are of DTensor's kind."""
    engine = trained((stage, dtype, tp))
    truth = plain_truth(2)
    wrong = []
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == "fp32" else {"atol": 0.1, "rtol": 0.1}
    views = engine.state_dict(view="dtensor")
    if list(views) != list(truth):
        wrong.append(f"keys {list(views)}")
    for key, value in truth.items():
        found = whole(views[key])
        if not torch.allclose(found.float(), value.float(), **tolerance):
            wrong.append(f"{key}: {(found - value).abs().max()}")
    names = [n for n, _ in engine.module.named_parameters()]
    if comm.world_size() > 1 and (kinds := [n for n in names if not is_dtensor(views[n])]):
        wrong.append(f"no DTensors: {kinds}")
    if views["head.weight"] is not views["embed.weight"]:
        wrong.append("a shared weight is two")
    # Without tensor parallelism dscore-access has the full parameter, too.
    if tp == 1:
        for name in names:
            full = owned(engine, name)
            if full is not None and not torch.equal(full, whole(views[name])):
                wrong.append(f"{name} is not what dscore-access says")
    wrong += in_place(engine, views)
    engine.destroy()
    return wrong


def is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)


def in_place(engine: Any, views: dict[str, Any]) -> list[str]:
    """A second look sees the same memory; what is written by one is read by the other."""
    wrong = []
    for key, again in engine.state_dict(view="dtensor").items():
        view = views[key]
        here = [t._local_tensor if isinstance(t, DTensor) else t for t in (view, again)]
        if here[0].data_ptr() != here[1].data_ptr():
            wrong.append(f"{key} was copied")
        if here[0].is_floating_point() and here[0].numel():
            kept = here[0].clone()
            here[0].fill_(7.0)
            if not (here[1] == 7.0).all():
                wrong.append(f"{key} is no view")
            here[0].copy_(kept)
    return wrong


def norms(stage: int, dtype: str, tp: int) -> list[str]:
    """Norms go over all ranks, and what is clipped is what the step uses."""
    engine = trained((stage, dtype, tp))
    views = engine.state_dict(view="dtensor")
    params = {n: views[n] for n, _ in engine.module.named_parameters()}
    wrong = []
    for order in (1.0, 2.0, 3.0, torch.inf):
        found = float(whole(torch.nn.utils.get_total_norm(params.values(), order)))
        wanted = torch.linalg.vector_norm(
            torch.cat([whole(p).flatten().float() for p in params.values()]), order
        )
        near = 1e-2 if dtype == "bf16" else 1e-4  # the frozen weight's norm is rounded
        if abs(found - float(wanted)) > near * float(wanted):
            wrong.append(f"norm {order}: {found}, not {float(wanted)}")
    logits = engine(batch(2)).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch(3).flatten())
    engine.backward(loss)
    before = {
        n: g for n, p in engine.module.named_parameters() if (g := grad_of(p, tp)) is not None
    }
    total = float(whole(torch.nn.utils.clip_grad_norm_(parameters(engine), 0.01)))
    after = {n: g for n, p in engine.module.named_parameters() if (g := grad_of(p, tp)) is not None}
    if tp == 1:
        wanted = torch.cat([g.flatten().float() for g in before.values()]).norm()
        if not before or abs(total - float(wanted)) > 1e-2 * float(wanted):
            wrong.append(f"gradients: {total}, not {float(wanted)}")
        for name, grad in before.items():
            close = torch.allclose(after[name].float(), grad.float() * (0.01 / total), rtol=2e-2)
            if not close:
                wrong.append(f"the gradient of {name} was not clipped")
    engine.step()
    if abs(engine.get_global_grad_norm() - 0.01) > 1e-3:
        wrong.append(f"the step saw {engine.get_global_grad_norm()}")
    engine.destroy()
    return wrong


def grad_of(param: nn.Parameter, tp: int) -> Tensor | None:
    found: Tensor | None = safe_get_full_grad(param) if tp == 1 else None
    return found


def options(stage: int, dtype: str, tp: int) -> list[str]:
    """`StateDictOptions` do what they do of FSDP2's modules."""
    engine = trained((stage, dtype, tp))
    wanted = {k: whole(v).clone() for k, v in engine.state_dict(view="dtensor").items()}
    wrong = []
    full = get_model_state_dict(engine, options=FULL)
    wrong += differ("full", full, wanted)
    rank0 = get_model_state_dict(
        engine, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    wrong += differ("rank 0", rank0, wanted if comm.rank() == 0 else {})
    moved = get_model_state_dict(engine, options=StateDictOptions(cpu_offload=True))
    wrong += differ("offloaded", {k: whole(v) for k, v in moved.items()}, wanted)
    some = get_model_state_dict(engine, options=StateDictOptions(ignore_frozen_params=True))
    if set(wanted) - set(some) != {"frozen.weight"}:
        wrong.append(f"without frozen: {list(some)}")
    # Other values, from the first rank.
    new = {k: v + 1 if v.is_floating_point() else v for k, v in wanted.items()}
    given = {k: v.clone() for k, v in new.items()} if comm.rank() == 0 else {}
    set_model_state_dict(
        engine,
        given,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    wrong += loaded("broadcast", engine, new, dtype)
    set_model_state_dict(engine, copy.deepcopy(wanted), options=FULL)
    wrong += loaded("full", engine, wanted, dtype)
    set_model_state_dict(engine, get_model_state_dict(engine))
    wrong += loaded("own", engine, wanted, dtype)
    engine.destroy()
    return wrong


def differ(what: str, found: dict[str, Any], wanted: dict[str, Tensor]) -> list[str]:
    if list(found) != list(wanted):
        return [f"{what}: keys {list(found)}"]
    return [f"{what}: {k}" for k, v in wanted.items() if not torch.equal(found[k], v)]


def loaded(what: str, engine: Any, wanted: dict[str, Tensor], dtype: str) -> list[str]:
    """Masters have the values, the module's weights are rounded from them, and forward uses them."""
    views = engine.state_dict(view="dtensor")
    wrong = differ(f"{what} (masters)", {k: whole(v) for k, v in views.items()}, wanted)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = engine.state_dict(view="dtensor", masters=False)
    for name, _ in engine.module.named_parameters():
        if not torch.equal(whole(weights[name]), wanted[name].to(kind)):
            wrong.append(f"{what} (weights): {name}")
    plain = Net().to(kind)
    plain.load_state_dict(wanted)
    engine.eval()
    with torch.no_grad():
        found, truth = engine(batch(5)), plain(batch(5))
    engine.train()
    near = 0.05 if dtype == "bf16" else 1e-5
    if not torch.allclose(found.float(), truth.float(), rtol=near, atol=near):
        wrong.append(f"{what}: forward")
    return wrong


# -- torch.distributed.checkpoint ------------------------------------------------------------------


def app(engine: Any) -> dict[str, Any]:
    model, optim = get_state_dict(engine, EngineOptimizer(engine))
    return {"model": model, "optim": optim}


def save(case: Any, folder: str, steps: int) -> list[float]:
    """Train, save, train on: the losses after the save."""
    engine = trained(case, steps)
    dcp.save(app(engine), checkpoint_id=folder)
    losses = stepped(engine, range(steps, steps + 2))
    engine.destroy()
    return losses


def load(case: Any, folder: str, steps: int) -> list[float]:
    """Load into a new engine, and train on."""
    engine = opened(*case)
    state = app(engine)
    # FSDP2's files lack the states of a parameter that nobody has used, also for FSDP2 itself.
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(
        engine,
        EngineOptimizer(engine),
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    losses = stepped(engine, range(steps, steps + 2))
    engine.destroy()
    return losses


def restart(case: Any, folder: str) -> list[Any]:
    """The losses after a save, and those of a run that loads it, in the same layout."""
    return [save(case, folder, 3), load(case, folder, 3)]


def fsdp_saves(folder: str, steps: int) -> list[float]:
    """FSDP2 with AdamW trains and saves; its losses afterwards."""
    model, optimizer = fsdp()
    fsdp_train(model, optimizer, range(steps))
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optim"), states, strict=True)), checkpoint_id=folder)
    return fsdp_train(model, optimizer, range(steps, steps + 2))


def fsdp_loads(folder: str, steps: int) -> list[float]:
    model, optimizer = fsdp()
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    return fsdp_train(model, optimizer, range(steps, steps + 2))


def fsdp() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net(scalar=False)
    mesh = init_device_mesh("cpu", (comm.world_size(),))
    for layer in (model.up_proj, model.down_proj):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(params, lr=0.05)


def fsdp_train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        logits = model(batch(step))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch(step + 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def read_plainly(folder: str) -> dict[str, Any]:
    """The files of a checkpoint as plain torch reads them, in one process."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = Path(folder).with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def pieces(engine: Any) -> list[PieceTensor]:
    return [v for v in engine.state_dict().values() if isinstance(v, PieceTensor)]
