"""A backward in two halves: gradients of a stage's inputs first, those of its weights later,
without repeated work.

[Note: cuts] The graph's nodes that lead to an input must run first. Where such a node also has an
edge that leads only to weights (a matrix product does), that side waits: the node's incoming
gradient is kept, and the node runs again later, computing the other edge alone. A weight that waits
must be reached through one such node only; those that are used twice, and those below a function
written in Python (which would do everything twice), do not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge


@dataclass
class WeightBackward:
    """The second half of a backward."""

    # Node of the graph -> the weights whose gradients are computed there in the second half.
    cuts: dict[Any, list[Tensor]] = field(default_factory=dict)
    # Node of the graph -> the gradients that reached it in the first half.
    caught: dict[Any, Sequence[Tensor | None]] = field(default_factory=dict)

    def run(self) -> None:
        """Compute the gradients of the weights; they accumulate as in any backward."""
        for node, weights in self.cuts.items():
            edges = [
                (GradientEdge(node, k), g)
                for k, g in enumerate(self.caught.pop(node, ()))
                if g is not None
            ]
            if edges:
                torch.autograd.backward(
                    [e for e, _ in edges], [g for _, g in edges], inputs=weights
                )
        self.cuts.clear()


def backward_inputs(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> WeightBackward:
    """Accumulate the gradients of `inputs` (leaves that require them); returns the second half.

    outputs: tensors with a graph.
    grads: their gradients.

    Gradients of weights that cannot wait accumulate as well.
    """
    now, cuts, alive = _cut([t.grad_fn for t in outputs], inputs)
    if any(
        isinstance(node, BackwardCFunction) and "Checkpoint" in type(node).__name__
        for node in alive
    ):
        # Re-entrant activation checkpointing refuses to be asked for some gradients only: all are
        # computed in this half.
        torch.autograd.backward(outputs, grads)
        return WeightBackward()
    # What comes into a cut node is caught on its way, for the second half.
    later = WeightBackward(cuts)
    handles = [
        node.register_prehook(
            lambda incoming, node=node: later.caught.__setitem__(node, tuple(incoming))
        )
        for node in cuts
    ]
    try:
        torch.autograd.backward(outputs, grads, retain_graph=bool(cuts), inputs=[*inputs, *now])
    finally:
        for handle in handles:
            handle.remove()
    del alive
    return later


def _cut(
    roots: Sequence[Any], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], dict[Any, list[Tensor]], list[Any]]:
    """(weights that cannot wait, node -> weights that wait there, all nodes: their identity holds
    while they live).
    """
    order = _children_first(roots)
    wanted = {id(t) for t in inputs}
    # Whether a node leads to an input.
    leads: dict[Any, bool] = {}
    # The leaves under a node that leads to no input.
    below: dict[Any, dict[Tensor, None]] = {}
    # By node that leads to an input: the leaves beside the way.
    cuts: dict[Any, dict[Tensor, None]] = {}
    # Through how many nodes a weight would be reached in the second half.
    times: dict[Tensor, int] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        leaf = getattr(node, "variable", None) if not children else None
        leads[node] = any(leads[c] for c in children) or (leaf is not None and id(leaf) in wanted)
        aside: dict[Tensor, None] = {leaf: None} if leaf is not None and not leads[node] else {}
        for child in children:
            if not leads[child]:
                aside.update(below[child])
        if not leads[node]:
            below[node] = aside
        elif aside:
            cuts[node] = aside
            # A function written in Python counts twice, since it would do everything twice.
            for weight in aside:
                times[weight] = times.get(weight, 0) + (
                    2 if isinstance(node, BackwardCFunction) else 1
                )
    # Below an output that leads to no input there is no node to wait at.
    for root in dict.fromkeys(roots):
        if not leads[root]:
            times.update(dict.fromkeys(below[root], 2))
    waiting = {n: [w for w in weights if times[w] == 1] for n, weights in cuts.items()}
    return [w for w, n in times.items() if n > 1], {n: w for n, w in waiting.items() if w}, order


def _children_first(roots: Sequence[Any]) -> list[Any]:
    """Every node of the graph once, each after all that its edges lead to."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(r, False) for r in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [
                (child, False)
                for child, _ in node.next_functions
                if child is not None and child not in seen
            ]
    return order
