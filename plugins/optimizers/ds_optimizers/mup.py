"""Adam, AdamW and SGD for models in maximal update parametrisation.

The best learning rate of a large model is that of a small one. Each group is split by how the
dimensions of its parameters grew beside the base model's; learning rate and weight decay of each
part follow (Yang et al. 2022, "Tensor Programs V", table 8; api.md section 16). Parameters say how
they grew by ``infshape``, which ``mup.set_base_shapes`` of the package ``mup`` sets; only its
methods ``ninf``, ``width_mult`` and ``fanin_fanout_mult_ratio`` are used, so the package itself is
not needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from ds_optimizer_kit.splitting import split_alike
from torch import Tensor

from ds_core.errors import ConfigError, Problem, UsageError
from ds_optimizers.adam import FusedAdam
from ds_optimizers.sgd import SGD

MARK = "mup_lr_factor"
"""Of a group: what its learning rate was multiplied by.

Groups that have it are not scaled again.
"""


def split_like_adam(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str] | None = None, **params: Any
) -> list[dict[str, Any]]:
    """Groups for optimizers whose update does not grow with the gradient: matrices by 1 / width,
    the rest as they are.

    A matrix has two dimensions that grew.

    names: of parameters, for errors.
    params: of the optimizer; ``lr`` and ``weight_decay`` are for groups without their own.

    Raises ConfigError (UsageError without names) for a parameter without ``infshape``.
    """
    return _split(
        groups, names, params, lambda shape: 1 / shape.width_mult() if shape.ninf() == 2 else 1.0
    )


def split_like_sgd(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str] | None = None, **params: Any
) -> list[dict[str, Any]]:
    """Groups for optimizers whose update is as large as the gradient: matrices by fan-out / fan-in,
    vectors by width.

    Fans are beside the base model's. Otherwise as `split_like_adam`.
    """

    def factor(shape: Any) -> float:
        if shape.ninf() == 2:
            return float(1 / shape.fanin_fanout_mult_ratio())
        return float(shape.width_mult()) if shape.ninf() == 1 else 1.0

    return _split(groups, names, params, factor)


def adam_groups(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str], **params: Any
) -> list[dict[str, Any]]:
    """`split_like_adam`, alike on all ranks. Collective."""
    return _alike(groups, lambda some: split_like_adam(some, names, **params))


def sgd_groups(
    groups: Iterable[Mapping[str, Any]], names: Mapping[Any, str], **params: Any
) -> list[dict[str, Any]]:
    """`split_like_sgd`, alike on all ranks. Collective."""
    return _alike(groups, lambda some: split_like_sgd(some, names, **params))


def _alike(
    groups: Iterable[Mapping[str, Any]], split: Callable[[Any], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    # Stages of a pipeline have matrices of other widths; a group has the rates of its kind.
    return split_alike(groups, split, (MARK, "lr", "weight_decay"), lambda kind: kind)


def _split(
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[Any, str] | None,
    params: Mapping[str, Any],
    factor: Callable[[Any], float],
) -> list[dict[str, Any]]:
    """Each group by `factor` of its parameters: learning rate times it, weight decay divided by it.

    Their product stays, so that weights shrink per step as fast at every width.
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        if MARK in group:
            found.append(dict(group))
            continue
        # Parameters with one factor stay together: few groups, each with one learning rate.
        parts: dict[float, list[Tensor]] = {}
        members = (
            [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        )
        for param in members:
            parts.setdefault(factor(_infshape_of(param, names)), []).append(param)
        lr = group.get("lr", params.get("lr", 1e-3))
        decay = group.get("weight_decay", params.get("weight_decay", 0.0))
        # Decay is multiplied by the learning rate in a step, so it is divided by the factor.
        for by, part in parts.items():
            found.append(
                {**group, "params": part, "lr": lr * by, "weight_decay": decay / by, MARK: by}
            )
    return found


def _infshape_of(param: Tensor, names: Mapping[Any, str] | None) -> Any:
    """How `param` grew; an error where it does not say, or in a way that no rule is known for.

    The error is a ConfigError where `names` tells that the config chose the optimizer, else a
    UsageError.
    """
    shape = getattr(param, "infshape", None)
    if shape is not None and shape.ninf() <= 2:
        return shape
    what = f"a parameter of shape {tuple(getattr(param, 'ds_shape', param.shape))}"
    if shape is None:
        why = f"{what} has no infshape, which says how it grew beside the base model"
        fix = (
            "call mup.set_base_shapes(model, base, delta=...) of the package mup before, or use "
            "the name without Mu"
        )
    else:
        why = f"{what} has {shape.ninf()} dimensions that grew, and mup has rules for two"
        fix = "fix its base shape"
    if names is None:
        raise UsageError(f"{why}; {fix}")
    raise ConfigError([Problem("optimizer.type", f"{names.get(param, '?')!r}: {why}", fix)])


class MuAdam(FusedAdam):
    """Adam with L2 decay, over groups as `split_like_adam` makes them; ``mup.MuAdam``, on the best
    kernel.
    """

    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        groups = split_like_adam(_as_groups(params), lr=lr, weight_decay=weight_decay)
        super().__init__(
            groups,
            lr,
            bias_correction,
            betas,
            eps,
            self.decoupled,
            weight_decay,
            amsgrad,
            fp32_optimizer_states=fp32_optimizer_states,
        )


class MuAdamW(MuAdam):
    """The same with decoupled decay; ``mup.MuAdamW``."""

    decoupled: ClassVar[bool] = True


class MuSGD(SGD):
    """SGD over groups as `split_like_sgd` makes them; ``mup.MuSGD``."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        groups = split_like_sgd(_as_groups(params), lr=lr, weight_decay=weight_decay)
        super().__init__(groups, lr, momentum, dampening, weight_decay, nesterov)


def _as_groups(params: Any) -> list[dict[str, Any]]:
    items = list(params)
    return items if items and isinstance(items[0], dict) else [{"params": items}]
