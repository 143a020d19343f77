"""`StepSpec`: one record per optimizer step, from which providers, comparisons and timings are
made.

The signature of an operation's reference names its tensors and options; nothing repeats it. What
the record adds is the order in which compiled code takes the options as plain numbers, and the
values with which providers are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ds_kernel_kit import references

GRADS = 1
"""The place of the gradients among the lists of tensors: the only list that a step does not write.
"""

Tensors = Sequence[Tensor]
Lists = list[list[Tensor]]
Reference = Callable[[Lists, "list[Tensor] | None"], "list[float] | None"]
"""A reference with its options bound: lists and copies -> what it returns."""
Options = Mapping[str, Any]


class Run(Protocol):
    """Carries out one step; returns one value per tensor, in order, if the step has such values,
    else nothing.
    """

    def __call__(
        self,
        name: str,
        reference: Reference,
        numbers: tuple[float, ...],
        lists: Sequence[Tensors],
        copies: Tensors | None,
    ) -> list[float]:
        """lists: parameters, gradients and states. numbers: `scale`, then those of the record, for
        compiled `name`.
        """


@dataclass(frozen=True)
class StepSpec:
    """An optimizer step ``op(params, grads, *states, **options, scale=1.0, copies=None)``."""

    # A function of `ds_kernel_kit.references`: its positional arguments are lists of tensors, its
    # keyword arguments the options; it returns None or a value per tensor.
    reference: Callable[..., Any]
    # What compiled code is given after `scale`, in order: names of options, or functions of all
    # options.
    numbers: tuple[str | Callable[[Options], float], ...]
    # Options of the calls that a comparison makes one after another on the same tensors.
    trials: tuple[Options, ...]
    # The state that has sums of squares, which are never negative.
    squares: str | None = None
    # The names of the lists of tensors, from the signature.
    tensors: tuple[str, ...] = field(init=False)
    # The options and their defaults, likewise.
    defaults: Options = field(init=False)

    def __post_init__(self) -> None:
        signature = inspect.signature(self.reference).parameters.values()
        tensors = tuple(p.name for p in signature if p.kind is not p.KEYWORD_ONLY)
        object.__setattr__(self, "tensors", tensors)
        options = {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY}
        # Every step has these two; they are no options of its mathematics.
        del options["scale"], options["copies"]
        object.__setattr__(self, "defaults", options)

    @property
    def op(self) -> str:
        """The name of the operation."""
        return self.reference.__name__

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the lists of states."""
        return self.tensors[GRADS + 1 :]

    def compiled(self, run: Run) -> Callable[..., Any]:
        """The operation with the reference's signature, carried out by `run`."""
        op = self.op
        defaults = self.defaults
        numbers = self.numbers
        width = len(self.tensors)
        signature = inspect.signature(self.reference)
        has_values = signature.return_annotation not in (None, "None")

        def step(
            *lists: Any, scale: float = 1.0, copies: Tensors | None = None, **given: Any
        ) -> list[float] | None:
            options = {**defaults, **given}
            # Looked at cheaply in each step; the names are only worked out for the error.
            if (
                len(options) != len(defaults)
                or inspect.Parameter.empty in options.values()
                or len(lists) != width
            ):
                signature.bind(*lists, **given)  # raises TypeError with the names
            plain = (scale, *[options[n] if type(n) is str else n(options) for n in numbers])  # type: ignore[operator]

            def reference(lists: Lists, copies: list[Tensor] | None) -> Any:
                # The reference's own signature has a place for lists that are not there (momenta of
                # SGD).
                absent = [None] * (width - len(lists))
                return self.reference(*lists, *absent, **options, scale=scale, copies=copies)

            values = run(op, reference, plain, [ts for ts in lists if ts is not None], copies)
            return values if has_values else None

        step.__name__ = op
        step.__doc__ = f"See `ds_kernel_kit.references.{op}`."
        step.__signature__ = signature  # type: ignore[attr-defined]
        return step


def _correction(beta: str) -> Callable[[Options], float]:
    return lambda o: 1 - o[beta] ** o["step"] if o["bias_correction"] else 1.0


def _lamb_size(o: Options) -> float:
    if not o["bias_correction"]:
        return float(o["lr"])
    size: float = o["lr"] * (1 - o["beta2"] ** o["step"]) ** 0.5 / (1 - o["beta1"] ** o["step"])
    return size


_MOMENTS = {"lr": 0.1, "beta1": 0.875, "beta2": 0.96875, "weight_decay": 0.125}
_ADAM = {**_MOMENTS, "eps": 1e-3}
_LAMB = {
    **_ADAM,
    "min_coeff": 0.01,
    "max_coeff": 10.0,
    "bias_correction": True,
    "eps_inside_sqrt": False,
}
_SGD = {
    "lr": 0.1,
    "momentum": 0.875,
    "dampening": 0.0,
    "weight_decay": 0.125,
    "nesterov": False,
    "first": False,
}
_ADAGRAD = {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.0}

_ALL = (
    StepSpec(
        references.adam,
        (
            "lr",
            "beta1",
            "beta2",
            "eps",
            "weight_decay",
            "decoupled",
            _correction("beta1"),
            _correction("beta2"),
        ),
        (
            {**_ADAM, "step": 1},
            {**_ADAM, "step": 7, "scale": 0.375, "decoupled": False},
            {**_ADAM, "step": 3, "bias_correction": False, "weight_decay": 0.0},
            {**_ADAM, "step": 900, "lr": 0.0},
        ),
        squares="exp_avg_sqs",
    ),
    StepSpec(
        references.adagrad,
        ("lr", "eps", "weight_decay"),
        (_ADAGRAD, {**_ADAGRAD, "weight_decay": 0.125, "scale": 0.375}),
        squares="sums",
    ),
    StepSpec(
        references.lion,
        ("lr", "beta1", "beta2", "weight_decay"),
        (_MOMENTS, {**_MOMENTS, "scale": 0.5}, {**_MOMENTS, "weight_decay": 0.0, "lr": 0.5}),
    ),
    StepSpec(
        references.sgd,
        ("lr", "momentum", lambda o: 1 - o["dampening"], "weight_decay", "nesterov", "first"),
        (
            {**_SGD, "first": True},
            {**_SGD, "dampening": 0.25},
            {**_SGD, "nesterov": True, "scale": 0.375, "weight_decay": 0.0},
        ),
    ),
    StepSpec(
        references.lamb,
        (
            _lamb_size,
            "beta1",
            "beta2",
            "eps",
            "eps_inside_sqrt",
            "weight_decay",
            "min_coeff",
            "max_coeff",
        ),
        (
            {**_LAMB, "step": 1},
            {**_LAMB, "step": 5, "eps_inside_sqrt": True, "scale": 0.375, "max_coeff": 0.5},
            {**_LAMB, "step": 5, "bias_correction": False, "weight_decay": 0.0},
        ),
        squares="exp_avg_sqs",
    ),
)
STEPS: Mapping[str, StepSpec] = {spec.op: spec for spec in _ALL}
"""Operation -> its record."""
