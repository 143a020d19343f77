"""A script for DeepSpeed's Ulysses (ALST): registration, mpu, loader and loss, as its tutorial has
them.
"""

from __future__ import annotations

from typing import Any

import torch
from ds_deepspeed_compat.engines.engine import initialize
from ds_testing import run_ranks


def losses_and_places() -> list[Any]:
    from ds_sequence_parallel.deepspeed_names import (
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )
    from torch import distributed as dist
    from torch.distributed.nn.functional import all_gather
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        LlamaConfig,
        LlamaForCausalLM,
    )

    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [table["sdpa"] for table in tables]
    mpu = UlyssesSPAttentionHF.register_with_transformers("any", "sdpa", 2, 1, 8)
    try:
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
        }
        config = LlamaConfig(
            **sizes, num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa"
        )
        model = LlamaForCausalLM(config)
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        engine, *_ = initialize(model=model, config=settings, mpu=mpu)
        group = mpu.get_sequence_parallel_group()
        random = torch.Generator().manual_seed(dist.get_rank())
        mine = [
            {"input_ids": ids, "labels": ids}
            for ids in [torch.randint(0, 32, (1, 8), generator=random)] * 4
        ]
        losses = []
        for batch in UlyssesSPDataLoaderAdapter(
            mine, mpu.get_sequence_parallel_rank(), group, 2, "cpu"
        ):
            labels = batch.pop("shift_labels")
            logits = engine(**batch).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            good = all_gather((labels != -100).sum().float(), group=group)
            loss = sum(all_gather(loss, group=group)) / sum(good)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        places = [engine.sequence_parallel_size, engine.dp_world_size, engine.train_batch_size()]
        engine.destroy()
    finally:
        for table, function in zip(tables, before, strict=True):
            table["sdpa"] = function
    return [losses, places]


def test_it_runs_and_learns() -> None:
    (losses, places), other = run_ranks(2, losses_and_places)
    assert [losses, places] == other  # all ranks of a sequence see one loss
    assert places == [2, 1, 1]
    assert losses[-1] < losses[1] - 0.1
