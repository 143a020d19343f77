"""Trying out whether AutoEP computes what the model's own block does, before anything is changed.

A name or a preset that is a little wrong would train a model that is a little wrong. So random
tokens go through the model's block, and through its replacement, with all experts on this rank.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.comm import ALONE
from ds_moe.autoep.block import AutoEPMoELayer

if TYPE_CHECKING:
    from ds_moe.autoep.plan import BlockPlan

log = logging.getLogger("ds_moe")

TOKENS = 16


def try_out(plan: BlockPlan) -> None:
    """ConfigError when results differ and no key of the config changes the routing.

    A block that cannot be run here and now (its kernels are for another device, say) is not
    compared, with a warning.
    """
    # Without values there is nothing to compare.
    tensor = next(plan.experts.parameters())
    if tensor.is_meta:
        return
    # All experts on this rank, before any is cut: no rank needs another one to compare.
    share = dataclasses.replace(plan.share, size=1, index=0, group=ALONE, check=False)
    with _aside(plan.block, tensor.device):
        tokens = torch.randn(1, TOKENS, _hidden(plan), dtype=tensor.dtype, device=tensor.device)
        try:
            theirs, ours = _pair(plan, share, tokens)
            if not bool(torch.isfinite(theirs).all()):
                raise ValueError("with these weights it gives numbers that are not finite")
        except Exception as error:  # any error of the model's code
            log.warning(
                "AutoEP could not try %s out: %s: %s", plan.name, type(error).__name__, error
            )
            return
    off = float((theirs - ours).abs().max())
    size = float(theirs.abs().max())
    if off <= _within(tensor.dtype) * max(size, 1e-30):
        return
    problem = (
        "on random tokens AutoEP gives other numbers than the model (they differ by "
        f"{off:.2g} of {size:.2g})"
    )
    keys = [
        *plan.section.reroutes,
        *(("score_apply",) if plan.section.score_apply != "auto" else ()),
    ]
    keys += ["top_k_attr"] if plan.hands_over and plan.section.top_k_attr is not None else []
    # Keys that change the routing on purpose make a difference that is meant: a warning, not an
    # error.
    if plan.how is None or not keys:
        raise plan.error(
            "preset_model" if plan.section.moe_layer_pattern is None else "moe_layer_pattern",
            problem,
            "say what the block does: expert_w1, expert_w2 and expert_w3, score_func, score_apply, "
            "route_norm, route_scale, num_expert_groups; or use a preset with its own "
            "arithmetic",
        )
    if plan.ctx.rank == 0:
        log.warning("%s: %s, as %s may say", plan.prefix, problem, ", ".join(keys))


def _pair(plan: BlockPlan, share: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the model gives for `tokens`, and what AutoEP will."""
    flat = tokens.flatten(0, 1)
    if plan.how is None:
        # The block stays, and with it the routing: only the experts are compared, on random choices.
        index = torch.rand(TOKENS, plan.count, device=tokens.device).argsort(-1)[
            :, : min(2, plan.count)
        ]
        scores = torch.rand(index.shape, dtype=tokens.dtype, device=tokens.device)
        trial = plan.make_experts(dataclasses.replace(share, apply="post"))
        return plan.experts(flat, index, scores).double(), trial(flat, index, scores).double()
    layer = AutoEPMoELayer(plan, plan.make_experts(share))
    logits = layer.logits(getattr(plan.block, plan.preset.router), flat, plan.count)
    # Equal logits choose any experts: results would differ by chance.
    if float(logits.std(dim=-1).min()) < 1e-6:
        raise ValueError("with these weights the router finds all experts equally good")
    theirs = plan.block(tokens)
    ours = layer(tokens)
    firsts = [out[0] if isinstance(out, tuple) else out for out in (theirs, ours)]
    return firsts[0].double(), firsts[1].double()


def _hidden(plan: BlockPlan) -> int:
    """The width of tokens."""
    router = getattr(plan.block, plan.preset.router)
    return int(next(p for p in router.parameters() if p.dim() == 2).shape[1])


def _within(dtype: torch.dtype) -> float:
    """How far results may be apart, of the largest."""
    return max(1e-4, 8 * torch.finfo(dtype).eps)


@contextmanager
def _aside(block: nn.Module, device: torch.device) -> Iterator[None]:
    """No gradients, no noise, and nothing is left behind: modes and random states are as they
    were."""
    modes: list[tuple[nn.Module, bool]] = [(m, m.training) for m in block.modules()]
    block.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type != "cpu" else []):
            torch.manual_seed(0)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
