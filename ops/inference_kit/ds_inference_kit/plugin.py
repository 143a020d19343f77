"""Declares the reference interpreter of inference programs, for any device and dtype
(torch-free)."""

from __future__ import annotations

from collections.abc import Iterable

from ds_core.entries import KernelEntry


def ds_kernels() -> Iterable[KernelEntry]:
    """The interpreter in plain torch, which serves where no faster provider does."""
    return (KernelEntry("inference_program", "reference", "ds_inference_kit.reference:load", 0),)
