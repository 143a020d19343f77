"""Random numbers of tensor-parallel ranks: alike where all compute the same, each rank's own inside
divided layers.

Between a column-parallel layer and the row-parallel layer that ends the pair every rank has other
elements, so dropout there draws from the stream "model-parallel-rng"
(`ds_run_state.random_streams`); everywhere else it draws from the generators themselves, which are
made alike on the ranks of a group. Were they not, ranks would drop other elements of what they all
hold, and drift apart without a word.

With divided sequences the ranks have other tokens in a block, too, except between the gathering in
front of a region and its first column-parallel layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.random_streams import MODEL_PARALLEL, STREAMS
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ds_core import comm
from ds_tensor_parallel.layers.linear import accepts_part, leaves_part

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_tensor_parallel.layers.linear import Place

_OFFSET = 2718


def divide_random_numbers(model: nn.Module, ctx: Context, place: Place) -> None:
    """Make the generators of a group alike, begin each rank's own stream, and use it inside divided
    layers. Collective.

    The stream begins as `STREAMS.seed_model_parallel` makes it, with the seed of the group's first
    rank.
    """
    accelerator = ctx.accelerator
    # Random states of all generators from the group's first rank: dropout outside of divided layers
    # must drop the same elements everywhere.
    source = ctx.mesh.ranks("tp")[0]
    torch.set_rng_state(_of_first(torch.get_rng_state(), ctx, place, source))
    if accelerator.device_type != "cpu":
        accelerator.set_rng_state(_of_first(accelerator.get_rng_state(), ctx, place, source))
    # Inside divided layers each rank has a stream of its own, from one seed, so that a run can be
    # repeated. The offset is Megatron-LM's.
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], dtype=torch.int64)
    STREAMS.begin(MODEL_PARALLEL, int(_of_first(seed, ctx, place, source)) + _OFFSET + place.rank)
    for module in list(model.modules()):
        columns = [child for child in module.children() if leaves_part(child)]
        # A module without dropout draws nothing: no hooks.
        if columns and drops(module):
            _Region().around(module, columns)


def draw_by_tokens(block: nn.Module, ends: Mapping[nn.Module, nn.Module]) -> None:
    """Draw from each rank's own stream where `block` works on a part of the tokens.

    ends: region -> the module behind which its tokens are divided again.
    """
    if not drops(block):
        return
    own = _Region(lasting=True)
    block.register_forward_pre_hook(own.open)
    block.register_forward_hook(own.close, always_call=True)
    # A region gathers the tokens: from there on all ranks have the same, until its end divides them
    # again.
    for region, end in ends.items():
        region.register_forward_pre_hook(own.close)
        end.register_forward_hook(own.open)


def _of_first(value: Tensor, ctx: Context, place: Place, source: int) -> Tensor:
    """The first rank's `value`."""
    sent = value.to(ctx.accelerator.current_device())
    comm.broadcast(sent, src=source, group=place.group)
    return sent.cpu()


def drops(module: nn.Module) -> bool:
    """Whether dropout is anywhere in it: a layer, or an attribute such as attention_dropout that is
    not 0.
    """
    return any(
        isinstance(value, float)
        and value > 0
        and ("drop" in name or (name == "p" and isinstance(part, _DropoutNd)))
        for part in module.modules()
        for name, value in vars(part).items()
    )


class _Region:
    """Where a rank draws from its own stream.

    Opened by the output of a column-parallel layer, closed by the input of a row-parallel one or
    the end.

    lasting: it is opened where a block begins, too, which is not called again when the block is
        recomputed: then `STREAMS` alone knows that it is open.
    """

    def __init__(self, *, lasting: bool = False) -> None:
        self._lasting = lasting
        self._opened = False

    def around(self, module: nn.Module, columns: Iterable[nn.Module]) -> None:
        """Watch the layers of `module`."""
        for column in columns:
            column.register_forward_hook(self.open)
        for part in module.modules():
            if accepts_part(part):
                part.register_forward_pre_hook(self.close)
        module.register_forward_pre_hook(self.close)
        module.register_forward_hook(self.close, always_call=True)

    def open(self, module: nn.Module, *_: Any) -> None:
        """Draw from this rank's own stream from now on; not in eval mode, which draws nothing."""
        if module.training and STREAMS.inside is None:
            STREAMS.switch(MODEL_PARALLEL)
            self._opened = True

    def close(self, *_: Any) -> None:
        """Draw from the generators again."""
        opened = self._opened
        self._opened = False
        # Only who opened closes: regions may be nested, and the inner one must not end the outer.
        if (opened or self._lasting) and STREAMS.inside == MODEL_PARALLEL:
            STREAMS.switch(None)
