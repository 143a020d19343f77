"""Embeddings of which each rank has some rows (tokens), or some columns (of each vector).

Dimensions: ``batch`` any, ``hidden`` the width of a vector on this rank or in full.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from ds_comm_autograd import reduce_from
from ds_run_state.divided import Divided
from torch import Tensor, nn

from ds_tensor_parallel.layers.linear import Cut, Place, gather_columns, some_outputs
from ds_tensor_parallel.planning.division import Division
from ds_tensor_parallel.planning.rules import Kind

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class _Vocabulary(nn.Module):
    """Each rank looks up the tokens that it has; the vectors are summed over the ranks."""

    tp: Place | None
    division: Division

    def cuts(self) -> dict[str, Cut]:
        """The rows of the weight."""
        return {"weight": Cut(0, self.division)}

    def bind(self, place: Place, division: Division) -> None:
        """Work as this rank's part from now on. The weight is cut by the caller, as `cuts` says."""
        self.tp = place
        self.division = division
        ((first, size),) = division.ranges(place.rank)
        self.first = first
        self.num_embeddings = size
        if self.padding_idx is not None:
            # The padding token is on one rank; the others must not treat one of their rows as
            # padding.
            mine = first <= self.padding_idx < first + size
            self.padding_idx: int | None = self.padding_idx - first if mine else None

    @property
    def ds_divided(self) -> Divided | None:
        """See `ds_run_state.divided`."""
        if self.tp is None:
            return None
        tokens = self.division.ranges(self.tp.rank)
        return Divided(
            self.tp.rank, self.tp.size, inputs=tokens, sums=True, sizes=self.division.sizes()
        )

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """The vectors of `ids`, on every rank."""
        if self.tp is None:
            return cast(Tensor, super().forward(ids))
        local = ids - self.first
        # Tokens of other ranks look up row 0 and are zeroed, so that the sum over ranks has each
        # vector once.
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        found: Tensor = super().forward(local.masked_fill(elsewhere, 0))
        return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp.group)


class _Hidden(nn.Module):
    """Each rank looks up a part of every vector; the parts are gathered."""

    tp: Place | None
    division: Division
    gather_output = True

    def cuts(self) -> dict[str, Cut]:
        """The columns of the weight."""
        return {"weight": Cut(1, self.division)}

    def bind(self, place: Place, division: Division) -> None:
        """Work as this rank's part from now on. The weight is cut by the caller, as `cuts` says."""
        self.tp = place
        self.division = division
        self.embedding_dim = division.size(place.rank)

    @property
    def ds_divided(self) -> Divided | None:
        """See `ds_run_state.divided`."""
        return some_outputs(self.tp, self.division, self.gather_output)

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """The vectors of `ids`, on every rank, or this rank's part of them without
        `gather_output`."""
        found: Tensor = super().forward(ids)
        return (
            gather_columns(found, self.tp, self.division)
            if self.tp is not None and self.gather_output
            else found
        )


class VocabParallelEmbedding(_Vocabulary, nn.Embedding):
    """`nn.Embedding` of which each rank has some tokens.

    It is full until ``ds_core.initialize`` binds it.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **more: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **more)
        self.tp = None
        check_embedding(self)


class HiddenParallelEmbedding(_Hidden, nn.Embedding):
    """`nn.Embedding` of which each rank has a part of every vector.

    It is full until ``ds_core.initialize`` binds it.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **more: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **more)
        self.tp = None
        check_embedding(self)


def embedding(layer: Any, kind: Kind) -> Any:
    """Make `layer`, an embedding or a subclass of one, parallel in place: along the vocabulary, or
    the hidden size.
    """
    check_embedding(layer)
    layer.__class__ = _subclass(kind is Kind.VOCABULARY, layer.__class__)
    layer.tp = None
    # A table of one number per head (relative positions): each rank uses those of its own heads.
    if kind is Kind.HEADS:
        layer.gather_output = False
    return layer


@functools.cache
def _subclass(vocabulary: bool, base: Any) -> Any:
    if base is nn.Embedding:
        return VocabParallelEmbedding if vocabulary else HiddenParallelEmbedding
    kind, name = (_Vocabulary, "VocabParallel") if vocabulary else (_Hidden, "HiddenParallel")
    return type(name + base.__name__, (kind, base), {"__module__": __name__})


def check_embedding(layer: nn.Embedding) -> None:
    """Raise ValueError for one that cannot be divided."""
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise ValueError(
            "an embedding with max_norm or scale_grad_by_freq cannot be divided: both need whole "
            "vectors"
        )
    if layer.sparse:
        raise ValueError("an embedding with sparse gradients cannot be divided; leave sparse out")
