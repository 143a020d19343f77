"""Muon: momentum whose matrices are orthogonalised, and AdamW for whatever is no hidden matrix.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. A parameter is a matrix for Muon when
it has two dimensions or more and its name holds neither "embed" nor "lm_head"; or when its
attribute ``use_muon`` says so. Kernels of convolutions count as (output channels, all the rest).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_optimizers.base import KernelOptimizer, StepBatch, check_common

if TYPE_CHECKING:
    from jaxtyping import Float

METHODS = ("gram", "standard")
_NOT_HIDDEN = ("embed", "lm_head")
# Chosen by Jordan et al. (2024) for a steep start: singular values end between about 0.7 and 1.2.
_A = 3.4445
_B = -4.7750
_C = 2.0315
_ITERATIONS = 5


class Muon(KernelOptimizer):
    """Muon (Jordan et al. 2024) for groups with ``use_muon`` true, AdamW for the others.

    params: group dicts with ``use_muon``, or parameters (groups of them) that have it as an
        attribute. From the config the split is made by name, see `split_groups`.
    lr: the default of muon_lr and adam_lr.
    momentum: of Muon.

    weight_decay: decoupled, of both.
    betas, eps: AdamW's.
    ns_method: how matrices are orthogonalised, "gram" (less work for wide or tall matrices) or
        "standard"; results differ by rounding.

    States: ``momentum_buffer``, or ``exp_avg`` and ``exp_avg_sq``.
    """

    op: ClassVar[str] = "adam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: str = "gram",
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum {momentum} must be in [0, 1)")
        if ns_method not in METHODS:
            raise ValueError(f"ns_method {ns_method!r}: one of {', '.join(METHODS)}")
        items = list(params)
        given = items if items and isinstance(items[0], dict) else [{"params": items}]
        groups = split_groups(given, None, lr=lr, muon_lr=muon_lr, adam_lr=adam_lr)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(groups, {**defaults, "ns_method": ns_method})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; the group must say ``use_muon``."""
        if "use_muon" not in param_group:
            raise UsageError(
                "a group of Muon needs use_muon: true for hidden matrices, false for what AdamW "
                "updates"
            )
        super().add_param_group(param_group)

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See `KernelOptimizer.states_of`."""
        return ("momentum_buffer",) if group["use_muon"] else self.states

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        if group["use_muon"]:
            for param in batch.owners:
                if param.dim() < 2 or param.is_complex():
                    raise UsageError(
                        f"Muon is for real matrices; a parameter of shape {tuple(param.shape)}, "
                        f"{param.dtype}, is in a use_muon group"
                    )
            for param, grad, momentum in zip(
                batch.params, batch.grads, batch.states[0], strict=True
            ):
                _step(param, grad, momentum, group, batch.scale)
            # The kernels of other optimizers write copies in the same pass; here it is a second
            # one.
            if batch.copies is not None:
                torch._foreach_copy_(batch.copies, batch.params)
            return
        beta1, beta2 = group["betas"]
        run = self.kernel(batch.params[0])
        options = {k: group[k] for k in ("lr", "eps", "weight_decay")}
        options |= {"beta1": beta1, "beta2": beta2, "scale": batch.scale, "copies": batch.copies}
        run(batch.params, batch.grads, *batch.states, step=batch.step, **options)


def _step(
    param: Tensor, grad: Tensor, momentum: Tensor, group: Mapping[str, Any], scale: float
) -> None:
    """p -= lr * (s * orthogonalize(g + mu * (m - g)) + wd * p), with m the momentum after this step."""
    mu = group["momentum"]
    lr = group["lr"]
    grad = grad.to(momentum.dtype) if scale == 1 else grad.to(momentum.dtype) * scale
    # Momentum as a running mean, then Nesterov: a step ahead of it.
    momentum.lerp_(grad, 1 - mu)
    ahead = grad.lerp(momentum, mu).flatten(1)
    found = orthogonalize(ahead, group["ns_method"])
    # s = sqrt(max(1, rows / columns)): an orthogonal matrix that is tall has smaller entries, and
    # would change its outputs less.
    size = max(1.0, ahead.shape[0] / max(ahead.shape[1], 1)) ** 0.5
    param.mul_(1 - lr * group["weight_decay"]).add_(
        found.view(param.shape).to(param.dtype), alpha=-lr * size
    )


def orthogonalize(
    matrix: Float[Tensor, "rows columns"], method: str = "gram"
) -> Float[Tensor, "rows columns"]:
    """About the nearest matrix with orthogonal rows (or columns), by five Newton-Schulz iterations.

    matrix: fp32 or fp64.
    method: "gram" iterates on the small square X X^T and multiplies by X once at the end.
    """
    # Wide, so that the square is the smaller one; singular values are at most 1, where the
    # iteration converges.
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / (matrix.norm() + 1e-7)
    if method == "standard":
        # X <- a X + (b S + c S^2) X with S = X X^T, which applies an odd polynomial to each
        # singular value.
        for _ in range(_ITERATIONS):
            square = x @ x.mT
            x = _A * x + (_B * square + _C * (square @ square)) @ x
    else:
        square = x @ x.mT
        factor = torch.eye(len(square), dtype=x.dtype, device=x.device)
        for _ in range(_ITERATIONS):
            # With P = a + b S + c S^2 the iteration is X <- P X, so S <- P S P, and the product of all
            # P is applied to X at the end. All of these are polynomials in one symmetric matrix, so
            # they commute. The diagonal is computed by itself: a I is added to it.
            polynomial = (_B * square + _C * (square @ square)).diagonal_scatter(
                _A + _B * square.diagonal() + _C * square.square().sum(1)
            )
            factor = polynomial @ factor
            square = polynomial @ square @ polynomial
        x = factor @ x
    found: Tensor = x.mT if tall else x
    return found.contiguous()


def split_groups(
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[Any, str] | None,
    *,
    lr: float = 1e-3,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    **others: Any,
) -> list[dict[str, Any]]:
    """Each group as one of hidden matrices and one of the rest, empty ones left out, each with its
    learning rate.

    A group's own ``use_muon`` and ``lr`` are kept.

    names: of parameters; None: they must all have ``use_muon`` themselves (UsageError).
    others: parameters of the optimizer that do not matter here.
    """
    rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
    found = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        wanted = {
            p: bool(group["use_muon"]) if "use_muon" in group else _hidden(p, names) for p in params
        }
        for use in (True, False):
            members = [p for p in params if wanted[p] is use]
            if members:
                found.append({"lr": rates[use], **group, "params": members, "use_muon": use})
    return found


def _hidden(param: Any, names: Mapping[Any, str] | None) -> bool:
    """Whether Muon updates `param`."""
    if (said := getattr(param, "use_muon", None)) is not None:
        return bool(said)
    if names is None:
        raise UsageError(
            f"Muon: a parameter of shape {tuple(param.shape)} does not say whether it is a hidden "
            "matrix; set its attribute use_muon, give groups with use_muon, or name Muon in the "
            "config, which splits by name"
        )
    name = names.get(param, "")
    # The full shape of a parameter that is partitioned already.
    shape = getattr(param, "ds_shape", param.shape)
    return (
        len(shape) >= 2 and not param.is_complex() and not any(word in name for word in _NOT_HIDDEN)
    )
