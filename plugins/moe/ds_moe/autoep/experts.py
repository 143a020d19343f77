"""This rank's experts of one MoE block: the modules by which AutoEP replaces the model's own.

Both kinds are called as fused experts of the transformers library are, with tokens, their experts
and their scores. Parameters keep the names that they have in the model.

Dimensions: ``tokens`` of this rank, ``hidden``, ``k`` experts of a token, ``rows`` that arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_moe.dispatch import Run, dispatch
from ds_moe.kernels.grouped import Groups, grouped_linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch.distributed import ProcessGroup

    from ds_moe.expert_load import ExpertLoad

Act = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Which experts of a layer this rank has, and how they are run."""

    name: str
    """Of the experts in the model."""
    count: int
    """All experts of the layer."""
    size: int
    """Ranks that share them."""
    index: int
    """This rank's place among those."""
    group: ProcessGroup
    apply: Literal["pre", "post"] = "post"
    """Scores multiply the output ("post") or the input ("pre")."""
    combine: Literal["weighted_sum", "legacy_bmm"] = "weighted_sum"
    """How a token's experts are added up."""
    grouped: bool = True
    """All experts as one product; else one expert after the other."""
    check: bool = False
    """Check every exchange."""

    def __deepcopy__(self, memo: Any) -> ExpertShare:
        return self  # a copy of a model has the same peers

    @property
    def rows(self) -> int:
        """Experts on each rank."""
        return self.count // self.size

    @property
    def first(self) -> int:
        """This rank's first expert."""
        return self.index * self.rows


