"""Flat buckets: parameters in one buffer, of which each rank owns an equal shard that its optimizer
updates.

[Note: fragments] The optimizer gets one tensor per parameter: this rank's fragment of it, a view of
the shard, or empty. So an unused parameter keeps its weight and state (its fragment has no
gradient, and torch's optimizers skip it), step counters are per parameter, and parameter groups
have as many entries as the user gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_zero.buckets.choose import choose_masters
from ds_zero.buckets.layout import Layout
from ds_zero.buckets.masters import Masters
from ds_zero.buckets.weights import Weights, place_weights
from ds_zero.comm.hierarchy import outer_axes, sharding_axes
from ds_zero.init.sharded_param import pop_weight

if TYPE_CHECKING:
    from jaxtyping import Shaped

    from ds_core.mesh import Mesh
    from ds_core.partition import ParamInfo
    from ds_zero.buckets.records import Fragment
    from ds_zero.comm.collectives import WeightGather
    from ds_zero.offload.placement import StatePlacement


class FlatBucket:
    """Parameters of one dtype, device and replica group, one after the other in a flat buffer.

    `weights` and `masters` say where they are between steps; `fill` and `place` make them.
    """

    weights: Weights
    """Where this rank's shard of the weights is."""

    masters: Masters
    """What this rank's optimizer updates."""

    fragments: list[Fragment]
    """One per parameter: its range of this rank's shard."""

    placement: StatePlacement
    """The stores of its states."""

    def __init__(self, params: Sequence[nn.Parameter], infos: Sequence[ParamInfo], mesh: Mesh):
        self.params = list(params)
        self.names = [i.name for i in infos]
        self.shapes = [tuple(p.shape) for p in params]

        # -- ranks: see `ParamInfo` for the first three --
        self.replicas = infos[0].replicas
        self.held = infos[0].held
        self.counted = infos[0].counted
        # Of the replicas, the axes over which the bucket is sharded, and the others.
        self.axes = sharding_axes(mesh, self.replicas)
        self.outer = outer_axes(mesh, self.replicas)
        # Those over which ranks have different elements, so that a norm is a sum over them.
        self.summed = mesh.expand((*self.held, *self.axes))
        # Along `axes`.
        self.group = mesh.group(*self.axes)
        self.world = mesh.size(*self.axes)
        self.rank = mesh.index(*self.axes)
        # Whether other ranks have the parameters, too.
        self.reduces = mesh.size(*self.replicas) > 1

        # -- memory --
        self.layout = Layout.of([p.numel() for p in params], self.world)
        # The parameters become views of it. Stage 3 frees its memory while they are sharded.
        self.full = torch.zeros(self.layout.total, dtype=params[0].dtype, device=params[0].device)

        # -- for `comm.label` --
        text = f"{self.names[0]!r}" + (f" to {self.names[-1]!r}" if len(self.names) > 1 else "")
        self.about_weights = f"weights of {text}"
        self.about_gradients = f"gradients of {text}"

    # -- set-up ------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, mesh: Mesh) -> None:
        """Move the parameters into `full`, with the weights of the first replica. Collective."""
        ranks = mesh.ranks(*self.replicas)
        agreed = True
        for param, view in zip(self.params, self.views(self.full), strict=True):
            found = pop_weight(param, ranks)
            view.copy_(param if found is None else found[0])
            param.data = view
            # What `Init` has sharded came from the first rank already.
            agreed = agreed and found is not None and found[1]
        if len(ranks) > 1 and not agreed:
            comm.label(self.about_weights)
            comm.broadcast(self.full, src=ranks[0], group=mesh.group(*self.replicas))

    def place(
        self,
        placement: StatePlacement,
        wanted: torch.dtype | None,
        *,
        sharded: bool,
        updated: bool,
    ) -> None:
        """Put weights and masters where they are kept. See `choose_masters` for the arguments."""
        slices = [self.layout.span(i, self.rank).within for i in range(len(self.params))]
        self.placement = placement
        self.weights = place_weights(self.own_shard(self.full), slices, sharded, placement)
        self.masters = choose_masters(self, placement, wanted, updated=updated)
        self.fragments = self.masters.fragments
        self.masters.rest()
        self.weights.rest()

    # -- what it is --------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.full.dtype

    @property
    def trains(self) -> bool:
        """Whether its parameters have a dtype that can have gradients."""
        return self.full.is_floating_point() or self.full.is_complex()

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(p.requires_grad for p in self.params)

    # -- buffers with its layout -------------------------------------------------------------------

    def view(self, flat: Shaped[Tensor, " full"], index: int) -> Shaped[Tensor, ...]:
        """Parameter `index` in a buffer with the layout of this bucket."""
        begin = self.layout.offsets[index]
        return flat[begin : begin + self.layout.sizes[index]].view(self.shapes[index])

    def views(self, flat: Shaped[Tensor, " full"]) -> Iterator[Tensor]:
        """All parameters in a buffer with this layout."""
        return (self.view(flat, i) for i in range(len(self.params)))

    def shards(self, flat: Shaped[Tensor, " full"]) -> Sequence[Shaped[Tensor, " shard"]]:
        """The shards of all ranks in a buffer with this layout."""
        return flat.view(self.world, self.layout.shard_numel).unbind()

    def own_shard(self, flat: Shaped[Tensor, " full"]) -> Shaped[Tensor, " shard"]:
        """This rank's shard of a buffer with this layout."""
        return flat.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    # -- weights -----------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self, index: int, weight: Shaped[Tensor, ...]) -> None:
        """Make `weight`, equal on all ranks, the weight of parameter `index` in its shard and its
        master.

        The parameter itself must have it already, if it is unsharded.
        """
        self.weights.outdate()
        if self.weights.sharded:
            fragment = self.fragments[index]
            with self.weights.in_memory(write=True):
                self.weights.parts[index].copy_(weight.reshape(-1)[fragment.start : fragment.stop])
        self.masters.write(index, weight)

    @torch.no_grad()
    def own(self) -> Shaped[Tensor, " shard"]:
        """This rank's shard on the device; if a store has it, a copy in `full`."""
        return self.weights.to_device(self.own_shard(self.full))

    def start_gather(self, how: WeightGather) -> list[Any]:
        """Start to gather all shards into `full` as `how` says; returns the works to wait for."""
        if self.world == 1:
            self.own()
            return []
        comm.label(self.about_weights)
        return how.start(self)
