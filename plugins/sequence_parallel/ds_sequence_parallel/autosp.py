"""AutoSP: the compile pass that divides sequences over ranks in the captured graph of a model.

The model's code does not know of it.

`prepare_autosp_inputs` marks the inputs of each forward; ``"compile": {"deepcompile": true,
"passes": ["autosp"]}`` and ``engine.compile()`` do the rest, see
`ds_sequence_parallel.autosp_graph`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.process import STATE
from ds_sequence_parallel.autosp_graph import MARK, divide_graph

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from ds_core.context import Context

log = logging.getLogger("ds_sequence_parallel")


def prepare_autosp_inputs(
    input_id: Tensor,
    label_id: Tensor,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> Tensor:
    """Mark the full inputs of the coming forward for AutoSP; returns `input_id`.

    Called before each forward. Every rank along ``sp`` has the same inputs.

    seq_dim: the dimension of the sequence, which becomes dynamic in all of them.

    Raises ValueError for an input that is missing or does not fit.
    """
    given = {
        "input_id": input_id,
        "label_id": label_id,
        "position_id": position_id,
        "attention_mask": attention_mask,
    }
    for name in ("input_id", "label_id"):
        if not isinstance(given[name], Tensor):
            raise ValueError(
                f"prepare_autosp_inputs: {name} is missing; it is a tensor, not {given[name]!r}"
            )
    if not 0 <= seq_dim < input_id.dim():
        raise ValueError(
            f"prepare_autosp_inputs: seq_dim {seq_dim} is no dimension of input_id of "
            f"{input_id.dim()}"
        )
    length = input_id.shape[seq_dim]
    sizes = {e.ctx.mesh.size("sp") for e in STATE.engines if e.ctx.mesh.has("sp")}
    for ranks in sizes:
        if length % ranks:
            raise ValueError(
                f"prepare_autosp_inputs: input_id has {length} positions, which do not divide over "
                f"the {ranks} ranks of sp; pad it to a multiple of {ranks}"
            )
    for name, tensor in given.items():
        if tensor is None:
            continue
        # A mask of more than two dimensions has the sequence in its last two, queries and keys.
        along = (
            [seq_dim]
            if tensor.dim() <= 2 or name == "input_id"
            else [tensor.dim() - 2, tensor.dim() - 1]
        )
        along = [dim for dim in along if dim < tensor.dim() and tensor.shape[dim] == length]
        if not along:
            raise ValueError(
                f"prepare_autosp_inputs: {name} of shape {tuple(tensor.shape)} has not the "
                f"{length} positions of input_id in dimension {seq_dim}"
            )
        for dim in along:
            # The length must be a symbol of the graph: by it the pass finds what has the sequence.
            torch._dynamo.mark_dynamic(tensor, dim)
    vars(input_id)["tag"] = (MARK, seq_dim)
    return input_id


def make_pass(ctx: Context) -> Any:
    """The pass ``autosp``; None where sequences are not divided."""
    # Without a section that asks for it there is no axis.
    if not ctx.mesh.has("sp"):
        if ctx.rank == 0:
            log.warning(
                "compile.passes: autosp has no effect without sequence_parallel_size, which is 1 "
                "if not given"
            )
        return None
    if ctx.mesh.size("sp") == 1:
        return None

    @functools.wraps(divide_graph)
    def autosp(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        return divide_graph(graph, ctx.mesh.group("sp"))

    vars(autosp)["whole"] = True
    return autosp
