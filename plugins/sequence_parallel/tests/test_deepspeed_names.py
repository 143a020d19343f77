"""Scripts that were written for DeepSpeed's Ulysses: its loader, its registration, its loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import sp_models as m
import torch
from ds_testing import run_ranks
from torch.nn.functional import cross_entropy


def as_written_for_deepspeed(kind: str) -> float:
    """Gradients of each rank's batch, all ranks' together, against one process that sees both."""
    import torch.distributed as dist
    from ds_sequence_parallel.deepspeed_names import (
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )
    from torch.distributed.nn.functional import all_gather
    from transformers import AttentionInterface, AttentionMaskInterface

    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [table["sdpa"] for table in tables]
    unit = UlyssesSPAttentionHF.register_with_transformers(
        "any", "sdpa", dist.get_world_size(), 1, 12
    )
    try:
        model = m.make_model("llama", "sdpa")
        group = unit.get_sequence_parallel_group()
        ranks = unit.get_sequence_parallel_world_size()
        mine = [m.batch(dist.get_rank(), 12, kind)]
        for batch in UlyssesSPDataLoaderAdapter(
            mine, unit.get_sequence_parallel_rank(), group, ranks, "cpu"
        ):
            shifted = batch.pop("shift_labels")
            logits = model(**batch, use_cache=False).logits
            total = cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
            good = (shifted != -100).sum()
            losses = all_gather(total, group=group)
            goods = [torch.zeros_like(good) for _ in range(ranks)]
            dist.all_gather(goods, good, group=group)
            (sum(losses) / sum(goods)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= ranks
    finally:
        for table, function in zip(tables, before, strict=True):
            table["sdpa"] = function
    plain = m.make_model("llama", "sdpa")
    for rank in range(ranks):
        batch = m.batch(rank, 12, kind)
        labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
        cross_entropy(
            plain(**batch, use_cache=False).logits.flatten(0, 1), labels.flatten()
        ).backward()
    pairs: Any = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def both() -> list[float]:
    return [as_written_for_deepspeed(kind) for kind in ("plain", "packed")]


def test_gradients_are_those_of_one_process() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(2, both):
        assert all(off < 1e-12 for off in found), found


def attention_with_its_arguments() -> float:
    import torch.distributed as dist
    from ds_sequence_parallel.deepspeed_names import DistributedAttention

    made = torch.Generator().manual_seed(0)
    # [s, b, h, d]
    q, k, v = (torch.randn(8, 2, 4, 3, generator=made, dtype=torch.float64) for _ in range(3))

    def local(query: Any, key: Any, value: Any) -> Any:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(
            2, 0, 1, 3
        )

    rank = dist.get_rank()
    group = dist.group.WORLD
    part = slice(4 * rank, 4 * rank + 4)
    out = DistributedAttention(local, group, scatter_idx=2, gather_idx=0)(
        q[part], k[part], v[part], 1
    )
    return float((out - local(q, k, v)[part]).abs().max())


def test_attention_takes_sequence_first() -> None:
    assert max(run_ranks(2, attention_with_its_arguments)) < 1e-12


def exchanged() -> list[bool]:
    from ds_sequence_parallel.deepspeed_names import _SeqAllToAll, single_all_to_all

    from ds_core import comm

    comm.init_distributed("gloo")
    rank = comm.rank()
    ranks = comm.world_size()
    group = torch.distributed.group.WORLD
    torch.manual_seed(0)
    whole = torch.randn(2, 8, 4, 3)  # batch, sequence, heads, their size
    mine = whole.chunk(ranks, 1)[rank].clone().requires_grad_()
    heads = _SeqAllToAll.apply(group, mine, 2, 1, 0)
    back = single_all_to_all(heads, 1, 2, 0, group)
    (back * 2).sum().backward()
    assert mine.grad is not None
    return [
        torch.equal(heads, whole.chunk(ranks, 2)[rank]),
        torch.equal(back, mine),
        bool((mine.grad == 2).all()),
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_exchange_under_its_names(world: int) -> None:
    assert run_ranks(world, exchanged) == [[True] * 3] * world
