"""The pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.functional import dropout

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from ds_core.context import Context


def make_pass(ctx: Context) -> Callable[[GraphModule, Sequence[Any]], GraphModule]:
    """Called by ``engine.compile()``; None would say that nothing is to be changed in this run."""
    return without_dropouts


def without_dropouts(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Dropouts of probability 0 give what they are given."""
    for node in list(graph.graph.nodes):
        if node.target is dropout and _probability(node) == 0:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph


def _probability(node: Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
