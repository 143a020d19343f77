"""Attention over sequences that do not fit the device: chunk by chunk, the rest on the host (FPDT).

Fully Pipelined Distributed Transformer (Yao et al. 2024). A rank has a part of each chunk of the
sequence, as `FPDT_InputConstruct` divides them. For each chunk an exchange gives it all tokens of
the chunk and some of the heads. Queries, keys and values are then offloaded; the device has one
chunk of queries and one of keys at a time, forward and backward. The sum over chunks is exact
softmax attention, see `blocks`. The interface is that of DeepSpeed's
``deepspeed.sequence.fpdt_layer``.

Dimensions: ``batch``, ``heads``, ``kv_heads``, ``size`` of a head, ``positions`` of this rank or of
a chunk, ``width`` of hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_comm_autograd import all_to_all, gather
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from ds_core import comm
from ds_core.errors import UsageError
from ds_sequence_parallel.attention import blocks
from ds_sequence_parallel.tiles.tiled import tiled

if TYPE_CHECKING:
    from jaxtyping import Float, Int

HOST = torch.device("cpu")


def chunked_attention(
    queries: Sequence[Float[Tensor, "batch heads _ size"]],
    keys: Sequence[Float[Tensor, "batch kv_heads _ size"]],
    values: Sequence[Float[Tensor, "batch kv_heads _ value_size"]],
    *,
    scale: float | None = None,
    device: torch.device | None = None,
) -> list[Float[Tensor, "batch heads _ value_size"]]:
    """Causal attention of a sequence in chunks, which stay on the devices that they are on.

    device: each chunk is copied there while it is needed; None: that of the queries.

    Returns the chunks of the output, on the devices of the queries.
    """
    scale = queries[0].shape[-1] ** -0.5 if scale is None else scale
    run: Any = _Chunks.apply
    return list(run(len(queries), scale, device or queries[0].device, *queries, *keys, *values))


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, count: int, scale: float, device: torch.device, *chunks: Tensor
    ) -> tuple[Tensor, ...]:
        queries = chunks[:count]
        keys = chunks[count : 2 * count]
        values = chunks[2 * count :]
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for index, offloaded in enumerate(queries):
            query = offloaded.to(device)
            out = _wide_zeros(query, values[0].shape[-1])
            lse = torch.full(query.shape[:3], float("-inf"), dtype=out.dtype, device=device)
            # Causal: later chunks are not seen, and of earlier ones every key is.
            for other in range(index + 1):
                key = keys[other].to(device)
                value = values[other].to(device)
                more, more_lse = blocks.attend(
                    query, key, value, causal=other == index, scale=scale
                )
                blocks.add(out, lse, more, more_lse)
            outs.append(out.to(offloaded.dtype).to(offloaded.device))
            lses.append(lse.to(offloaded.device))
        ctx.count = count
        ctx.scale = scale
        ctx.device = device
        ctx.save_for_backward(*chunks, *outs, *lses)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count = ctx.count
        device = ctx.device
        parts = [ctx.saved_tensors[first * count : (first + 1) * count] for first in range(5)]
        queries, keys, values, outs, lses = parts
        query_grads = [_wide_zeros(query, query.shape[-1]) for query in queries]
        # Keys in the outer loop: each chunk of them is copied once and its gradient is complete at
        # the end; the gradients of queries are summed where the queries are.
        key_grads: list[Tensor] = []
        value_grads: list[Tensor] = []
        for index in range(count):
            key = keys[index].to(device)
            value = values[index].to(device)
            dk = _wide_zeros(key, key.shape[-1])
            dv = _wide_zeros(value, value.shape[-1])
            # The chunks of queries that see these keys: this one and all later ones.
            for other in range(index, count):
                needed = [part[other].to(device) for part in (grads, queries, outs, lses)]
                more, more_k, more_v = blocks.attend_backward(
                    needed[0],
                    needed[1],
                    key,
                    value,
                    needed[2],
                    needed[3],
                    causal=other == index,
                    scale=ctx.scale,
                )
                query_grads[other] += more.to(query_grads[other])
                dk += more_k
                dv += more_v
            key_grads.append(dk.to(keys[index]))
            value_grads.append(dv.to(values[index]))
        found = [grad.to(query.dtype) for grad, query in zip(query_grads, queries, strict=True)]
        return None, None, None, *found, *key_grads, *value_grads


def _wide_zeros(like: Tensor, width: int) -> Tensor:
    """Zeros in which blocks of `like` are added up."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros((*like.shape[:3], width), dtype=dtype, device=like.device)


