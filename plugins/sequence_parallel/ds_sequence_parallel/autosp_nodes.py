"""Reading nodes of a captured graph: values, sizes, arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def value_of(node: Any) -> Any:
    """The example value of a node, or the argument itself."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def first_tensor(value: Any) -> Tensor | Any:
    """The first tensor of a tuple or list; any other value itself."""
    return (
        next((v for v in value if isinstance(v, Tensor)), None)
        if isinstance(value, (tuple, list))
        else value
    )


def expression(size: Any) -> Any:
    """A size as a formula of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def operation_name(node: Node) -> str:
    """The name of the function or method that a node calls."""
    return (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )


def argument(node: Node, index: int, *names: str) -> Any:
    """An argument by its place or one of its names; None where it is not given."""
    found: Iterator[Any] = (node.kwargs[name] for name in names if name in node.kwargs)
    return next(found, node.args[index] if len(node.args) > index else None)


def where(node: Node) -> str:
    """A node and the line of the model that it is from, for messages."""
    stack = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    return f"{node.name} ({' '.join(stack[-2:])})" if stack else node.name
