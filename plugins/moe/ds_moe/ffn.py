"""Feed-forward experts that are computed from their weights, without calling the module.

Most experts are ``down(act(up(x)))`` or ``down(act(gate(x)) * up(x))`` with linear layers. `match`
finds out from the module itself, by tracing it; all else runs in another way (see
`ds_moe.experts`).

Dimensions: ``rows`` sorted by expert, ``hidden``, ``out``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ds_moe.kernels.grouped import Groups, grouped_linear

if TYPE_CHECKING:
    from jaxtyping import Float


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}


_FUNCTIONS = ((F.relu, "relu"), (torch.relu, "relu"), (F.silu, "silu"))


@dataclass(frozen=True, slots=True)
class FFN:
    """Names, within the expert, of its linear layers, and its activation."""

    up: str
    down: str
    act: str
    """A key of `ACTIVATIONS`."""
    gate: str | None = None
    """None where there is none."""


def ffn(
    x: Float[Tensor, "rows hidden"],
    what: FFN,
    weights: Mapping[str, Tensor | None],
    groups: Groups,
) -> Float[Tensor, "rows out"]:
    """The experts' output for rows that are sorted by expert.

    weights: "<linear>.weight" [experts, out, in] and "<linear>.bias" [experts, out] or None.
    """

    def linear(name: str, rows: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        assert weight is not None
        return grouped_linear(rows, weight, weights[f"{name}.bias"], groups)

    act = ACTIVATIONS[what.act]
    if what.gate is None:
        return linear(what.down, act(linear(what.up, x)))
    return linear(what.down, act(linear(what.gate, x)) * linear(what.up, x))


def match(expert: nn.Module) -> FFN | None:
    """What `expert` computes, if it is a feed-forward network that `ffn` knows."""
    try:
        graph = fx.symbolic_trace(expert)
    except Exception:  # a module that cannot be traced is simply not known
        return None
    nodes = [n for n in graph.graph.nodes if not _nothing(n, graph)]
    order = [n.op for n in nodes]
    # One input, and straight to the output: anything else is not a feed-forward network.
    if order.count("placeholder") != 1 or order[-1] != "output":
        return None
    try:
        found = _read(nodes[-1].args[0], graph)
    except _OtherError:
        return None
    # Three different layers (two without gate) own every parameter: none is used twice, none is
    # left over.
    linears = {found.up, found.down, found.gate} - {None}
    owned = {f"{name}.{p}" for name in linears for p in ("weight", "bias")}
    if len(linears) != (2 if found.gate is None else 3) or any(
        n not in owned for n, _ in expert.named_parameters()
    ):
        return None
    return found if not list(expert.named_buffers()) else None


class _OtherError(Exception):
    """The module is something else."""


def _read(node: Any, graph: fx.GraphModule) -> FFN:
    # Backwards from the output: down(act(up(x))), or down of a product with exactly one activation.
    down, inner = _linear(node, graph)
    factors = [inner]
    if inner.op == "call_function" and inner.target in (operator.mul, torch.mul):
        factors = list(inner.args)
    acts = [(_activation(f, graph), f) for f in factors]
    known = [(name, f) for name, f in acts if name is not None]
    if len(known) != 1:
        raise _OtherError
    act, active = known[0]
    first, source = _linear(active.args[0], graph)
    gate = None
    # In a product the activated factor is the gate; both factors must come from one input.
    if len(factors) == 2:
        gate = first
        first, other = _linear(next(f for f in factors if f is not active), graph)
        if other is not source:
            raise _OtherError
    if not isinstance(source, fx.Node) or source.op != "placeholder":
        raise _OtherError
    return FFN(first, down, act, gate)


def _linear(node: Any, graph: fx.GraphModule) -> tuple[str, Any]:
    """The name and the input of a linear layer that is called once."""
    node = _skip(node, graph)
    if (
        not isinstance(node, fx.Node)
        or node.op != "call_module"
        or len(node.args) != 1
        or node.kwargs
    ):
        raise _OtherError
    if type(graph.get_submodule(str(node.target))) is not nn.Linear:
        raise _OtherError
    return str(node.target), _skip(node.args[0], graph)


def _activation(node: Any, graph: fx.GraphModule) -> str | None:
    """The name of an activation, of one argument."""
    if not isinstance(node, fx.Node) or len(node.args) != 1:
        return None
    if node.op == "call_module" and not node.kwargs:
        module = graph.get_submodule(str(node.target))
        if type(module) is nn.GELU:
            return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(module))
    if node.op == "call_function" and node.target is F.gelu:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(
            str(node.kwargs.get("approximate", "none"))
        )
    if node.op == "call_function" and set(node.kwargs) <= {"inplace"}:
        return next((name for f, name in _FUNCTIONS if f is node.target), None)
    return "relu" if node.op == "call_method" and node.target == "relu" else None


def _skip(node: Any, graph: fx.GraphModule) -> Any:
    """What `node` is but for modules that do nothing."""
    while isinstance(node, fx.Node) and _nothing(node, graph):
        node = node.args[0]
    return node


def _nothing(node: fx.Node, graph: fx.GraphModule) -> bool:
    if node.op != "call_module" or len(node.args) != 1:
        return False
    module = graph.get_submodule(str(node.target))
    return type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)
