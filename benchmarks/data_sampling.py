"""What batches by tokens and packed rows gain over padding, and what planning costs.

Training: a small Llama of transformers on samples of 8 to 512 tokens, log-normal (median 66), in
one process: tokens of samples per second, padding not counted. The ways take turns in blocks of
steps; each has about as many tokens in a micro-batch, padding included, as the padded one has at
most. Planning: seconds for an epoch's batches of 20,000 samples of one token, with nothing else,
beside the loader of the core.

    python benchmarks/data_sampling.py [--blocks 6] [--steps 4]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

WAYS: dict[str, dict[str, Any]] = {
    "padded, 16 samples": {},
    "dynamic_batching": {"dynamic_batching": {"enabled": True, "max_tokens": 4096}},
    "the same, seqlen": {
        "dynamic_batching": {
            "enabled": True,
            "max_tokens": 4096,
            "sequence_picking_order": "seqlen",
        }
    },
    "packing": {"packing": {"enabled": True, "row_tokens": 512}},
}
MICRO = {"packing": 8}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 1000, (self.lengths[index],), generator=made)
        return {"input_ids": tokens, "labels": tokens}


def start(model: Any, way: str, data: Any) -> Any:
    import ds_core

    sampling = {
        "enabled": True,
        **({"loss_weights": "targets"} if data.__class__ is Samples else {}),
        **WAYS[way],
    }
    config = {
        "train_micro_batch_size_per_gpu": MICRO.get(way, 16),
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "data_efficiency": {"enabled": True, "data_sampling": sampling},
    }
    collate = None
    if way.startswith("padded"):
        from ds_data_sampling.batching.collate import Padder

        collate = Padder()
    return ds_core.initialize(model=model, config=config, training_data=data, collate_fn=collate)[0]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


class Counted:
    """A loader's batches, with how many of their tokens are of samples, and how many there are."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.used = 0
        self.all = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        self.all += batch["input_ids"].numel()
        rows = len(batch["input_ids"])
        if "position_ids" in batch:  # the first token of each sample has no label
            targets = int((batch["labels"] != -100).sum())
            places = batch["position_ids"][batch["labels"] != -100]
            self.used += targets + int((places == 1).sum())
        else:
            mask = batch.get("attention_mask")
            self.used += batch["input_ids"].numel() if mask is None else int(mask.sum())
        assert rows
        return batch


def train(blocks: int, steps: int) -> None:
    lengths = np.random.default_rng(0).lognormal(4.2, 0.8, 8000).clip(8, 512).astype(int).tolist()
    engines = {way: start(llama(), way, Samples(lengths)) for way in WAYS}
    from ds_core.engine import RepeatingLoader

    data = {
        way: Counted(iter(RepeatingLoader(e.training_dataloader))) for way, e in engines.items()
    }
    for way, engine in engines.items():
        engine.train_batch(data[way])
        data[way].used = data[way].all = 0
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(blocks):
        for way, engine in engines.items():
            before = data[way].used
            began = time.process_time()
            for _ in range(steps):
                engine.train_batch(data[way])
            rates[way].append((data[way].used - before) / (time.process_time() - began))
    print(f"{'way':20} {'tokens per s of CPU':>20} {'to padded':>10} {'tokens of samples':>18}")
    plain = median(rates["padded, 16 samples"])
    for way, found in rates.items():
        share = data[way].used / data[way].all
        print(f"{way:20} {median(found):20,.0f} {median(found) / plain:9.2f}x {share:17.1%}")
    for engine in engines.values():
        engine.destroy()


def plan(blocks: int) -> None:
    import ds_core
    from ds_core.engine import DistributedLoader, LoaderRequest

    class Ones(torch.utils.data.Dataset[torch.Tensor]):
        lengths = np.random.default_rng(0).integers(8, 512, 20_000)

        def __len__(self) -> int:
            return len(self.lengths)

        def __getitem__(self, index: int) -> torch.Tensor:
            return one

    one = torch.zeros(1, dtype=torch.long)
    engines = {way: start(torch.nn.Linear(1, 1), way, Ones()) for way in WAYS}
    loaders: dict[str, Any] = {"the core's loader": DistributedLoader(LoaderRequest(Ones(), 16))}
    loaders |= {way: engine.training_dataloader for way, engine in engines.items()}
    times: dict[str, list[float]] = {way: [] for way in loaders}
    for _ in range(blocks):
        for way, loader in loaders.items():
            began = time.process_time()
            for _ in loader:
                pass
            times[way].append((time.process_time() - began) / 20_000 * 1e6)
    print(f"\n{'way':20} {'us of CPU per sample':>21}")
    for way, found in times.items():
        print(f"{way:20} {min(found):21.2f}")
    for engine in engines.values():
        engine.destroy()
    ds_core.reset()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.blocks, given.steps)
    plan(given.blocks)
