"""The largest eigenvalue of the Hessian of each block, by power iteration: how much the loss minds
its rounding.

A Hessian times a vector is the gradient of (gradient times vector), so only vectors are ever held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("ds_compression")

Vectors = list[Tensor]
"""One tensor for each parameter of a block."""


def blocks_of(model: nn.Module, layer_name: str, layer_num: int) -> list[nn.Module]:
    """The first `layer_num` modules of the list that `model` has under `layer_name`.

    Raises ValueError.
    """
    try:
        layers = model.get_submodule(layer_name)
    except AttributeError:
        raise ValueError(f"layer_name: the model has no module {layer_name!r}") from None
    found = list(layers.children())
    if len(found) < layer_num:
        raise ValueError(f"layer_num: {layer_name} has {len(found)} modules, not {layer_num}")
    return found[:layer_num]


def largest_eigenvalue(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    generator: torch.Generator,
    *,
    max_iter: int,
    tol: float,
    stability: float,
    average: Callable[[Vectors], None] | None = None,
) -> tuple[float, int]:
    """The eigenvalue of greatest size of the Hessian, and the iterations that found it.

    grads: of the loss by `params`, with a graph.
    average: brings the products of all ranks together, in place.
    """
    wide = [torch.float64 if p.dtype == torch.float64 else torch.float32 for p in params]
    vector = [
        torch.randn(p.shape, generator=generator, dtype=dtype).to(p.device)
        for p, dtype in zip(params, wide, strict=True)
    ]
    _normalise(vector, stability)
    found = 1.0
    before = 0.0
    iterations = 0
    # Until two estimates in a row differ by less than `tol`. An eigenvalue of 0 means that there is
    # no curvature to follow.
    while iterations < max_iter and found != 0.0 and abs((found - before) / found) >= tol:
        before = found
        product = _hessian_times(grads, params, vector)
        if average is not None:
            average(product)
        found = float(sum((a * b).sum() for a, b in zip(product, vector, strict=True)))
        vector = product
        _normalise(vector, stability)
        iterations += 1
    return found, iterations


def _hessian_times(grads: Sequence[Tensor], params: Sequence[Tensor], vector: Vectors) -> Vectors:
    outputs = [(g, v.to(g.dtype)) for g, v in zip(grads, vector, strict=True) if g.requires_grad]
    if not outputs:  # the loss is linear in them
        return [torch.zeros_like(v) for v in vector]
    products = torch.autograd.grad(
        [g for g, _ in outputs],
        params,
        [v for _, v in outputs],
        retain_graph=True,
        allow_unused=True,
    )
    return [
        torch.zeros_like(v)
        if p is None
        else p.detach().to(v.dtype, copy=True).nan_to_num_(0.0, 0.0, 0.0)
        for p, v in zip(products, vector, strict=True)
    ]


def _normalise(vector: Vectors, stability: float) -> None:
    norm = torch.stack([v.square().sum() for v in vector]).sum().sqrt()
    for part in vector:
        part.div_(norm + stability)


def relative(eigenvalues: Sequence[float]) -> list[float]:
    """Their sizes as parts of the greatest; a block of which nothing is known (0) counts as the
    most sensitive.
    """
    greatest = max((abs(value) for value in eigenvalues), default=0.0)
    return [abs(value) / greatest if value != 0.0 else 1.0 for value in eigenvalues]


class Eigenvalue:
    """DeepSpeed's class of this name, for loops of one's own: section ``eigenvalue`` needs no call
    of it.

    Gradients must have been made by ``loss.backward(create_graph=True)``.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0.0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        if not layer_name or layer_num < 1:
            raise ValueError(
                f"layer_name {layer_name!r}, layer_num {layer_num}: the blocks must be named and "
                "counted"
            )
        self.verbose = verbose
        self.max_iter = max_iter
        self.tol = tol
        self.stability = stability
        self.gas_boundary_resolution = gas_boundary_resolution
        self.layer_name = layer_name
        self.layer_num = layer_num

    def compute_eigenvalue(
        self, module: nn.Module, device: Any = None, scale: float = 1.0
    ) -> Mapping[int, Any]:
        """``id`` of each parameter of a block -> (relative eigenvalue, number of the block).

        device: without effect.

        scale: that of the loss whose gradients there are.
        """
        blocks = blocks_of(module, self.layer_name, self.layer_num)
        found = []
        for index, block in enumerate(blocks):
            params = [p for p in block.parameters() if p.grad is not None and p.grad.requires_grad]
            if not params:
                raise ValueError(
                    f"{self.layer_name}.{index} has no gradients by "
                    "loss.backward(create_graph=True)"
                )
            grads = [p.grad for p in params if p.grad is not None]
            value, iterations = largest_eigenvalue(
                grads,
                params,
                torch.Generator().manual_seed(index),
                max_iter=self.max_iter,
                tol=self.tol,
                stability=self.stability,
            )
            found.append(value / scale)
            if self.verbose:
                log.info(
                    "block %d: eigenvalue %.6g after %d iterations", index, found[-1], iterations
                )
        parts = relative(found)
        return {id(p): (parts[i], i) for i, block in enumerate(blocks) for p in block.parameters()}
