"""Tensors, steps and bounds with which a provider is compared with the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_inference_kit import program as p
from ds_inference_kit.step import Step
from ds_inference_kit.weights import Quantized, quantize

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FORMATS = (
    "own",
    "fp32",
    "bf16",
    "fp16",
    "columns",
    "int8",
    "int8 with lows",
    "int4",
    "int4 with lows",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BOUNDS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Largest difference, as a part of the largest value that is expected (in whole models twice that).
"""


def random(*shape: int, seed: int = 0) -> Float[Tensor, "*shape"]:
    """Normal numbers in fp32."""
    # The shape is part of the seed, so that tensors of unequal shape are unrelated.
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_step(
    parts: Sequence[tuple[Tensor, int]],
    blocks: Int[Tensor, "sequences most"] | None = None,
    device: str = "cpu",
    **more: Any,
) -> Step:
    """A step of some sequences: for each its tokens, and the position of the first of them."""
    sizes = torch.tensor([len(tokens) for tokens, _ in parts])
    positions = torch.cat([torch.arange(first, first + len(tokens)) for tokens, first in parts])
    return Step(
        torch.cat([tokens for tokens, _ in parts]).int().to(device),
        positions.int().to(device),
        torch.cat([torch.zeros(1), sizes.cumsum(0)]).int(),
        torch.tensor([first + len(tokens) for tokens, first in parts], dtype=torch.int32),
        None if blocks is None else blocks.int().to(device),
        **{
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in more.items()
        },
    )


def check_close(got: Float[Tensor, "*got"], wanted: Float[Tensor, "*wanted"], bound: float) -> None:
    """AssertionError where a number differs by more than `bound` of the largest that is wanted."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel():
        return
    # In fp64, so that the comparison itself rounds nothing.
    got = got.double()
    wanted = wanted.double()
    assert bool(got.isfinite().all()), f"{int((~got.isfinite()).sum())} numbers are not finite"
    away = (got - wanted).abs()
    # Of the largest value: small results of cancellation are as far off as their terms' rounding.
    most = wanted.abs().max().item()
    worst = int(away.argmax())
    assert away.max().item() <= bound * max(most, 1e-3), (
        f"number {worst} is {got.flatten()[worst]:.7g} instead of {wanted.flatten()[worst]:.7g}, "
        f"{int((away > bound * most).sum())} of {away.numel()} are away by more than {bound:g} of "
        f"{most:.4g}"
    )


def move_to(instruction: p.Instruction, device: str, dtype: torch.dtype) -> Any:
    """The instruction with its tensors on `device`; what is in fp64 (a test's "own dtype") becomes
    `dtype`.
    """

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, dtype if value.dtype == torch.float64 else value.dtype)
        if isinstance(value, tuple):
            return tuple(map(move, value))
        if isinstance(value, Quantized):
            return dataclasses.replace(
                value, q=move(value.q), scales=move(value.scales), lows=move(value.lows)
            )
        return value

    changes = {f.name: move(getattr(instruction, f.name)) for f in dataclasses.fields(instruction)}
    return dataclasses.replace(instruction, **changes)


def make_weight(out: int, inner: int, form: str, seed: int = 0) -> p.Weight:
    """A random weight [out, inner] in one of `FORMATS`; "own" is fp64, which `move_to` changes."""
    values: Tensor = random(out, inner, seed=seed) / inner**0.5
    if form.startswith("int"):
        # steps of pairs in 8 bits are too small for fp16
        small = 34 if form == "int8 with lows" else 2
        group = next(g for g in (32, 22, 16, small) if inner % g == 0)
        return quantize(
            values, bits=int(form[3]), group=group, symmetric=not form.endswith("with lows")
        )
    if form == "columns":
        return values.double().t().contiguous().t()
    return values.to({"own": torch.float64, **{k: DTYPES[v] for k, v in _SHORT.items()}}[form])


_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
