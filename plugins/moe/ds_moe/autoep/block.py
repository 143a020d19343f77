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
    from ds_moe.autoep.plan import BlockPlan


class AutoEPMoELayer(nn.Module):
    """Router, experts and, where there are any, shared experts: the model's own children under
    their own names.

    plan: of the block; experts: what runs them. Takes [..., hidden] and returns its like, or a pair
    with the router's logits [tokens, experts].
    """

    def __init__(self, plan: BlockPlan, experts: nn.Module) -> None:
        super().__init__()
        block = plan.block
        for name, child in block.named_children():
            self.add_module(name, experts if name == plan.preset.experts else child)
        for name, param in block.named_parameters(recurse=False):
            self.register_parameter(name, param)
        kept = block.state_dict(keep_vars=True)
        for name, buffer in block.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in kept)
        assert plan.how is not None
        self._names = plan.children
        self._how = plan.how
        self._bias = plan.preset.bias
        self._pair = plan.preset.returns_logits
        self.training = block.training

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """See the class."""
        children: list[Any] = [None if n is None else getattr(self, n) for n in self._names]
        router, experts, shared, gate = children
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.logits(router, tokens, experts.num_experts)
        bias = getattr(router, self._bias, None)
        index, scores = route(
            logits, self._how, getattr(self, self._bias, None) if bias is None else bias
        )
        out = experts(tokens, index, scores)
        if shared is not None:
            more = shared(tokens)
            out = out + (more if gate is None else gate(tokens).sigmoid() * more)
        out = out.view_as(hidden_states)
        return (out, logits) if self._pair else out

    def logits(self, router: nn.Module, tokens: Tensor, experts: int) -> Tensor:
        """[tokens, experts].

        A router that keeps its logits to itself and has a weight alone is a linear layer.
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
                "AutoEP needs logits "
                f"of shape {(tokens.shape[0], experts)}, [tokens, experts], or a router that has a "
                "weight alone"
            )
        wide = torch.promote_types(weight.dtype, torch.float32)
        return nn.functional.linear(tokens.to(wide), weight.to(wide))
