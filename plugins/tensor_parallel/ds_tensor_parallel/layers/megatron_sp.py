"""Sequence parallelism between divided layers: each rank has a part of the tokens there.

As Megatron-LM has it (Korthikanti et al. 2022, section 4.2.2).

[Note: how the data flows] Between an attention and an MLP all ranks of a tensor-parallel group
would do the same: norms, dropouts and residuals of all tokens. Here the tokens are divided in front
of the first block and gathered behind the last. A *region* is a child of a block that has divided
layers, or may mix tokens. In front of it the tokens are gathered, so that an attention sees the
whole sequence; its row-parallel layer leaves each rank the sums of its own tokens (a reduce-scatter
instead of an all-reduce). As many bytes are sent as before, and what is kept for the backward
between regions is a part.

[Note: gradients] Where all that uses a region's input is column-parallel, the gradient of the
gathered input is a part of a sum on each rank, and comes back by a reduce-scatter. In other regions
(routers of experts, latent projections) it is whole on every rank, and each takes its part.
Parameters between regions see a part of the tokens, so their gradients are summed over the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ds_comm_autograd import gather, gather_to, split
from torch import Tensor, nn

from ds_core.errors import ConfigError, Problem
from ds_tensor_parallel.layers.linear import Column, Place, Row, parts
from ds_tensor_parallel.layers.modules import sum_gradient
from ds_tensor_parallel.layers.random_regions import draw_by_tokens

DIM = 1
"""The sequence's dimension of hidden states, [batch, sequence, hidden]."""


class _Tokens:
    """The tokens of one stack of blocks, while it runs."""

    def __init__(self, place: Place) -> None:
        self.place = place
        # The length of the full sequence; set by `begin`, for the gathers of this forward.
        self.length = 0

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """In front of the first block."""
        hidden, put = _hidden(module, args, kwargs)
        self.length = hidden.shape[DIM]
        return put(split(hidden, self.place.group, DIM, parts(self.length, self.place.size)))

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind the last block."""
        return _replace_hidden(
            output, lambda x: gather(x, self.place.group, DIM, parts(self.length, self.place.size))
        )

    def gather_sums(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """In front of a region whose layers are all divided."""
        hidden, put = _hidden(module, args, kwargs)
        return put(gather_to(hidden, self.place.group, DIM, parts(self.length, self.place.size)))

    def gather_alike(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """In front of a region in which all ranks also do the same."""
        hidden, put = _hidden(module, args, kwargs)
        return put(gather(hidden, self.place.group, DIM, parts(self.length, self.place.size)))

    def keep_own(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind a region that gives every rank all tokens."""
        return _replace_hidden(
            output, lambda x: split(x, self.place.group, DIM, parts(self.length, self.place.size))
        )


def divide_sequences(model: nn.Module, place: Place, origin: str) -> int:
    """Divide the tokens between regions of `model`, whose layers are divided already; gives the
    number of regions.

    Raises ConfigError for a model in which regions do not begin with columns and end with rows.
    """
    count = 0
    for blocks in _stacks(model).values():
        tokens = _Tokens(place)
        for name, block in blocks.items():
            count += _divide_block(name, block, tokens, origin)
        # Prepended: the tokens are divided before any other hook of the first block sees them.
        first = next(iter(blocks.values()))
        last = list(blocks.values())[-1]
        first.register_forward_pre_hook(tokens.begin, with_kwargs=True, prepend=True)
        last.register_forward_hook(tokens.end)
    if not count:
        raise ConfigError(
            [
                Problem(
                    "tensor_parallel.sequence_parallel",
                    f"{type(model).__name__} has no list of blocks with divided layers, to divide "
                    "tokens between",
                    "keep its blocks in an nn.ModuleList, or leave sequence_parallel out",
                )
            ],
            origin,
        )
    return count


