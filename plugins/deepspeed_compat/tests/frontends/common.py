"""What the front-end programs share: a small model, data made from a seed, and the loss curve
written to a file.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

VOCAB = 61
LENGTH = 12


class Tokens(Dataset):  # type: ignore[type-arg]
    """Sequences in which each token follows from the one before, with a little noise."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCAB, (rows, 1), generator=made)
        steps = torch.arange(LENGTH)[None, :] * torch.randint(1, 4, (rows, 1), generator=made)
        self.rows = (first + steps) % VOCAB

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].clone()}


def tiny_llama() -> Any:
    """A Llama of two layers, the same on every rank; no download."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def cuda_on_cpu(accelerator: Any) -> Any:
    """An instance of Lightning's class `accelerator` (its DeepSpeedStrategy takes CUDA ones only)
    that uses the CPU.
    """

    class OnCPU(accelerator):  # type: ignore[misc]
        def setup_device(self, device: torch.device) -> None:
            pass

        def setup(self, trainer: Any) -> None:
            pass

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: int) -> list[int]:
            return list(range(devices))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("cpu", index) for index in devices]

        @staticmethod
        def is_available() -> bool:
            return True

    return OnCPU()


def arguments(**extra: Any) -> argparse.Namespace:
    """The command line of every program: where the curve goes, and the DeepSpeed config, if any."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, required=True, help="the loss curve, as JSON, from rank 0"
    )
    parser.add_argument(
        "--deepspeed", default=None, help="a DeepSpeed config; none: plain data parallelism"
    )
    parser.add_argument("--work", type=Path, default=None, help="a folder for checkpoints")
    for name, default in extra.items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    found, _ = parser.parse_known_args()
    return found


def first_rank() -> bool:
    """Whether this is rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def write(path: Path, engine: Any, **values: Any) -> None:
    """Write `values` from rank 0, and the class of the model as the front-end wrapped it."""
    if first_rank():
        path.write_text(
            json.dumps({"engine": f"{type(engine).__module__}.{type(engine).__name__}", **values})
        )
