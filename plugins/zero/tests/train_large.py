"""Train a GPT under stage 3 with all states on disk, maybe under a limit of memory; prints losses
and peak as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
from pathlib import Path
from typing import Any

GPT = Path(__file__).parents[3] / "examples/gpt/model.py"
WIDTH = 1024
LIMIT = 3 << 29
LINEAR = 4 * WIDTH * WIDTH


def config(folder: str) -> dict[str, Any]:
    """Units of one matrix; two are read ahead."""
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": LINEAR + 4 * WIDTH,
            "prefetch_bucket_size": 2 * LINEAR,
            "max_live_parameters": 4 * LINEAR,
            "max_reuse_distance": 0,
            "offload_optimizer": {**disk, "pipeline_read": True, "pipeline_write": True},
            "offload_param": {**disk, "max_in_cpu": 0, "buffer_count": 2, "buffer_size": LINEAR},
        },
    }


def gpt_of(width: int, layers: int) -> Any:
    spec = importlib.util.spec_from_file_location("gpt", GPT)
    assert spec is not None and spec.loader is not None
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    return gpt.GPT(context=64, width=width, layers=layers, heads=8)


def two_steps(width: int, layers: int, folder: str, limited: bool) -> dict[str, Any]:
    import ds_zero
    import torch

    import ds_core

    if limited:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    torch.manual_seed(0)
    with ds_zero.Init(config_dict_or_path=config(folder)):
        model = gpt_of(width, layers)
    engine, *_ = ds_core.initialize(model=model, config=config(folder))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(2):
        x = torch.randint(0, 256, (1, 65), generator=generator)
        loss = engine(x[:, :-1], x[:, 1:])
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) << 10
    engine.destroy()
    return {"losses": losses, "peak": peak}


if __name__ == "__main__":
    width, layers, limited = map(int, sys.argv[1:4])
    print(json.dumps(two_steps(width, layers, sys.argv[4], bool(limited))))
