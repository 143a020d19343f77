"""Which DeepSpeed the names are those of (standard library only)."""

from __future__ import annotations

from typing import Any

VERSION = "0.19.8+dscore"
GIT_HASH = "dscore"
GIT_BRANCH = "main"


def __getattr__(name: str) -> Any:
    if name == "torch_info":
        import torch

        cuda = torch.version.cuda
        hip = torch.version.hip
        return {
            "version": torch.__version__.rpartition(".")[0],
            "bf16_support": True,
            "cuda_version": cuda or "0.0",
            "nccl_version": "0.0"
            if cuda is None
            else ".".join(map(str, torch.cuda.nccl.version())),
            "hip_version": hip or "0.0",
        }
    if name == "accelerator_name":
        from ds_core.accelerator import get_accelerator

        return get_accelerator().device_type
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
