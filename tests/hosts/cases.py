"""Trains small models, one config after the other: ``cases.py RESULT FOLDER FIRST LAST [CASE...]``.

Steps FIRST to LAST of each case, from its checkpoint in FOLDER where there is one, which is written
again at the end. FOLDER as ``local:/...``: each host has its own. Rank 0 writes RESULT: {case: its
losses}. A batch belongs to its step, whatever the number of ranks; all is in fp64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from ds_moe import MoE
from ds_pipeline import LayerSpec, PipelineModule
from torch import Tensor, distributed, nn

import ds_core

BATCH = 24
WIDTH = 8
EXPERTS = 12


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            out = layer(x)
            x = x + (out[0] if isinstance(out, tuple) else torch.tanh(out))
        return nn.functional.mse_loss(self.last(x), y)


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


def dense() -> nn.Module:
    return Net(nn.Linear(13, 13), nn.Linear(13, 13)).double()


def experts() -> nn.Module:
    """Experts on all ranks: the groups that exchange tokens cross hosts."""
    options: dict[str, Any] = {
        "drop_tokens": False,
        "use_rts": False,
        "top2_2nd_expert_sampling": False,
        "k": 2,
    }
    return Net(
        MoE(13, nn.Linear(13, 13), EXPERTS, distributed.get_world_size(), **options)
    ).double()


def pipeline() -> nn.Module:
    """Two stages: the first half of the ranks, the second half."""
    layers = [
        LayerSpec(nn.Linear, WIDTH, 13),
        *(LayerSpec(Block, 13, 13) for _ in range(4)),
        LayerSpec(nn.Linear, 13, 3),
    ]
    loss = nn.functional.mse_loss
    return PipelineModule(
        layers, num_stages=2, loss_fn=loss, partition_method="uniform", seed_layers=True
    ).double()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    **{f"zero{stage}": (dense, {"zero_optimization": {"stage": stage}}) for stage in range(4)},
    "experts": (experts, {"zero_optimization": {"stage": 1}}),
    "pipeline": (pipeline, {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2}),
}


def batches(engine: Any, step: int) -> Iterator[Any]:
    """This rank's part of the batch of one step."""
    x = torch.randn(
        BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )
    y = torch.stack([x.sum(1), x.prod(1), x.amax(1)], 1)
    mesh = engine.ctx.mesh
    rows = [tensor.chunk(mesh.size("dp"))[mesh.index("dp")] for tensor in (x, y)]
    parts = engine.gradient_accumulation_steps()
    pairs = zip(*(row.chunk(parts) for row in rows), strict=True)
    return iter([(x, y) for x, y in pairs])


def losses_of_case(case: str, folder: Path, first: int, last: int, local: bool) -> list[float]:
    build, more = CASES[case]
    torch.manual_seed(7)
    params = {"lr": 0.01, "weight_decay": 0.1}
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": params},
    }
    config["checkpoint"] = {"use_node_local_storage": local}
    engine, *_ = ds_core.initialize(model=build(), config=config | more)
    if first:
        engine.load_checkpoint(folder / case)
    assert engine.global_steps == first
    losses = [engine.train_batch(batches(engine, step)).item() for step in range(first, last)]
    engine.save_checkpoint(folder / case)
    engine.destroy()
    return losses


def main(result: str, folder: str, first: str, last: str, *cases: str) -> None:
    ds_core.init_distributed()
    path = Path(folder.removeprefix("local:"))
    local = folder.startswith("local:")
    losses = {
        case: losses_of_case(case, path, int(first), int(last), local) for case in cases or CASES
    }
    if distributed.get_rank() == 0:
        Path(result).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