class FPDT_Attention(nn.Module):
    """The attention of a block of Megatron-DeepSpeed, from its input after the norm to its output's
    projection.

    config: has kv_channels, num_attention_heads, num_key_value_heads, hidden_size and
        attention_dropout.
    chunk_size: in tokens of the full sequence.
    gather_idx, scatter_idx: without effect, the shapes are known.
    """

    def __init__(
        self,
        config: Any,
        first_weight: Tensor,
        first_bias: Tensor | None,
        second_weight: Tensor,
        second_bias: Tensor | None,
        sequence_process_group: ProcessGroup | None,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        # Parameters of the block that this module is called by, under DeepSpeed's names.
        self.qkv_linear_weight = first_weight
        self.qkv_linear_bias = first_bias
        self.qkv_dense_weight = second_weight
        self.qkv_dense_bias = second_bias
        self.group = sequence_process_group
        self.head_size = config.kv_channels
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        self.dropout = config.attention_dropout
        self.return_bias = return_bias
        self.chunk_size = chunk_size
        self.enable_offloading = enable_offloading
        ranks = comm.world_size(self.group)
        if self.heads % ranks or self.key_heads % ranks:
            raise UsageError(
                f"FPDT_Attention: {ranks} ranks do not divide {self.heads} heads and "
                f"{self.key_heads} key-value heads"
            )

    def forward(
        self,
        layernorm_output: Float[Tensor, "positions batch width"],
        attention_mask: Tensor | None = None,
        inference_params: Any = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        cpu_offloading: bool = True,
    ) -> tuple[Float[Tensor, "positions batch out"], Tensor | None]:
        """The projected output and its bias, which is added unless `return_bias`.

        layernorm_output: of this rank's positions.
        rotary_pos_emb: cosines and sines of the full sequence, [positions, 1, 1, size].

        Raises UsageError for a mask, dropout in training, and lengths that do not divide.
        """
        if attention_mask is not None:
            raise UsageError("FPDT_Attention: attention is causal; leave attention_mask out")
        if self.dropout and self.training:
            raise UsageError(
                f"FPDT_Attention: attention_dropout {self.dropout} is not offered; set it to 0"
            )
        # 1. Projection and exchange, chunk by chunk; what is not needed now goes to the host.
        x = layernorm_output
        count = _chunks(x.shape[0] * comm.world_size(self.group), self.chunk_size)
        place = HOST if cpu_offloading and self.enable_offloading and count > 1 else x.device
        parts: list[list[Tensor]] = [[], [], []]
        for index, part in enumerate(x.chunk(count)):
            exchanged = self._exchange(part, index, rotary_pos_emb)
            for chunks, chunk in zip(parts, exchanged, strict=True):
                chunks.append(chunk.to(place))
        # 2. Attention over all chunks. 3. Each chunk of the output back to this rank's positions.
        outs = chunked_attention(*parts, device=x.device)
        back = [all_to_all(out.to(x.device), self.group, 2, 1) for out in outs]
        joined = torch.cat([out.permute(2, 0, 1, 3).flatten(2) for out in back])
        bias = None if self.return_bias else self.qkv_dense_bias
        return F.linear(
            joined, self.qkv_dense_weight, bias
        ), self.qkv_dense_bias if self.return_bias else None

    def _exchange(
        self, part: Tensor, index: int, rotary: tuple[Tensor, Tensor] | None
    ) -> list[Tensor]:
        """Queries, keys and values of a full chunk for this rank's heads, from its part of the chunk."""
        found = []
        widths = [heads * self.head_size for heads in (self.heads, self.key_heads, self.key_heads)]
        for kind, x in enumerate(
            F.linear(part, self.qkv_linear_weight, self.qkv_linear_bias).split(widths, -1)
        ):
            by_heads = x.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)
            whole = all_to_all(by_heads, self.group, 1, 2)
            # Queries and keys are rotated by the position in the full sequence, known only now that
            # the chunk is complete; values are not rotated.
            if rotary is not None and kind < 2:
                positions = slice(index * whole.shape[2], (index + 1) * whole.shape[2])
                cos, sin = (each[positions].permute(1, 2, 0, 3) for each in rotary)
                whole = _rotate(whole, cos, sin)
            found.append(whole)
        return found


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # A head may be rotated in part (GPT-NeoX's rotary_pct).
    width = cos.shape[-1]
    turned = x[..., :width]
    rest = x[..., width:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1).to(x.dtype)