class _Experts(nn.Module):
    """The way of tokens to their experts and back; `compute` is what the experts do."""

    def __init__(self, share: ExpertShare) -> None:
        super().__init__()
        self.share = share
        self.load: ExpertLoad | None = None

    @property
    def num_experts(self) -> int:
        """All experts of the layer, on all ranks."""
        return self.share.count

    def forward(
        self,
        hidden_states: Float[Tensor, "*batch hidden"],
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Float[Tensor, "*batch hidden"]:
        """The weighted sum of the experts' output. Collective over the ranks that share them.

        top_k_index, top_k_weights: [tokens, k]; `ExpertShare.check` has them checked with an error
        of its own, so they have no shape here.
        """
        share = self.share
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if share.check:
            _check_routing(share, tokens, top_k_index, top_k_weights)
        if self.load is not None and self.load.watched and self.training:
            # AutoEP drops no choice, and the auxiliary loss stays with the model.
            counts = torch.bincount(top_k_index.reshape(-1), minlength=share.count)
            self.load.add(counts, counts.new_zeros(()))

        def run(rows: Tensor, groups: Groups) -> Tensor:
            if share.check:
                _check_arrival(share, top_k_index, groups)
            # Under autocast experts give 16-bit rows; the combine needs the tokens' dtype.
            return self.compute(rows, groups).to(rows.dtype)

        if share.combine == "weighted_sum" or share.apply == "pre":
            weigh: Literal["after", "before"] = "after" if share.apply == "post" else "before"
            out = dispatch(
                *(tokens, top_k_index, top_k_weights, run),
                num_experts=share.count,
                group=share.group,
                weigh=weigh,
            )
        else:
            out = self._combine_by_product(tokens, top_k_index, top_k_weights, run)
        return out.to(hidden_states.dtype).view_as(hidden_states)

    def _combine_by_product(
        self,
        tokens: Float[Tensor, "tokens hidden"],
        index: Int[Tensor, "tokens k"],
        scores: Float[Tensor, "tokens k"],
        run: Run,
    ) -> Float[Tensor, "tokens hidden"]:
        """The sum as DeepSpeed's ``legacy_bmm``: scores [1, k] times outputs [k, hidden], per token."""
        share = self.share
        (count, k) = index.shape
        # Each token once per expert, so that outputs come back one by one instead of summed.
        spread = tokens.repeat_interleave(k, dim=0)
        ones = torch.ones_like(scores).view(-1, 1)
        done = dispatch(
            spread, index.reshape(-1, 1), ones, run, num_experts=share.count, group=share.group
        )
        return torch.bmm(scores.to(done.dtype).unsqueeze(1), done.view(count, k, -1)).squeeze(1)

    def compute(
        self, rows: Float[Tensor, "rows hidden"], groups: Groups
    ) -> Float[Tensor, "rows hidden"]:
        """The experts' output for rows that are sorted by local expert, as in `groups`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """For print(model)."""
        share = self.share
        return f"experts {share.first} to {share.first + share.rows - 1} of {share.count}"


class FusedExperts(_Experts):
    """Experts whose weights are stacked: parameters of [local experts, ...], under the names they
    have in the model.

    roles: name of a parameter -> what the arithmetic calls it.
    """

    def __init__(
        self,
        share: ExpertShare,
        params: Mapping[str, nn.Parameter],
        roles: Mapping[str, str],
        act: Act,
        arithmetic: Any,
    ) -> None:
        super().__init__(share)
        for name, param in params.items():
            self.register_parameter(name, param)
        self._roles = dict(roles)
        self._arithmetic = arithmetic
        # As a rule a module: as a child it moves and prints with the model.
        self.act_fn = act

    def compute(self, rows: Tensor, groups: Groups) -> Tensor:
        """See `_Experts`."""
        weights = {
            self._roles.get(name, name): param
            for name, param in self.named_parameters(recurse=False)
        }
        out: Tensor = self._arithmetic(
            rows, weights, self.act_fn, _Product(groups, self.share.grouped)
        )
        return out


class ListedExperts(_Experts):
    """Experts that are separate modules: those of this rank, under their numbers in the full layer.

    roles: name of an expert's linear child -> what the arithmetic calls it; for the grouped
    product, which stacks them.
    """

    def __init__(
        self,
        share: ExpertShare,
        experts: Mapping[int, nn.Module],
        roles: Mapping[str, str],
        act: Act | None,
        arithmetic: Any,
    ) -> None:
        super().__init__(share)
        for number, expert in experts.items():
            self.add_module(str(number), expert)
        self._local = list(experts)
        self._roles = dict(roles)
        self._arithmetic = arithmetic
        # In a tuple, so that a module is no child: the experts have it already.
        self._act = (act,)

    def compute(self, rows: Tensor, groups: Groups) -> Tensor:
        """See `_Experts`.

        Every local expert is called, also with no rows, so that ranks make the same collectives.
        """
        experts: list[Any] = [getattr(self, str(number)) for number in self._local]
        if not self.share.grouped:
            return torch.cat(
                [
                    expert(part)
                    for expert, part in zip(experts, rows.split(groups.sizes), strict=True)
                ]
            )
        weights = {
            role: torch.stack([getattr(expert, name).weight for expert in experts])
            for name, role in self._roles.items()
        }
        out: Tensor = self._arithmetic(rows, weights, self._act[0], _Product(groups, True))
        return out


class _Product:
    """See `ds_moe.autoep.expert_fn.Product`."""

    def __init__(self, groups: Groups, grouped: bool) -> None:
        self._groups = groups
        self._grouped = grouped

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self._grouped:
            return grouped_linear(rows, weight, None, self._groups)
        parts = zip(rows.split(self._groups.sizes), weight.unbind(), strict=True)
        return torch.cat([nn.functional.linear(part, w) for part, w in parts])

    def spread(self, values: Tensor) -> Tensor:
        return values.index_select(0, self._groups.expert_of_row)


def _check_routing(share: ExpertShare, tokens: Tensor, index: Tensor, scores: Tensor) -> None:
    """UsageError unless every token has experts that there are, with finite scores, in the same
    layer on all ranks.
    """
    if index.dim() != 2 or index.shape != scores.shape or index.shape[0] != tokens.shape[0]:
        raise UsageError(
            f"{share.name}: {tokens.shape[0]} tokens, but experts of shape {tuple(index.shape)} "
            f"and scores of shape {tuple(scores.shape)}; both must be [tokens, k]"
        )
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < share.count:
        raise UsageError(
            f"{share.name}: the router chose experts {int(index.min())} to {int(index.max())}; "
            f"there are 0 to {share.count - 1}"
        )
    if not bool(torch.isfinite(scores).all()):
        raise UsageError(
            f"{share.name}: {int((~torch.isfinite(scores)).sum())} scores are not finite"
        )
    # Ranks that run different layers at one time would exchange rows of different layers.
    layers = comm.all_gather_json(share.name, share.group) if share.size > 1 else [share.name]
    if set(layers) != {share.name}:
        raise UsageError(f"ranks that share experts are in different layers: {', '.join(layers)}")


def _check_arrival(share: ExpertShare, index: Tensor, groups: Groups) -> None:
    """UsageError unless as many rows came for each local expert as all ranks together sent."""
    sent = torch.bincount(index.reshape(-1), minlength=share.count)
    if share.size > 1:
        comm.all_reduce(sent, group=share.group)
    wanted = sent[share.first : share.first + share.rows].tolist()
    if wanted != groups.sizes:
        raise UsageError(
            f"{share.name}: {wanted} rows were sent to experts {share.first} and on, "
            f"{groups.sizes} came"
        )
