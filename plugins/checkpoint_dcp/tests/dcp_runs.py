"""A small model, trained by ds_core, by FSDP2 and by torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ds_core

LR = 0.01


class Net(nn.Module):
    """Tied weights, a buffer, odd sizes and a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 7, bias=False)
        self.mid = nn.Linear(7, 7)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((2,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.mid(self.embed(x)))
        return (hidden @ self.head.weight * self.gain.sum() * self.scale.sum()).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def make(seed: int = 0, **config: Any) -> Any:
    """An engine whose weights are of that seed."""
    torch.manual_seed(seed)
    full = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
        "gradient_clipping": 0,
    }
    engine, *_ = ds_core.initialize(model=Net(), config=full | config)
    return engine


def steps_of(engine: Any, first: int, last: int) -> list[float]:
    """Steps [first, last); their losses."""
    losses = []
    for step in range(first, last):
        data = batch(step).to(next(engine.module.parameters()).dtype)
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def evaluate(engine: Any) -> float:
    with torch.no_grad():
        data = batch(99).to(next(engine.module.parameters()).dtype)
        return float(engine.module(data))


def weights(engine: Any) -> dict[str, Tensor]:
    return {n: p.detach().float().clone() for n, p in engine.module.named_parameters()}


# -- torch alone, and FSDP2 ------------------------------------------------------------------------


def torch_run(model: nn.Module) -> tuple[Any, Any]:
    """An optimizer and a schedule as those of `make`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def torch_steps(model: nn.Module, run: tuple[Any, Any], first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = model(batch(step))
        loss.backward()
        losses.append(loss.item())
        run[0].step()
        run[0].zero_grad()
        run[1].step()
    return losses


def sharded() -> nn.Module:
    """The model under FSDP2, on all ranks of the default group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def save_fsdp(folder: str, flat: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, saved by `dcp.save` of `get_state_dict`; the losses of two more, and the
    weights after them.
    """
    model = sharded()
    run = torch_run(model)
    torch_steps(model, run, 0, 3)
    state = _state(model, run, flat)
    dcp.save(state, checkpoint_id=folder)
    losses = torch_steps(model, run, 3, 5)
    full = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    return losses, full


def _state(model: nn.Module, run: tuple[Any, Any], flat: bool) -> dict[str, Any]:
    """The layout of get_state_dict, or, flat, that of torchtitan.

    torchtitan: torchtitan/components/checkpointer/base.py puts the model's state dict at the top;
    torchtitan/components/optimizer.py flattens the optimizers'; torchtitan/train.py keeps the step.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, run[0], options=options)
    if not flat:
        return {"model": of_model, "optim": of_optimizer, "lr_scheduler": run[1].state_dict()}
    return {
        **of_model,
        "optimizer": of_optimizer,
        "lr_scheduler": run[1].state_dict(),
        "dataloader": {"dp_rank_0": b"\x80\x04N."},
        "train_state": {"step": 3, "ntokens_seen": 48},
    }


def load_fsdp(folder: str, sharding: bool = True) -> tuple[list[float], dict[str, Tensor]]:
    """What `save_fsdp` gives, of a checkpoint that is loaded by plain `dcp.load`."""
    model = sharded() if sharding else net()
    run = torch_run(model)
    of_model, of_optimizer = get_state_dict(model, run[0])
    state = {"model": of_model, "optim": of_optimizer, "lr_scheduler": run[1].state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, run[0], model_state_dict=state["model"], optim_state_dict=state["optim"])
    run[1].load_state_dict(state["lr_scheduler"])
    losses = torch_steps(model, run, 3, 5)
    full = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in model.named_parameters()
    }
    return losses, full


def save_engine(folder: str | Path, **config: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of an engine, saved; the losses of two more, and the weights after them."""
    engine = make(**config)
    steps_of(engine, 0, 3)
    engine.save_checkpoint(str(folder), client_state={"epoch": 2, "seen": torch.arange(3)})
    losses = steps_of(engine, 3, 5)
    found = weights(engine)
    engine.destroy()
    return losses, found


def resume(folder: str | Path, **config: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The same of an engine with other weights that has loaded the checkpoint."""
    engine = make(seed=7, **config)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None and engine.global_steps == 3
    losses = steps_of(engine, 3, 5)
    found = weights(engine)
    engine.destroy()
    return losses, found
