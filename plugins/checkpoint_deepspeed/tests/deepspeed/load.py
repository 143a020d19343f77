"""Real DeepSpeed reads what `export_deepspeed` and `export_universal` wrote: ``load.py ROOT`` on
each of two ranks.

ROOT has a folder ``<mode>-<stage>`` for each export, and ``<mode>-universal``. Every one is loaded
by the engine of generate.py (``moe-*``: of parallel/recipe.py) and goes on for two steps; their
losses, and what zero_to_fp32 finds, go into ROOT/loaded.json.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from generate import Net, batch, config, groups
from parallel import recipe


def losses_of(folder, stage, mode, universal):
    torch.manual_seed(1)
    net = Net()
    made = config(stage, mode) | ({"checkpoint": {"load_universal": True}} if universal else {})
    if universal:
        # the engine restores neither frozen weights nor buffers of a universal checkpoint
        with torch.no_grad():
            net.frozen.weight.copy_(torch.load(folder / "frozen.pt"))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups(net), config=made)
    path, client = engine.load_checkpoint(str(folder), tag="three")
    assert path is not None and client["note"] == "hello" and engine.global_steps == 3
    found = []
    for step in (3, 4):
        loss = engine(batch(step, torch.distributed.get_rank()))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        found.append(total.item() / torch.distributed.get_world_size())
    engine.destroy()
    return found


def moe_losses_of(folder, stage):
    engine = recipe.engine_of(deepspeed.initialize, "moe", stage, 1)
    path, _ = engine.load_checkpoint(str(folder), tag="three")
    assert path is not None and engine.global_steps == 3
    found = [recipe.step_of(engine, "moe", step, torch.distributed.get_rank()) for step in (3, 4)]
    engine.destroy()
    return found


def main(root):
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for folder in sorted(root.iterdir()):
        if not folder.is_dir():
            continue
        mode, _, stage = folder.name.partition("-")
        if mode == "moe":
            found[f"{folder.name}/losses"] = moe_losses_of(folder, int(stage))
            continue
        universal = stage == "universal"
        for level in (1, 2, 3) if universal else (int(stage),):
            found[f"{folder.name}/{level}"] = losses_of(folder, level, mode, universal)
        if not universal and stage != "0":
            state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
            found[f"{folder.name}/fp32"] = {n: t.double().sum().item() for n, t in state.items()}
    if torch.distributed.get_rank() == 0:
        (root / "loaded.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