def _chunks(length: int, size: int) -> int:
    if length % size:
        raise UsageError(f"FPDT: chunks of {size} tokens do not divide a sequence of {length}")
    return length // size


class FPDT_InputConstruct(nn.Module):
    """Divides the tokens of a batch over the ranks, so that each has a part of every chunk.

    args: has ds_sequence_parallel_fpdt_chunk_size, in tokens of the full sequence.
    """

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.labels = labels
        self.loss_mask = loss_mask
        self.attention_mask = attention_mask
        self.position_ids = position_ids
        self.num_chunk_per_gpu = _chunks(tokens.shape[1], args.ds_sequence_parallel_fpdt_chunk_size)
        self.chunk_size = args.ds_sequence_parallel_fpdt_chunk_size // sp_size
        self.sp_size = sp_size
        self.sp_rank = sp_rank
        if self.chunk_size * sp_size * self.num_chunk_per_gpu != tokens.shape[1]:
            raise UsageError(
                f"FPDT: {sp_size} ranks do not divide chunks of {self.chunk_size * sp_size} tokens"
            )

    def generate(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """This rank's tokens, labels, the loss mask of all ranks one after the other, the mask, its
        positions.
        """
        # Part j of chunk i is number i * ranks + j; a rank has the parts with its number of all
        # chunks, so that an exchange of its i-th part gives chunk i.
        device = self.tokens.device
        parts = torch.arange(self.num_chunk_per_gpu * self.sp_size, device=device)
        by_rank = parts.view(self.num_chunk_per_gpu, self.sp_size).t()
        within = torch.arange(self.chunk_size, device=device)
        order = (by_rank[..., None] * self.chunk_size + within).flatten(1)
        own = order[self.sp_rank]
        labels = None if self.labels is None else self.labels[:, own]
        loss_mask = None if self.loss_mask is None else self.loss_mask[:, order.flatten()]
        positions = None if self.position_ids is None else self.position_ids[:, own]
        return self.tokens[:, own], labels, loss_mask, self.attention_mask, positions


class FPDT_FFN:
    """A feed-forward layer of two matrices and GELU, in tiles along the sequence."""

    @staticmethod
    def apply(
        x: Float[Tensor, "positions batch width"],
        w1: Float[Tensor, "inner width"],
        b1: Float[Tensor, " inner"],
        w2: Float[Tensor, "width inner"],
        b2: Float[Tensor, " width"],
        add_bias: bool,
        chunk_size: int,
    ) -> tuple[Float[Tensor, "positions batch width"], Tensor | None]:
        """The output and `b2`, which is added where `add_bias` says so."""
        count = _chunks(x.shape[0], chunk_size)

        def layer(tile: Tensor) -> Tensor:
            inner = F.gelu(F.linear(tile, w1, b1), approximate="tanh")
            return F.linear(inner, w2, b2 if add_bias else None)

        weights = [w1, b1, w2, b2] if add_bias else [w1, b1, w2]
        out = tiled(layer, [x.transpose(0, 1)], count, weights).transpose(0, 1)
        return out, None if add_bias else b2


class FPDT_LogitsLoss:
    """The cross entropy of each token, whose logits are in memory for a tile at a time."""

    @staticmethod
    def apply(
        lm_output: Float[Tensor, "positions batch width"],
        labels: Int[Tensor, "batch positions"],
        logit_weights: Float[Tensor, "classes width"],
        rank: int,
        spg_size: int,
        spg: ProcessGroup | None,
        num_chunk: int,
    ) -> Float[Tensor, "all_positions batch"]:
        """The losses of all ranks' tokens; lm_output and labels are of this rank's positions."""

        def losses(x: Tensor, wanted: Tensor) -> Tensor:
            logits = F.linear(x, logit_weights)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(wide.transpose(1, 2), wanted, reduction="none")

        own = tiled(losses, [lm_output.transpose(0, 1), labels], num_chunk, [logit_weights])
        return gather(own.t(), spg, 0)
