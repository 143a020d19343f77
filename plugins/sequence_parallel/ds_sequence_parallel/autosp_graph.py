"""The graph of a model for full sequences, changed into one for a rank's part of them.

[Note: whole and divided] Every value of the graph is either whole, and equal on all ranks of the
group, or divided: of a dimension of s positions (the length of the marked input, a symbol) the rank
has a stretch of s / ranks. The marked input is divided at once. What is calculated from divided
values is divided; masks, position ids and labels stay whole, and where a whole value meets a
divided one, its stretch is taken. So positions and shifted labels are those of the whole sequence.
`scaled_dot_product_attention` gets the whole sequence and some of the heads, by exchanges around
it.

[Note: gradients] Parameters' gradients are averaged over all dp ranks, those of a sequence among
them. So what a rank has as the gradient of a whole value may be any part of it, if only the mean
over ranks is the gradient; and that of a divided value is the gradient of its positions times the
number of ranks. From that follows the backward of a stretch (zeros elsewhere), of a gather (the sum
of the ranks' gradients, scattered), and of a mean over ranks (their mean).

[Note: other operations] Operations that are listed here treat each position by itself. Others (a
pooling, a convolution) get their inputs gathered, and give whole values: right, but without the
saving.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, cast

import torch
from ds_comm_autograd import copy_to, gather_to, reduce_from
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional

from ds_core import comm
from ds_core.process import log_once
from ds_sequence_parallel.attention.ulysses import Heads, ulysses
from ds_sequence_parallel.autosp_nodes import (
    argument,
    expression,
    first_tensor,
    operation_name,
    value_of,
    where,
)

log = logging.getLogger("ds_core")

MARK = "autosp"
"""The marked input has an attribute ``tag``, which torch.compile keeps in the graph: (this, the
dimension of the sequence).
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BY_ELEMENT = _names(
    """add sub mul truediv div floordiv mod neg pow abs exp log sqrt rsqrt reciprocal sin cos tanh sigmoid erf clamp
    clip silu gelu relu leaky_relu elu softplus mish hardswish relu6 square maximum minimum where masked_fill eq ne lt
    le gt ge and_ or_ xor invert not_ logical_not logical_and logical_or bitwise_and bitwise_or float half bfloat16
    double long int bool to type type_as contiguous clone detach requires_grad_ dropout alpha_dropout
    feature_alpha_dropout zeros_like ones_like full_like empty_like rand_like randn_like iadd isub imul itruediv add_
    sub_ mul_ div_ masked_fill_ lerp addcmul nan_to_num isnan isinf rsub all_reduce"""
)
_MOVES = _names(
    """view reshape flatten unflatten expand expand_as transpose permute swapaxes movedim moveaxis unsqueeze squeeze
    getitem chunk split unbind cat concat stack repeat repeat_interleave view_as reshape_as narrow select"""
)
_BY_ROW = _names("linear layer_norm rms_norm embedding matmul bmm addmm")
_ALONG_DIM = _names(
    "softmax log_softmax mean sum amax amin argmax cumsum norm var std normalize logsumexp"
)
_LOSSES = frozenset(
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"]
)
_RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"))


