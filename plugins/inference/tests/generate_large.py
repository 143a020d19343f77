"""Generate with a llama whose weights rest on disk (ZeRO inference), or with plain transformers;
prints JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

WIDTH = 1536
LAYERS = 50
LIMIT = 320 << 20
"""Bytes that a process may allocate beside what torch and transformers hold."""

LARGEST = WIDTH * 11 // 4 * WIDTH


def config(folder: str) -> dict[str, Any]:
    """Units of one matrix; two are read ahead."""
    disk = {
        "device": "nvme",
        "nvme_path": folder,
        "max_in_cpu": 0,
        "buffer_count": 2,
        "buffer_size": LARGEST,
    }
    live = {
        "prefetch_bucket_size": LARGEST,
        "max_live_parameters": 3 * LARGEST,
        "max_reuse_distance": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": disk, **live},
    }


def model_of(layers: int) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as hf

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    sizes |= {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH * 11 // 4,
        "num_hidden_layers": layers,
    }
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=64, **sizes
        )
    )


def held() -> int:
    """Bytes that count for RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) << 10


def main(layers: int, limited: bool, folder: str) -> dict[str, Any]:
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # what it holds varies with what is installed

    torch.set_num_threads(1)
    if limited:
        import ds_zero

        import ds_core

        limit = held() + LIMIT
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with ds_zero.Init(config_dict_or_path=config(folder)):
            model = model_of(layers)
        model = ds_core.initialize(model=model, config=config(folder))[0].eval().module
    else:
        model = model_of(layers).bfloat16().eval()
    prompts = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(1))
    text = model.generate(prompts, max_new_tokens=5, do_sample=False, use_cache=True)
    bytes_ = 2 * sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return {"text": text.tolist(), "bytes": bytes_}


if __name__ == "__main__":
    found = main(int(sys.argv[1]), bool(int(sys.argv[2])), sys.argv[3])
    Path(sys.argv[3], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    os._exit(0)  # the weights are not brought back together
