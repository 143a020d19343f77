"""Muon: momentum whose matrices are orthogonalised, and AdamW for whatever is no hidden matrix.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. A parameter is a matrix for Muon when
it has two dimensions or more and its name holds neither "embed" nor "lm_head"; or when its
attribute ``use_muon`` says so. Kernels of convolutions count as (output channels, all the rest).
Experts that are stacked in one parameter are a matrix each (the attribute ``stacked``, 1, or a name
that says so).

Momentum is updated wherever its elements are. What is to be orthogonalised goes to the rank that
does it, and comes back as an update: `ds_optimizer_kit.MatrixExchange`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from ds_optimizer_kit import (
    ExchangeNeed,
    Layout,
    MatrixExchange,
    group_alike,
    plan_exchange,
    split_alike,
)
from ds_optimizer_kit.matrix_optimizer import is_matrix, shapes_of, stack_dims
from torch import Tensor

from ds_core.errors import UsageError
from ds_optimizers.base import StepBatch, check_common
from ds_optimizers.collecting import CollectingOptimizer
from ds_optimizers.moments.normalized import VARIANTS, normalize

if TYPE_CHECKING:
    from ds_optimizer_kit import Unit
    from jaxtyping import Float

METHODS = ("gram", "standard", "polar_express")
# Chosen by Jordan et al. (2024) for a steep start: singular values end between about 0.7 and 1.2.
_A = 3.4445
_B = -4.7750
_C = 2.0315
_ITERATIONS = 5
# Amsel et al. 2025, https://arxiv.org/abs/2505.16932: the best odd polynomial of degree 5 for what
# the iterations before have left, from singular values of 0.001 on.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115952949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
# Their margin: rounding must not leave a singular value outside of what a polynomial is for.
_MARGIN = 1.01


class Muon(CollectingOptimizer):
    """Muon (Jordan et al. 2024) for groups with ``use_muon`` true, AdamW for the others.

    params: group dicts with ``use_muon``, or parameters (groups of them) that have it as an
        attribute. From the config the split is made by name, see `split_groups`.
    lr: the default of muon_lr and adam_lr.
    momentum: of Muon.

    weight_decay: decoupled, of both.
    betas, eps: AdamW's.
    ns_method: how matrices are orthogonalised, see `orthogonalize`: "gram" (less work for wide or
        tall matrices) or "standard", which differ by rounding, or "polar_express".

    nesterov: orthogonalise what is a step ahead of the momentum, not the momentum itself.
    variant: "normuon" and "adamuon" divide the orthogonalised update by the root of a second moment,
        of each row or each element, whose decay rate is beta2: see `ds_optimizers.moments.normalized`.

    States: ``momentum_buffer`` (and ``exp_avg_sq`` of a variant), or ``exp_avg`` and ``exp_avg_sq``.
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
        nesterov: bool = True,
        variant: str = "muon",
        beta2: float = 0.95,
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum {momentum} must be in [0, 1)")
        if ns_method not in METHODS:
            raise ValueError(f"ns_method {ns_method!r}: one of {', '.join(METHODS)}")
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r}: one of {', '.join(VARIANTS)}")
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2 {beta2} must be in [0, 1)")
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
        modes = {"ns_method": ns_method, "nesterov": nesterov, "variant": variant, "beta2": beta2}
        super().__init__(groups, {**defaults, **modes})

    def _find_anew(self) -> None:
        super()._find_anew()
        # -- of the running step --
        # Per matrix: its group, what is orthogonalised, and where its new value is written in 16
        # bits.
        self._noted: dict[Tensor, tuple[dict[str, Any], Tensor, Tensor | None]] = {}
        # What AdamW updates.
        self._others: list[tuple[dict[str, Any], StepBatch]] = []
        # -- kept --
        self._exchange: MatrixExchange | None = None
        # The ids of the tensors that it is for.
        self._exchanged: list[int] = []
        self._method_of: dict[Tensor, str] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; the group must say ``use_muon``."""
        if "use_muon" not in param_group:
            raise UsageError(
                "a group of Muon needs use_muon: true for hidden matrices, false for what AdamW "
                "updates"
            )
        param_group.setdefault("stacked", 0)
        super().add_param_group(param_group)

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See `KernelOptimizer.states_of`."""
        if not group["use_muon"]:
            return self.states
        normalized = group["variant"] != "muon"
        return ("momentum_buffer", "exp_avg_sq") if normalized else ("momentum_buffer",)

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        if group["use_muon"]:
            self._note(group, batch)
        else:
            # While matrices are on their way, see `collect`.
            self._others.append((group, batch))

    def _note(self, group: dict[str, Any], batch: StepBatch) -> None:
        """Update the momentum of what this rank has of matrices: m <- mu m + (1 - mu) g."""
        mu = group["momentum"]
        for i, param in enumerate(batch.owners):
            shape = param.shape if self.layout is None else self.layout.parts[param].shape
            if len(shape) - group["stacked"] < 2 or param.is_complex():
                raise UsageError(
                    f"Muon is for real matrices; a parameter of shape {tuple(shape)}, "
                    f"{param.dtype}, is in a use_muon group"
                )
            momentum = batch.states[0][i]
            grad = batch.grads[i].to(momentum.dtype)
            grad = grad if batch.scale == 1 else grad * batch.scale
            # Momentum as a running mean, then Nesterov: a step ahead of it.
            momentum.lerp_(grad, 1 - mu)
            copy = None if batch.copies is None else batch.copies[i]
            ahead = grad.lerp(momentum, mu) if group["nesterov"] else momentum
            ahead = ahead.sign() if group["variant"] == "adamuon" else ahead
            self._noted[param] = (group, ahead, copy)

    def collects(self, group: dict[str, Any]) -> bool:
        """See `CollectingOptimizer.collects`."""
        return bool(group["use_muon"])

    def collect(self) -> None:
        """See `CollectingOptimizer.collect`: matrices are orthogonalised where they are whole."""
        noted = self._noted
        others = self._others
        self._noted = {}
        self._others = []
        exchange = self._matrices()
        used = noted.keys() if self.layout is None else self.used
        exchange.start({param: ahead for param, (_, ahead, _) in noted.items()}, used)
        # AdamW's part of the step needs nobody: it runs while matrices are on their way.
        for group, batch in others:
            self._update_adam(group, batch)
        results: dict[Unit, Tensor] = {}
        for matrices in exchange.finish():
            results.update(orthogonalize_all(matrices, self._method_of))
        changes = {p: v for p, v in exchange.give_back(results).items() if p in noted}
        for param, values in {**changes, **self._normalize(changes)}.items():
            self._apply(param, values, *noted[param])

    def _normalize(self, changes: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Those of NorMuon's and AdaMuon's groups. Collective where there are such."""
        groups = {
            p: g
            for g in self.param_groups
            if g["use_muon"] and g["variant"] != "muon"
            for p in g["params"]
        }
        if not groups:
            return {}
        layout = Layout.local(groups) if self.layout is None else self.layout
        some = {p: v for p, v in changes.items() if p in groups}
        moments = {p: self.state[p]["exp_avg_sq"] for p in some}
        return normalize(layout, self.rows_of, groups, some, moments)

    def _apply(
        self,
        param: Tensor,
        update: Tensor,
        group: Mapping[str, Any],
        ahead: Tensor,
        copy: Tensor | None,
    ) -> None:
        """p -= lr * (s * orthogonalize(g + mu * (m - g)) + wd * p), of this rank's elements."""
        lr = group["lr"]
        shape = ahead.shape if self.layout is None else self.layout.parts[param].shape
        rows, *others = shape[group["stacked"] :]
        # s = sqrt(max(1, rows / columns)): an orthogonal matrix that is tall has smaller entries,
        # and would change its outputs less.
        size = max(1.0, rows / max(math.prod(others), 1)) ** 0.5
        if group["variant"] != "muon":
            # `normalize` gave the update its size.
            size = 1.0
        param.mul_(1 - lr * group["weight_decay"]).add_(
            update.view(param.shape).to(param), alpha=-lr * size
        )
        # The kernels of other optimizers write copies in the same pass; here it is a second one.
        if copy is not None:
            copy.copy_(param)

    def _update_adam(self, group: dict[str, Any], batch: StepBatch) -> None:
        beta1, beta2 = group["betas"]
        run = self.kernel(batch.params[0])
        options = {k: group[k] for k in ("lr", "eps", "weight_decay")}
        options |= {"beta1": beta1, "beta2": beta2, "scale": batch.scale, "copies": batch.copies}
        run(batch.params, batch.grads, *batch.states, step=batch.step, **options)

    def planned_exchange(self, world: int, *, sharded: bool) -> ExchangeNeed:
        """What collecting takes on so many ranks, for ``dscore plan``; see `plan_exchange`."""
        groups = {p: g for g in self.param_groups if g["use_muon"] for p in g["params"]}
        shapes = shapes_of({p: int(g["stacked"]) for p, g in groups.items()})
        return plan_exchange(shapes, world, orthogonalize_cost, sharded=sharded)

    def _matrices(self) -> MatrixExchange:
        """The exchange of the matrices of all groups; made anew where these have changed."""
        groups = {p: g for g in self.param_groups if g["use_muon"] for p in g["params"]}
        stacked = {p: g["stacked"] for p, g in groups.items()}
        if self._exchange is None or list(map(id, stacked)) != self._exchanged:
            layout = Layout.local(stacked) if self.layout is None else self.layout
            self._exchange = MatrixExchange(layout, stacked, orthogonalize_cost)
            self._exchanged = list(map(id, stacked))
            self._method_of = {p: g["ns_method"] for p, g in groups.items()}
        return self._exchange


def orthogonalize_cost(rows: int, columns: int) -> float:
    """Multiplications for one matrix: products of the small square, and two with the matrix."""
    small = min(rows, columns)
    return small * small * (2.0 * max(rows, columns) + 4 * _ITERATIONS * small)


def orthogonalize_all(
    matrices: Sequence[tuple[Unit, Tensor]], methods: Mapping[Tensor, str]
) -> dict[Unit, Tensor]:
    """`orthogonalize` of each, those of one shape in one batch."""

    def key(unit: Unit) -> tuple[int, int, str]:
        rows, columns = unit.rows_columns
        return max(rows, columns), min(rows, columns), methods[unit.tensor]

    found: dict[Unit, Tensor] = {}
    for members in group_alike(matrices, key):
        method = methods[members[0][0].tensor]
        # All lie down: a tall matrix and its transpose of one size share a batch.
        flat = [m.reshape(u.rows_columns) for u, m in members]
        stack = torch.stack([m.mT if m.shape[0] > m.shape[1] else m for m in flat])
        for (unit, _), result in zip(members, orthogonalize(stack, method), strict=True):
            rows, columns = unit.rows_columns
            found[unit] = (result.mT if rows > columns else result).reshape(unit.shape)
    return found


def orthogonalize(
    matrix: Float[Tensor, "*n rows columns"], method: str = "gram"
) -> Float[Tensor, "*n rows columns"]:
    """About the nearest matrix with orthogonal rows (or columns), by five Newton-Schulz iterations.

    matrix: fp32 or fp64, or a stack of such.
    method: "gram" iterates on the small square X X^T and multiplies by X once at the end; "standard"
        does the same on X; "polar_express" takes another polynomial in each iteration, which leaves
        singular values nearer to 1.
    """
    # Wide, so that the square is the smaller one; singular values are at most 1, where the
    # iteration converges.
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    if method == "standard":
        for _ in range(_ITERATIONS):
            x = _iterate(x, _A, _B, _C)
    elif method == "polar_express":
        x = x / _MARGIN
        for a, b, c in _POLAR_EXPRESS:
            x = _iterate(x, a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5)
    else:
        square = x @ x.mT
        factor = torch.eye(square.shape[-1], dtype=x.dtype, device=x.device).expand_as(square)
        for _ in range(_ITERATIONS):
            # With P = a + b S + c S^2 the iteration is X <- P X, so S <- P S P, and the product of all
            # P is applied to X at the end. All of these are polynomials in one symmetric matrix, so
            # they commute. The diagonal is computed by itself: a I is added to it.
            diagonal = square.diagonal(dim1=-2, dim2=-1)
            polynomial = (_B * square + _C * (square @ square)).diagonal_scatter(
                _A + _B * diagonal + _C * square.square().sum(-1), dim1=-2, dim2=-1
            )
            factor = polynomial @ factor
            square = polynomial @ square @ polynomial
        x = factor @ x
    found: Tensor = x.mT if tall else x
    return found.contiguous()


def _iterate(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """a X + (b S + c S^2) X with S = X X^T: an odd polynomial of each singular value."""
    square = x @ x.mT
    return a * x + (b * square + c * (square @ square)) @ x


def split_groups(
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[Any, str] | None,
    *,
    lr: float = 1e-3,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    **others: Any,
) -> list[dict[str, Any]]:
    """Each group as one of hidden matrices, one of stacks of them, and one of the rest, empty ones
    left out, each with its learning rate.

    A group's own ``use_muon``, ``stacked`` and ``lr`` are kept; one that has been split stays as it
    is, also an empty one.

    names: of parameters; None: they must all have ``use_muon`` themselves (UsageError).
    others: parameters of the optimizer that do not matter here.
    """
    rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
    found = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not params and {"use_muon", "stacked", "lr"} <= group.keys():
            found.append({**group, "params": params})
        kinds: dict[tuple[bool, int], list[Any]] = {}
        for param in params:
            name = "" if names is None else names.get(param, "")
            stacked = int(group["stacked"]) if "stacked" in group else stack_dims(param, name)
            given = bool(group["use_muon"]) if "use_muon" in group else None
            use = _hidden(param, names, stacked) if given is None else given
            kinds.setdefault((use, stacked if use else 0), []).append(param)
        for (use, stacked), members in sorted(kinds.items(), key=lambda k: (not k[0][0], k[0][1])):
            kind = {"use_muon": use, "stacked": stacked}
            found.append({"lr": rates[use], **group, "params": members, **kind})
    return found


def muon_groups(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str], **params: Any
) -> list[dict[str, Any]]:
    """`split_groups`, alike on all ranks. Collective."""
    return split_alike(
        groups,
        lambda some: split_groups(some, names, **params),
        ("use_muon", "stacked", "lr"),
        lambda kind: (not kind[0], kind[1]),
    )


def _hidden(param: Any, names: Mapping[Any, str] | None, stacked: int) -> bool:
    """Whether Muon updates `param`."""
    if (said := getattr(param, "use_muon", None)) is not None:
        return bool(said)
    if names is None:
        raise UsageError(
            f"Muon: a parameter of shape {tuple(param.shape)} does not say whether it is a hidden "
            "matrix; set its attribute use_muon, give groups with use_muon, or name Muon in the "
            "config, which splits by name"
        )
    return is_matrix(param, names.get(param, ""), stacked)
