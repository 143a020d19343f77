"""DeepSpeed's functions, with its names and arguments, for scripts that were written for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ds_comm_autograd import all_to_all, gather
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_core.errors import UsageError
from ds_sequence_parallel import autosp
from ds_sequence_parallel.attention import ulysses
from ds_sequence_parallel.attention.hf_attention import (
    Part,
    Tokens,
    attend_part,
    documents,
    make_part,
    plain_mask,
)
from ds_sequence_parallel.attention.layout import Layout
from ds_sequence_parallel.batches import UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: ProcessGroup | None,
    async_op: bool = False,
    *_: Any,
    **__: Any,
) -> Tensor:
    """The exchange of DeepSpeed's Ulysses: equal parts of `input` along `scatter_idx` go to the
    ranks of the group.

    What comes is joined along `gather_idx`. It has a gradient. The place of the batch is that of
    the tensor. Raises UsageError for async_op=True, and where the parts would not be equal.
    """
    if async_op:
        raise UsageError(
            "single_all_to_all(async_op=True): what is exchanged is used at once; leave "
            "async_op out"
        )
    return all_to_all(input, group, scatter_idx, gather_idx)


def prepare_autosp_inputs(
    input_id: Tensor,
    label_id: Tensor,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`ds_sequence_parallel.prepare_autosp_inputs`, which returns all that it was given, as the
    release does.
    """
    autosp.prepare_autosp_inputs(input_id, label_id, position_id, attention_mask, seq_dim)
    return input_id, label_id, position_id, attention_mask


class _SeqAllToAll:
    """`single_all_to_all` as ``_SeqAllToAll.apply(group, input, scatter_idx, gather_idx,
    batch_dim_idx)``.
    """

    @staticmethod
    def apply(
        group: ProcessGroup | None,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int = 0,
        *_: Any,
    ) -> Tensor:
        """The exchange; streams and handles that may follow have no effect."""
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)


class DistributedAttention(ulysses.DistributedAttention):
    """``DistributedAttention(local_attention, group, scatter_idx, gather_idx)``: heads and sequence
    by dimension.

    Its forward takes ``batch_dim_idx`` after query, key and value, which has no effect: dimensions
    are those of the tensors.
    """

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__(
            local_attention, sequence_process_group, heads=scatter_idx, sequence=gather_idx
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The attention of this rank's positions. Collective along the group."""
        if rotary_pos_emb is not None:
            raise UsageError(
                "DistributedAttention: rotate query and key before, and leave rotary_pos_emb out"
            )
        return super().forward(query, key, value, *args, **kwargs)


class SequenceUnit:
    """An ``mpu``: consecutive ranks divide sequences, others have other samples."""

    def __init__(self, size: int) -> None:
        world = comm.world_size()
        rank = comm.rank()
        if world % size:
            raise UsageError(f"a sequence parallel size of {size} does not divide {world} ranks")
        self.size = size
        self.rank = rank
        self.world = world
        # Every rank makes every group, in one order: new_group is a collective of the world.
        made: list[Any] = [None, None]
        for kind, rows in enumerate(
            (
                [range(first, first + size) for first in range(0, world, size)],
                [range(first, world, size) for first in range(size)],
            )
        ):
            for row in rows:
                group = dist.new_group(list(row))
                made[kind] = group if rank in row else made[kind]
        self.sequence: ProcessGroup = made[0]
        self.data: ProcessGroup = made[1]

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """The ranks that divide this rank's sequences."""
        return self.sequence

    def get_sequence_parallel_world_size(self) -> int:
        """How many these are."""
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.rank % self.size

    def get_data_parallel_group(self) -> ProcessGroup:
        """The ranks with the same part of other samples."""
        return self.data

    def get_data_parallel_world_size(self) -> int:
        """How many these are."""
        return self.world // self.size

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.rank // self.size

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """The ranks over which gradients are averaged: all."""
        world = dist.group.WORLD
        assert world is not None
        return world

    def get_sequence_data_parallel_world_size(self) -> int:
        """How many these are."""
        return self.world

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.rank


class UlyssesSPAttentionHF:
    """Ulysses for transformers models that are given parts, as `UlyssesSPDataLoaderAdapter` makes
    them.

    With ds_core's own config (``sequence_parallel_size``) none of it is needed.
    """

    def __init__(self, core: str, attention: Any, group: ProcessGroup) -> None:
        self.core = core
        self.before = attention
        self.build = plain_mask(core)
        self.group = group
        self._last: tuple[Any, Part] | None = None

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        max_length: int | None = None,
        **_: Any,
    ) -> SequenceUnit:
        """Divide the attention of all models with that implementation; returns the ``mpu`` for
        initialize.

        Collective over the world, before the model is made. micro_batch_size, seq_length and
        others: not needed.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        if core_attn_implementation not in AttentionInterface._global_mapping:
            known = ", ".join(sorted(AttentionInterface._global_mapping))
            raise UsageError(
                f"core_attn_implementation is {core_attn_implementation!r}; transformers has "
                f"{known}"
            )
        if not dist.is_initialized():
            comm.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
        unit = SequenceUnit(sequence_parallel_size)
        if sequence_parallel_size > 1:
            plain = AttentionInterface._global_mapping[core_attn_implementation]
            made = cls(core_attn_implementation, plain, unit.sequence)
            AttentionInterface.register(core_attn_implementation, made.attention)
            AttentionMaskInterface.register(core_attn_implementation, made.mask)
        return unit

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Any = None,
        **options: Any,
    ) -> Any:
        """The arguments of the mask, for the attention to build it.

        Documents are known only from the position ids of all ranks, which it gathers.
        """
        options.pop("attention_mask", None)
        return batch_size, q_length, options

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function."""
        positions = options.get("position_ids")
        part = self._part(attention_mask, positions, query)
        return attend_part(
            module, query, key, value, part, self.group, False, self.before, options
        ), None

    def _part(self, asked: Any, positions: Tensor | None, query: Tensor) -> Part:
        """The same for all layers of a forward, which are given the same position ids."""
        # Compared by a weak reference: another micro-batch may get the same address, never the same
        # object.
        if self._last is not None and positions is not None and self._last[0]() is positions:
            return self._last[1]
        whole = None if positions is None else gather(positions.contiguous(), self.group, 1)
        ranks = comm.world_size(self.group)
        tokens = Tokens(Layout(query.shape[2] * ranks, ranks), None, documents(whole), whole)
        options: dict[str, Any] = (
            dict(asked[2])
            if isinstance(asked, tuple)
            else {"device": query.device, "dtype": query.dtype}
        )
        part = make_part(tokens, False, self.core, query.shape[0], build=self.build, **options)
        if positions is not None:
            self._last = weakref.ref(positions), part
        return part


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Float[Tensor, "positions batch classes"],
    target: Int[Tensor, "positions batch"],
    sp_group: ProcessGroup,
) -> Float[Tensor, "sequence batch"]:
    """The loss of each token of the full sequence, from this rank's positions."""
    rows = vocab_parallel_logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(rows.float(), target.flatten(), reduction="none")
    return gather(losses.view(target.shape), sp_group, 0)
