"""`MoE`: the layer that a model is written with.

Dimensions: ``batch`` any leading ones, ``tokens`` their product, ``hidden``, ``experts`` of all
ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_moe.dispatch import dispatch
from ds_moe.expert_load import ExpertLoad
from ds_moe.experts import Experts
from ds_moe.gating import TopKGate

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped
    from torch.distributed import ProcessGroup

    from ds_core.kernels import Kernels


class MoE(nn.Module):
    """A mixture of experts in the place of a feed-forward layer.

    hidden_size: of tokens.
    expert: a module of one argument ``[rows, hidden]``; each expert is a deep copy of it.
    num_experts: over all ranks.
    ep_size: over how many neighbouring data-parallel ranks experts are sharded; divides
        num_experts.

    k: experts per token.
    capacity_factor, eval_capacity_factor, min_capacity: see `ds_moe.gating`.
    use_residual: Residual MoE (DeepSpeed-MoE, section 4.1); every token also goes through one more
        copy of `expert`, and a learned weight mixes both.
    noisy_gate_policy: "RSample" or "Jitter", in training.

    drop_tokens: False: experts accept every choice, without capacity.
    use_rts: in top-1 gating a random choice of tokens stays where an expert is full, else the
        earliest.
    use_tutel: without effect, which a warning says.

    enable_expert_tensor_parallelism: `expert` is itself sharded over the mesh axis ``tp``. A
        parameter's attribute ``partition_dim`` says along which dimension, evenly and in one piece
        (-1: not at all), as Megatron-LM's layers have it; without one (or with a
        ``partition_stride``) it can be saved, but not loaded with another size of ``tp``. A weight
        of which ranks have a part of each half, gate and up, must not have one.
    top2_2nd_expert_sampling: noise for the second choice of top-2.
    drop_policy: of k > 2, see `ds_moe.gating.topk`.

    Raises UsageError for numbers that do not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        drop_policy: str = "probs",
    ) -> None:
        super().__init__()
        _check_divides(ep_size, num_experts)
        if use_tutel and comm.rank() == 0:
            warnings.warn(
                "MoE: use_tutel has no effect: the layer dispatches tokens itself", stacklevel=2
            )
        # What users and DeepSpeed's helpers read.
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.use_residual = use_residual
        self.expert_tensor_parallel = enable_expert_tensor_parallelism
        self.gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
            drop_policy,
        )
        self.experts = Experts(expert, self.num_local_experts, hidden_size)
        # The marks tell data parallelism that ranks have different values here, so that gradients
        # are not averaged over all of them.
        for param in self.experts.parameters():
            mark_expert(param, ep_size)
        if use_residual:
            self.mlp = copy.deepcopy(expert)
            self.coefficient = nn.Linear(hidden_size, 2)

        # Set by `bind`, for the time of an engine.
        self.group: ProcessGroup | None = None
        self.load: ExpertLoad | None = None

    @property
    def ds_sections(self) -> Mapping[str, Mapping[str, Any]]:
        """The section that loads the plugin and sets the size of its axis."""
        return {"expert_parallel": {"autoep_size": self.ep_size} if self.ep_size > 1 else {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A copy belongs to the same run: it shares the process group and the kernels, which cannot
        be copied.
        """
        memo |= {
            id(shared): shared
            for shared in (self.group, self.experts.kernels)
            if shared is not None
        }
        copied = memo[id(self)] = type(self).__new__(type(self))
        # torch.compile keeps its compiled call on the instance; a copy is compiled again.
        copied.__dict__.update(
            copy.deepcopy({k: v for k, v in vars(self).items() if k != "_compiled_call_impl"}, memo)
        )
        return copied

    def bind(self, group: ProcessGroup | None, kernels: Kernels) -> ExpertLoad:
        """Use the expert-parallel group and the kernels of this run; called by
        `ds_core.initialize`.

        Returns the object in which the layer counts its experts' load.
        """
        self.group = group
        self.experts.kernels = kernels
        self.load = ExpertLoad(self.num_experts)
        return self.load

    def unbind(self) -> None:
        """The engine ends."""
        self.group = self.load = self.experts.kernels = None

    def forward(
        self,
        hidden_states: Float[Tensor, "*batch hidden"],
        used_token: Shaped[Tensor, "*batch_of_tokens"] | None = None,
    ) -> tuple[Float[Tensor, "*batch hidden"], Float[Tensor, ""], Int[Tensor, " experts"]]:
        """The experts' output, the auxiliary loss, and the choices of each expert.

        used_token: one value per token, 0 for tokens that go nowhere (k=1).

        The auxiliary loss is to be added to the loss with a small factor. The choices, int64, are of
        this rank's tokens before dropping. Collective over the expert-parallel ranks.
        """
        if self.ep_size > 1 and (self.group is None or comm.world_size(self.group) != self.ep_size):
            raise UsageError(
                f"this MoE layer has 1/{self.ep_size} of {self.num_experts} experts; give the "
                "model to ds_core.initialize, which connects the ranks, before its forward"
            )
        tokens = hidden_states.reshape(-1, self.hidden_size)
        routing = self.gate(tokens, used_token)
        if self.load is not None and self.load.watched and self.training:
            self.load.add(routing.counts, routing.dropped(), routing.l_aux)
        # The dense expert of Residual MoE needs no routing: it is computed while rows are sent.
        dense: list[tuple[Tensor, Tensor]] = []

        def meanwhile() -> None:
            if self.use_residual:
                dense.append(self._dense(tokens))

        out = dispatch(
            tokens,
            routing.experts,
            routing.weights,
            self.experts,
            num_experts=self.num_experts,
            group=self.group,
            kernels=self.experts.kernels,
            meanwhile=meanwhile,
        )
        # out = experts x c_0 + dense x c_1, with c = softmax(W x) per token.
        for residual, mixing in dense:
            out = out * mixing[:, :1] + residual * mixing[:, 1:]
        return out.view(hidden_states.shape), routing.l_aux, routing.counts

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Weights may have the names that DeepSpeed's layer gives them; the layers below find
        ours."""
        index = 0 if self.group is None else comm.rank(self.group)
        take_deepspeed_names(
            state_dict,
            prefix,
            self.num_experts,
            index * self.num_local_experts,
            self.num_local_experts,
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _dense(
        self, tokens: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens 2"]]:
        """Residual MoE: the output of the expert that all tokens go through, and the two factors of
        the mixture.
        """
        mixing = torch.softmax(self.coefficient(tokens), dim=-1)
        residual = self.mlp(tokens)
        return residual[0] if isinstance(residual, tuple) else residual, mixing


def _check_divides(ep_size: int, num_experts: int) -> None:
    if ep_size < 1 or num_experts % ep_size:
        good = ", ".join(str(d) for d in range(1, num_experts + 1) if num_experts % d == 0)
        raise UsageError(f"ep_size {ep_size} does not divide num_experts {num_experts}; use {good}")


def mark_expert(param: nn.Parameter, ep_size: int) -> None:
    """Set the attributes by which other code recognizes expert parameters."""
    param.allreduce = False  # type: ignore[attr-defined]
    param.group_name = f"ep_size_{ep_size}"  # type: ignore[attr-defined]


def take_deepspeed_names(
    state_dict: dict[str, Any], prefix: str, experts: int, first: int, count: int
) -> None:
    """Give what is named ``deepspeed_moe.*`` below `prefix` the names that it has here.

    experts: of all ranks; first, count: those of this rank. ``deepspeed_experts.N`` counts either
    all of them, or this rank's.
    """
    begin = f"{prefix}deepspeed_moe."
    stacks: dict[str, dict[int, Tensor]] = {}
    for key in [k for k in state_dict if k.startswith(begin)]:
        rest = key.removeprefix(begin)
        value = state_dict.pop(key)
        number, _, name = rest.removeprefix("experts.deepspeed_experts.").partition(".")
        # Experts are separate modules there and rows of one parameter here; the gate's and the
        # dense expert's names only lose a prefix.
        if rest.startswith("experts.deepspeed_experts.") and number.isdigit():
            stacks.setdefault(name, {})[int(number)] = value
        else:
            state_dict[prefix + rest] = value
    for name, rows in stacks.items():
        # A full checkpoint has all experts, one of a rank only its own, numbered from 0.
        begin_at = first if len(rows) == experts else 0
        wanted = range(begin_at, begin_at + count)
        # Otherwise it stays missing, and load_state_dict reports it.
        if all(row in rows for row in wanted):
            state_dict[f"{prefix}experts.stacked.{name}"] = torch.stack(
                [rows[row] for row in wanted]
            )
