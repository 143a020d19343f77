"""Replacement of a full MoE block, for models that call experts one by one, or configs that change
the routing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_moe.autoep.routing import route

if TYPE_CHECKING:
    from jaxtyping import Float

    from ds_moe.autoep.plan import BlockPlan


class AutoEPMoELayer(nn.Module):
    """Router, experts and, where there are any, shared experts: the model's own children under
    their own names.

    plan: of the block.
    experts: the module that runs them.
    """

    def __init__(self, plan: BlockPlan, experts: nn.Module) -> None:
        super().__init__()
        block = plan.block
        for name, child in block.named_children():
            self.add_module(name, experts if name == plan.preset.experts else child)
        # Parameters stay the objects that the model and its optimizer have, under the same names.
        for name, param in block.named_parameters(recurse=False):
            self.register_parameter(name, param)
        # Only state_dict shows, by public API, which buffers are not persistent.
        kept = block.state_dict(keep_vars=True)
        for name, buffer in block.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in kept)
        assert plan.how is not None
        self._names = plan.children
        self._how = plan.how
        self._bias = plan.preset.bias
        self._pair = plan.preset.returns_logits
        self.training = block.training

    def forward(
        self, hidden_states: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch hidden"] | tuple[Tensor, Tensor]:
        """The block's output, or a pair with the router's logits [tokens, experts]."""
        children: list[Any] = [None if n is None else getattr(self, n) for n in self._names]
        router, experts, shared, gate = children
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.logits(router, tokens, experts.num_experts)
        # DeepSeek-V3's bias for load balance: some models keep it in the router, some in the block.
        bias = getattr(router, self._bias, None)
        index, scores = route(
            logits, self._how, getattr(self, self._bias, None) if bias is None else bias
        )
        # Routed experts, plus shared ones that every token passes, with a gate of their own in some
        # families.
        out = experts(tokens, index, scores)
        if shared is not None:
            more = shared(tokens)
            out = out + (more if gate is None else gate(tokens).sigmoid() * more)
        out = out.view_as(hidden_states)
        return (out, logits) if self._pair else out

    def logits(
        self, router: nn.Module, tokens: Float[Tensor, "tokens hidden"], experts: int
    ) -> Float[Tensor, "tokens experts"]:
        """The router's logits.

        A router that does not return its logits, and has nothing but a weight, is a linear layer.
        """
        given = router(tokens)
        out: Tensor = given[0] if isinstance(given, tuple) else given
        if out.is_floating_point() and out.shape == (tokens.shape[0], experts):
            return out
        names = [name for name, _ in router.named_parameters()]
        weight: Any = router.weight if names == ["weight"] else None
        if weight is None or weight.shape != (experts, tokens.shape[1]):
            raise UsageError(
                f"router {self._names[0]!r} gave a {out.dtype} tensor of shape {tuple(out.shape)}; "
                f"AutoEP needs logits of shape {(tokens.shape[0], experts)}, [tokens, experts], or a "
                "router that has a weight alone"
            )
        # In at least fp32, as `ds_moe.gating` computes logits.
        wide = torch.promote_types(weight.dtype, torch.float32)
        return nn.functional.linear(tokens.to(wide), weight.to(wide))