def divide_graph(graph: GraphModule, group: ProcessGroup) -> GraphModule:
    """Change `graph`, of which one input is marked, for the ranks of `group`.

    Raises RuntimeError where no input is marked, or there is no attention.
    """
    marked = [(node, dim) for node in graph.graph.nodes if (dim := _mark(node)) is not None]
    if not marked:
        raise RuntimeError(
            "autosp: no input of the graph is marked; call "
            "ds_sequence_parallel.prepare_autosp_inputs before the forward, and give the model the "
            "tensor that it returns"
        )
    division = _Division(graph, group, *marked[0])
    division.run()
    if not division.attentions:
        if any("checkpoint" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError(
                "autosp: attention is in blocks that are computed again in backward, where the "
                "pass does not look; leave out activation_checkpointing, and set "
                "torch._functorch.config.activation_memory_budget below 1"
            )
        raise RuntimeError(
            "autosp: the graph has no torch.nn.functional.scaled_dot_product_attention of the "
            "marked input, so there "
            'is nothing to divide; with transformers set attn_implementation="sdpa"'
        )
    return graph


def _mark(node: Node) -> int | None:
    tag = (node.meta.get("tensor_dict") or {}).get("tag") if node.op == "placeholder" else None
    return tag[1] if isinstance(tag, tuple) and tag[0] == MARK else None


class _Division:
    """One graph that is being changed; see [Note: whole and divided]."""

    def __init__(self, graph: GraphModule, group: ProcessGroup, marked: Node, dim: int) -> None:
        self.graph = graph.graph
        self.group = group.group_name
        self.marked = marked
        self.rank = comm.rank(group)
        self.ranks = comm.world_size(group)
        # The length of the full sequence, a symbol: sizes of the graph are formulas in it.
        self.symbol = expression(value_of(marked).shape[dim])
        if not getattr(self.symbol, "free_symbols", None):
            raise RuntimeError(
                f"autosp: the length of the sequence is the constant {self.symbol} in the graph; "
                "the model, or compile_kwargs (dynamic=False), fixes it"
            )
        self.dim_of_marked = dim
        # The divided dimension of each divided value; of a tuple, of its first tensor.
        self.divided: dict[Node, int] = {}
        # The part of a whole value, or the local length, by which it is replaced among divided ones.
        self.twins: dict[Node, Node] = {}
        # Attentions that were changed; none is an error.
        self.attentions = 0

    def run(self) -> None:
        """Go through the graph in order.

        Values that were calculated while it was captured are of wholes.
        """
        for node in list(self.graph.nodes):
            # 1. The marked input is cut behind the last input: nodes in between would be no
            # placeholders.
            if node is self.marked:
                with self.graph.inserting_after(self._last_input()):
                    part = self._part_of(node, self.dim_of_marked)
                self._use_instead(node, part)
                self.divided[part] = self.dim_of_marked
            # 2. In the order of the graph, so that it is known of all inputs of a node whether they
            # are divided. A node without divided inputs stays as it is.
            elif node.op in ("call_function", "call_method") and node not in self.divided:
                if any(n in self.divided for n in node.all_input_nodes):
                    self._divide(node)
        # 3. Example values are of full sequences: the following nodes must compute them again.
        for node in self.graph.nodes:
            if node.op != "placeholder":
                node.meta.pop("example_value", None)

    def _last_input(self) -> Node:
        inputs: list[Node] = [node for node in self.graph.nodes if node.op == "placeholder"]
        return inputs[-1]

    # -- one operation -----------------------------------------------------------------------------

    def _divide(self, node: Node) -> None:
        name = operation_name(node)
        with self.graph.inserting_before(node):
            # From the special cases to the general one; the last gathers, which is right for any
            # operation.
            if name in ("size", "sym_size", "getattr"):
                self._whole_sizes(node)
            elif name == "scaled_dot_product_attention":
                self._attention(node)
            elif name == "cross_entropy" or name in _LOSSES:
                self._loss(node, name)
            elif (dim := self._find_divided_dim(node, name)) is not None:
                self._localize(node)
                self.divided[node] = dim
            elif not self._try_average(node, name):
                self._gather_inputs(node, name)

    def _find_divided_dim(self, node: Node, name: str) -> int | None:
        """The divided dimension of what `node` gives when it works on divided values; None: it
        mixes positions.
        """
        given = {n: self.divided[n] for n in node.all_input_nodes if n in self.divided}
        first: Any = node.args[0] if node.args else None
        out = first_tensor(value_of(node))
        if out is None or name not in _BY_ELEMENT | _MOVES | _BY_ROW | _ALONG_DIM:
            return None
        # By shape: exactly one dimension of the result has the sequence in its size.
        found = [d for d, size in enumerate(out.shape) if self._count(size)]
        if len(found) != 1:
            return None
        counts = {self._count(first_tensor(value_of(n)).shape[d]) for n, d in given.items()}
        if name not in _RESHAPES and counts != {self._count(out.shape[found[0]])}:
            # For example a concatenation along the sequence: its parts would be interleaved by
            # rank.
            return None
        if name in _BY_ROW and not self._by_row(node, name, given):
            return None
        if name in _ALONG_DIM:
            value = first_tensor(value_of(first))
            wanted = argument(node, 1 if name not in ("norm", "normalize") else 2, "dim", "axis")
            dims = [wanted] if isinstance(wanted, int) else list(wanted or range(value.dim()))
            # A reduction or softmax over the sequence itself mixes positions.
            if given.get(first) in [d % value.dim() for d in dims]:
                return None
        return found[0]

    def _by_row(self, node: Node, name: str, given: dict[Node, int]) -> bool:
        """Whether only the rows of an operation on rows are divided."""
        rows: Any = node.args[1] if name == "addmm" else node.args[0]
        # A weight that depends on the sequence is another operation: attention written by hand.
        if set(given) != {rows}:
            return False
        value = first_tensor(value_of(rows))
        dim = given[rows]
        if name == "embedding":
            return True
        if name in ("layer_norm", "rms_norm"):
            shape = argument(node, 1, "normalized_shape")
            return bool(dim < value.dim() - len(shape))
        return bool(dim < value.dim() - 1)

    def _localize(self, node: Node) -> None:
        """Give `node` this rank's stretch of whole values, and the lengths of stretches."""

        def local(arg: Node) -> Node:
            return arg if arg in self.divided else self._local(arg)

        node.args, node.kwargs = map_arg(node.args, local), map_arg(node.kwargs, local)

    def _local(self, arg: Node) -> Node:
        """What stands for the whole value or number `arg` among divided ones."""
        value = value_of(arg)
        if isinstance(value, Tensor):
            dims = [d for d, size in enumerate(value.shape) if self._count(size)]
            if not dims:
                return arg
            # Two dimensions of the sequence are scores or a mask, which only attention reads.
            if len(dims) > 1:
                raise RuntimeError(
                    f"autosp: {where(arg)} has the sequence in dimensions {dims}, outside of "
                    "attention"
                )
            if arg not in self.twins:
                pure = self._count(value.shape[dims[0]]) == 1
                with self.graph.inserting_after(arg):
                    self.twins[arg] = self._part_of(arg, dims[0]) if pure else arg
                # Several dimensions have become one, of which no stretch can be cut: the node is
                # repeated with local inputs instead.
                if not pure:
                    self.twins[arg] = self._copy(arg)
            return self.twins[arg]
        if isinstance(value, torch.SymInt) and self.symbol in expression(value).free_symbols:
            if arg not in self.twins:
                # A length that is an input of the graph is divided; one that is computed is
                # computed again from local lengths.
                if arg.op == "placeholder":
                    with self.graph.inserting_after(self._last_input()):
                        self.twins[arg] = self.graph.call_function(
                            operator.floordiv, (arg, self.ranks)
                        )
                else:
                    self.twins[arg] = self._copy(arg)
            return self.twins[arg]
        return arg

    def _copy(self, node: Node) -> Node:
        with self.graph.inserting_after(node):
            twin = self.graph.node_copy(node)
        with self.graph.inserting_before(twin):
            self._localize(twin)
        return twin

    def _part_of(self, node: Node, dim: int) -> Node:
        """The stretch of a whole tensor."""
        part = self.graph.call_function(_part, (node, dim, self.rank, self.ranks))
        part.meta["example_value"] = value_of(node)
        return part

    def _use_instead(self, node: Node, new: Node) -> None:
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def _whole_sizes(self, node: Node) -> None:
        """Nodes that compute whole values from the size of a divided tensor get the full size."""
        value = value_of(node)
        if not isinstance(value, torch.SymInt) or not self._count(value):
            return
        with self.graph.inserting_after(node):
            whole = self.graph.call_function(operator.mul, (node, self.ranks))
        whole.meta["example_value"] = value
        self._use_instead(node, whole)
        # Divided values that use this size get the local one back, see `_local`.
        self.twins[whole] = node

    # -- operations that mix positions -------------------------------------------------------------

    def _attention(self, node: Node) -> None:
        names = (
            "query",
            "key",
            "value",
            "attn_mask",
            "dropout_p",
            "is_causal",
            "scale",
            "enable_gqa",
        )
        options: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        query, key, value = (options.pop(name) for name in names[:3])
        # Ulysses needs all three divided along the sequence; anything else (cross attention) is
        # gathered.
        if any(self.divided.get(n) != value_of(n).dim() - 2 for n in (query, key, value)):
            self._gather_inputs(node, "scaled_dot_product_attention")
            return
        mask = options.get("attn_mask")
        # Attention sees the full sequence, and so does its mask.
        if mask in self.divided:
            options["attn_mask"] = self._gather(mask)
        node.args = (query, key, value, self.group, options)
        node.kwargs = {}
        node.op = "call_function"
        node.target = attention
        self.divided[node] = value_of(node).dim() - 2
        self.attentions += 1

    def _loss(self, node: Node, name: str) -> None:
        reduction = argument(node, 99, "reduction") or "mean"
        scores: Any = node.args[0] if node.args else node.kwargs["input"]
        # torch's cross entropy has classes in dimension 1; the elementwise losses have none.
        classes = 1 if name == "cross_entropy" and value_of(scores).dim() > 1 else -1
        if self.divided.get(scores, classes) == classes:
            self._gather_inputs(node, name)
            return
        self._localize(node)
        # Not reduced: divided like the scores. Reduced: over the tokens of all ranks.
        if reduction == "none":
            out = value_of(node)
            self.divided[node] = next(d for d, size in enumerate(out.shape) if self._count(size))
        elif name == "cross_entropy":
            node.kwargs = {**node.kwargs, "ranks_of": self.group}
            node.op = "call_function"
            node.target = cross_entropy
        else:
            self._mean_of(node, reduction)

    def _try_average(self, node: Node, name: str) -> bool:
        """Whether `node` is a mean or a sum over positions, and has become one over ranks."""
        if name not in ("mean", "sum") or node.all_input_nodes[:1] != [node.args[0]]:
            return False
        # The result still has the sequence: not a reduction over it.
        if any(self._count(size) for size in value_of(node).shape):
            return False
        self._localize(node)
        self._mean_of(node, name)
        return True

    def _mean_of(self, node: Node, reduction: str) -> None:
        with self.graph.inserting_after(node):
            whole = self.graph.call_function(_over_ranks, (node, self.group, reduction == "sum"))
        whole.meta = dict(node.meta)
        self._use_instead(node, whole)

    def _gather_inputs(self, node: Node, name: str) -> None:
        """Give `node` whole values."""
        log_once(
            log,
            logging.WARNING,
            f"autosp: {name} is not known to treat each position by itself, so its inputs are "
            f"gathered; {where(node)}",
        )
        divided = [n for n in node.all_input_nodes if n in self.divided]
        for one in divided:
            node.replace_input_with(one, self._gather(one))

    def _gather(self, node: Node) -> Node:
        value = value_of(node)
        dim = self.divided[node]
        if not isinstance(value, Tensor) or self._count(value.shape[dim]) != 1:
            raise RuntimeError(
                f"autosp: {where(node)} has the sequence and other dimensions in one, and what "
                "uses it mixes positions"
            )
        whole = self.graph.call_function(_whole, (node, dim, self.group))
        whole.meta["example_value"] = value
        return whole

    def _count(self, size: Any) -> int:
        """How often a dimension of this size has the sequence; 0: it has not."""
        times, rest = divmod(expression(size), self.symbol) if not isinstance(size, int) else (0, 1)
        return 0 if rest != 0 or getattr(times, "has", lambda _: False)(self.symbol) else times


# -- what stands in the graph ----------------------------------------------------------------------


def _part(whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    length = whole.shape[dim] // ranks
    # The graph was captured with a contiguous tensor, and may take views of it.
    return whole.narrow(dim, rank * length, length).contiguous()


def _group(name: str) -> ProcessGroup:
    """A graph has no place for the group itself."""
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return cast(ProcessGroup, resolve(name))


def _whole(part: Tensor, dim: int, name: str) -> Tensor:
    """All positions, for operations that are the same on all ranks; see [Note: gradients]."""
    group = _group(name)
    # Backends do not gather booleans.
    if part.dtype is torch.bool:
        return gather_to(part.to(torch.uint8), group, dim).bool()
    return gather_to(part, group, dim)


def _over_ranks(part: Tensor, name: str, summed: bool) -> Tensor:
    """The mean, or the sum, over all positions, of those over the positions of each rank; see
    [Note: gradients].
    """
    group = _group(name)
    # Forward sums over ranks; backward sums the gradients too, which with the mean over dp ranks is
    # that of the formula.
    return copy_to(reduce_from(part if summed else part / comm.world_size(group), group), group)


def attention(
    query: Tensor, key: Tensor, value: Tensor, name: str, options: dict[str, Any]
) -> Tensor:
    """torch's attention of full sequences; each rank has a stretch of them, and gets some of the
    heads.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, repeated: bool) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, **given)

    group = _group(name)
    given = dict(options)
    mask = given.get("attn_mask")
    heads = query.dim() - 3
    # A mask that differs by head (position biases) is cut to the heads of this rank.
    if isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-3] > 1:
        first, end = Heads.of(query.shape[heads], key.shape[heads], comm.world_size(group)).queries[
            comm.rank(group)
        ]
        given["attn_mask"] = mask.narrow(-3, first, end - first)
    return ulysses(attend, query, key, value, group, heads=heads, sequence=heads + 1)


def cross_entropy(
    input: Tensor, target: Tensor, *args: Any, ranks_of: str, **options: Any
) -> Tensor:
    """torch's cross entropy, of the tokens of all ranks; see [Note: gradients]."""
    group = _group(ranks_of)
    reduction = options.pop("reduction", "mean")
    options |= dict(zip(("weight", "size_average", "ignore_index"), args, strict=False))
    total = functional.cross_entropy(input, target, reduction="sum", **options)
    if reduction == "sum":
        return _over_ranks(total, ranks_of, True)
    # Targets as probabilities have no ignored tokens: torch's mean divides by all of them.
    if target.is_floating_point():
        tokens = target.numel() // target.shape[1 if target.dim() > 1 else 0]
        count = torch.full((), float(tokens), device=target.device)
    else:
        valid = target != options.get("ignore_index", -100)
        weight = options.get("weight")
        count = (valid if weight is None else weight[target.clamp_min(0)] * valid).sum().double()
    return _over_ranks(total / reduce_from(count, group).to(total.dtype), ranks_of, True)
