"""Sparse attention against torch's dense attention: forward and backward, time and what backward
keeps.

    .venv/bin/python benchmarks/sparse_attention.py [--tokens 1024 2048 4096 8192]

Each round times every contestant once; reported is the median. Two threads, float32, 8 heads of 64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from ds_sparse_attention import SparseAttention, SparseAttentionConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SECTIONS = {
    "fixed": {"mode": "fixed", "attention": "unidirectional"},
    "bigbird": {"mode": "bigbird", "num_random_blocks": 1},
    "bslongformer": {"mode": "bslongformer"},
}


def seconds(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor]) -> float:
    start = time.perf_counter()
    attend(*inputs).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--block", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(2)
    print("tokens  block  pattern       blocks seen    ms  of dense causal  of dense")
    for tokens in args.tokens:
        inputs = [torch.randn(1, 8, tokens, 64, requires_grad=True) for _ in range(3)]
        ways: dict[tuple[int, str], Callable[..., Tensor]] = {
            (0, "dense"): scaled_dot_product_attention,
            (0, "dense, causal"): lambda q, k, v: scaled_dot_product_attention(
                q, k, v, is_causal=True
            ),
        }
        density = {}
        for block in args.block:
            for name, section in SECTIONS.items():
                attention = SparseAttention(
                    SparseAttentionConfig.model_validate({**section, "block": block})
                )
                ways[block, name] = attention
                density[block, name] = attention.pattern(8, tokens, torch.device("cpu")).density
        times: dict[tuple[int, str], list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds + 1):
            for way, attend in ways.items():
                times[way].append(seconds(attend, inputs))
        median = {way: statistics.median(each[1:]) for way, each in times.items()}
        for (block, name), took in median.items():
            seen = f"{density[block, name]:11.1%}" if block else " " * 11
            ratios = [took / median[0, other] for other in ("dense, causal", "dense")]
            print(
                f"{tokens:6}  {block or '':5}  {name:13} {seen} {took * 1e3:7.1f} "
                f"{ratios[0]:14.2f} {ratios[1]:11.2f}"
            )


if __name__ == "__main__":
    main()
