"""Lives of a run that saves to a store after every step, and is killed at any moment.

What a step leaves is a pattern of its number, so a checkpoint tells which step it is of, and any bit
that is wrong shows.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ds_core
from ds_core import comm

WIDTH = 40


def make(**config: Any) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    full: dict[str, Any] = {
        "train_batch_size": comm.world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
    }
    engine, *_ = ds_core.initialize(model=model, config=full | config)
    return engine


def pattern(step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.numel(), dtype=torch.float32).add_(step * 1000).view(like.shape)


def states(engine: Any) -> list[torch.Tensor]:
    """Weights and moments."""
    found = []
    for param in engine.module.parameters():
        held = engine.optimizer.state.get(param, {})
        found += [param.data, *(held[key] for key in ("exp_avg", "exp_avg_sq") if key in held)]
    return found


def advance(engine: Any) -> int:
    """One step, after which all states are those of its number."""
    engine.backward(engine(torch.zeros(1, WIDTH)).sum() * 0)
    engine.step()
    step = int(engine.global_steps)
    with torch.no_grad():
        for tensor in states(engine):
            tensor.copy_(pattern(step, tensor))
    return step


def wrong(engine: Any) -> list[str]:
    """What is not as its step left it."""
    step = int(engine.global_steps)
    held = states(engine)
    expected = 3 * len(list(engine.module.parameters()))
    if len(held) != expected:
        return [f"{len(held)} of {expected} states"]
    return [str(i) for i, t in enumerate(held) if not torch.equal(t, pattern(step, t))]


def life(url: str, say: int, **config: Any) -> None:
    """Resume, say at which step and what is wrong, and save after each further step, saying which are
    whole.
    """
    engine = make(**config)
    path, _ = engine.load_checkpoint(url, missing_ok=True)
    first = comm.rank() == 0
    later = bool(config.get("checkpoint", {}).get("async"))
    if first:
        bad = wrong(engine) if path is not None else []
        os.write(say, f"resumed {engine.global_steps} {' '.join(bad)}\n".encode())
    while True:
        step = advance(engine)
        # Half of the steps replace the tag of the one before the last.
        engine.save_checkpoint(url, tag=f"step{step % 3}" if step % 2 else f"new{step}")
        if first:
            # In the background, it is the save before this one that is known to be whole.
            os.write(say, f"saved {step - later}\n".encode())


def begin_life(url: str, world: int, port: int, **config: Any) -> tuple[list[int], int]:
    """(the processes of one life, what they say), forked from this one."""
    listen, say = os.pipe()
    ranks = []
    for rank in range(world):
        child = os.fork()
        if not child:
            os.close(listen)
            try:
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(world),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    DS_ACCELERATOR="cpu",
                )
                torch.set_num_threads(1)
                if world > 1:
                    dist.init_process_group("gloo")
                life(url, say, **config)
            except BaseException as error:
                os.write(say, f"error {type(error).__name__} {error}\n".encode())
            finally:
                os._exit(1)
        ranks.append(child)
    os.close(say)
    return ranks, listen


def end(ranks: list[int]) -> None:
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    for rank in ranks:
        os.waitpid(rank, 0)


def hear(listen: int, until: float, wanted: str = "\0") -> list[str]:
    """The lines that come until then, or until one begins with `wanted`."""
    import select

    text = b""
    while (left := until - time.monotonic()) > 0:
        if select.select([listen], [], [], left)[0]:
            part = os.read(listen, 1 << 16)
            if not part:
                break
            text += part
            if any(line.startswith(wanted) for line in text.decode().splitlines()):
                break
    return text.decode().splitlines()