def _stacks(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """By the name of a list: its modules that have divided layers.

    Lists inside of such modules are no stacks.
    """
    modules = dict(model.named_modules())
    found: dict[str, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in modules.items():
        if not isinstance(module, (Column, Row)) or (
            isinstance(module, Column) and module.gather_output
        ):
            continue
        path = name.split(".")
        for depth in range(1, len(path)):
            around = ".".join(path[:depth])
            block = ".".join(path[: depth + 1])
            # The outermost list on the way to a divided layer: its items are the blocks.
            if isinstance(modules[around], (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                found[around].setdefault(block, modules[block])
                break
    return found


def _divide_block(name: str, block: nn.Module, tokens: _Tokens, origin: str) -> int:
    """Make each child with divided layers a region; parameters of the others see a part of the
    tokens.
    """
    ends: dict[nn.Module, nn.Module] = {}
    alone = [*block.parameters(recurse=False)]
    for key, child in block.named_children():
        columns = [m for m in child.modules() if isinstance(m, Column)]
        rows = [m for m in child.modules() if isinstance(m, Row)]
        # Norms, dropouts: they run on this rank's tokens, so the gradients of their weights are
        # sums over a part.
        if not columns and not rows and _by_token(child):
            alone += child.parameters()
            continue
        # With columns alone the outputs would stay divided by width, with rows alone the inputs
        # would be: no point at which to gather tokens.
        if bool(columns) != bool(rows):
            has = f"{len(columns)} column- and {len(rows)} row-parallel layers"
            why = (
                f"{name}.{key} has {has}; the tokens can be divided only around modules that "
                "have both"
            )
            raise ConfigError(
                [Problem("tensor_parallel.sequence_parallel", why, "leave it out for this model")],
                origin,
            )
        ends[child] = _make_region(child, columns, tokens)
        # The bias behind the reduce-scatter is added to this rank's tokens only.
        if isinstance(end := ends[child], Row) and isinstance(end.bias, nn.Parameter):
            alone.append(end.bias)
    draw_by_tokens(block, ends)
    # Each once: a shared parameter must not be summed twice.
    for param in {id(p): p for p in alone}.values():
        sum_gradient(param, tokens.place)
    return len(ends)


def _by_token(module: nn.Module) -> bool:
    """Whether it works on each token by itself, for all that is known."""
    if any(True for _ in module.children()):
        return False
    simple = isinstance(module, (nn.Linear, nn.Dropout, nn.Identity, nn.LayerNorm))
    return (
        simple
        or "norm" in type(module).__name__.lower()
        or not any(True for _ in module.parameters())
    )


def _make_region(region: nn.Module, columns: Iterable[Column], tokens: _Tokens) -> nn.Module:
    """Gather tokens in front of it, divide them behind it; gives the module that does: a
    row-parallel layer, or it.
    """
    direct = list(region.children())
    ends = [child for child in direct if isinstance(child, Row)]
    # No single row-parallel layer at the end: the region computes all tokens on every rank, and
    # each keeps its own.
    if len(ends) != 1:
        region.register_forward_pre_hook(tokens.gather_alike, with_kwargs=True)
        region.register_forward_hook(tokens.keep_own)
        return region
    # See [Note: gradients]: is everything in front column-parallel?
    others = (
        c for c in direct if not isinstance(c, (Column, Row)) and any(True for _ in c.parameters())
    )
    if any(True for _ in others) or any(True for _ in region.parameters(recurse=False)):
        region.register_forward_pre_hook(tokens.gather_alike, with_kwargs=True)
    else:
        region.register_forward_pre_hook(tokens.gather_sums, with_kwargs=True)
        for column in columns:
            column.copies = False
    ends[0].sequence_dim = DIM
    return ends[0]


def _hidden(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The hidden states that a module is called with, and a function that puts others in their
    place.
    """
    if args and isinstance(args[0], Tensor):
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    key = (
        "hidden_states"
        if "hidden_states" in kwargs
        else next((k for k, v in kwargs.items() if _is_hidden(v)), None)
    )
    if key is None:
        raise TypeError(
            f"{type(module).__name__} was called without hidden states, so that tokens cannot be "
            "divided"
        )
    return kwargs[key], lambda x: (args, {**kwargs, key: x})


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def _replace_hidden(output: Any, change: Any) -> Any:
    """A module's output with other hidden states, which come first."""
    if isinstance(output, Tensor):
        return change(output)
    return (change(output[0]), *output[1:])
