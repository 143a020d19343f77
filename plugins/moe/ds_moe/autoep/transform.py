"""AutoEP: find the MoE blocks of a model, leave each rank its share of their experts, and send
tokens to them.

[Note: what is replaced] Where a block hands tokens, chosen experts and scores to a child that holds
all experts (as the transformers library's do), only that child is replaced; the model's own router
and block go on running. Where the config routes otherwise, or the block loops over a list of
experts, the block is replaced as well, by one with the same children. Either way names stay, and
stacked experts keep their very `nn.Parameter` objects, cut to this rank's rows.

[Note: whose weights] Data parallelism starts from the first rank's weights. So do experts: they are
sent from there before they are cut.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_run_state.changes import changing
from torch import nn

from ds_core import comm
from ds_core.undo import Undo
from ds_moe.autoep import presets
from ds_moe.autoep.install import install
from ds_moe.autoep.plan import BlockPlan, config_error
from ds_moe.autoep.presets import Preset
from ds_moe.autoep.trial import try_out
from ds_moe.config import ExpertParallelConfig

if TYPE_CHECKING:
    from ds_core.context import Context

log = logging.getLogger("ds_moe")


def replace(model: nn.Module, ctx: Context) -> nn.Module:
    """The transform: `model` with the experts of its MoE blocks divided over ``ep``. Collective.

    Raises ConfigError when no block is found, or one does not fit the config.
    """
    section = ctx.config.section(ExpertParallelConfig)
    assert section is not None
    if not ctx.mesh.has("ep") or ctx.mesh.size("ep") != section.autoep_size:
        raise config_error(
            ctx,
            "autoep_size",
            f"{section.autoep_size} needs a mesh axis of that size",
            "leave out mpu",
        )
    if ctx.mesh.has("tp") and ctx.mesh.size("tp") > 1:
        raise config_error(
            ctx,
            "enabled",
            f"AutoEP cannot be combined with tensor parallelism ({ctx.mesh.size('tp')} ranks)",
            "leave one of them out",
        )
    model_config = _model_config(model)
    # 1. What to look for: the preset, changed by the config.
    preset = _with_overrides(_preset(section, model, ctx), section)
    # 2. The blocks, on this rank; an error only where no rank has any.
    blocks = _find(model, preset)
    _check_found(blocks, preset, ctx)
    # 3. What will be done with each; raises before anything is changed.
    plans = [
        BlockPlan(name, block, preset, section, model_config, ctx) for name, block in blocks.items()
    ]
    # 4. The same numbers as before? Blocks of one class with one way to route behave the same, so
    # one of each is tried.
    for plan in {(type(p.block), type(p.experts), p.how): p for p in reversed(plans)}.values():
        try_out(plan)
    # 5. The change. Its undo is one step: the model's own blocks need full weights.
    undo = Undo()
    ctx.undo(undo.run, collective=True)
    with changing(model, undo):
        for plan in plans:
            install(plan, model, undo)
    if plans and ctx.rank == 0:
        share = plans[0].share
        log.info(
            "AutoEP: %d MoE layers (%s), %d experts, %d on each of %d ranks",
            *(len(plans), preset.name, share.count, share.rows, share.size),
        )
    return model


# -- what to look for ------------------------------------------------------------------------------


def _model_config(model: nn.Module) -> Any:
    """The model's own config, of its text part where there are several; None where it has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _preset(section: ExpertParallelConfig, model: nn.Module, ctx: Context) -> Preset:
    """The preset that the config names, else that of the model type, else an empty one if patterns
    are given.
    """
    if section.preset_model is not None:
        named = presets.find(section.preset_model)
        assert named is not None  # the section was checked
        return named
    configs = (getattr(model, "config", None), _model_config(model))
    types = [
        t for t in (getattr(c, "model_type", None) for c in configs) if isinstance(t, str) and t
    ]
    found = presets.for_model_type(types)
    if found is None and section.moe_layer_pattern is None:
        kind = (
            f"model type {types[0]!r}"
            if types
            else f"a {type(model).__name__} without config.model_type"
        )
        raise config_error(
            ctx,
            "preset_model",
            f"there is no preset for {kind}",
            f"name one ({', '.join(presets.names())}), or describe the blocks with "
            "moe_layer_pattern, router_pattern, expert_pattern, expert_w1 and expert_w2",
        )
    return found or Preset("custom")


def _with_overrides(preset: Preset, section: ExpertParallelConfig) -> Preset:
    """The preset, changed by the keys of the config."""
    given: dict[str, Any] = {
        "layers": section.moe_layer_pattern,
        "router": section.router_pattern,
        "experts": section.expert_pattern,
        "shared": section.shared_experts_pattern,
        "shared_gate": section.shared_experts_gate_pattern,
        "num_experts": section.num_experts_attr,
        "top_k": section.top_k_attr,
        "w1": section.expert_w1,
        "w2": section.expert_w2,
        "score": None if section.score_func == "auto" else section.score_func,
        "apply": None if section.score_apply == "auto" else section.score_apply,
        "normalise": section.route_norm,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    # null is a value of this key (gate and up in one), so whether it was given counts.
    if "expert_w3" in section.model_fields_set:
        changes["w3"] = section.expert_w3
    # The same three keys name the linear children of listed experts.
    if {"w1", "w2", "w3"} & set(changes):
        roles = zip(("w1", "w2", "w3"), preset.listed, strict=True)
        changes["listed"] = tuple(changes.get(role, name) for role, name in roles)
    return dataclasses.replace(preset, **changes)


def _find(model: nn.Module, preset: Preset) -> dict[str, nn.Module]:
    """The blocks by name: what the pattern matches and has a router and experts."""
    pattern = re.compile(preset.layers)
    return {
        name: module
        for name, module in model.named_modules()
        if pattern.fullmatch(name)
        and isinstance(getattr(module, preset.router, None), nn.Module)
        and isinstance(getattr(module, preset.experts, None), nn.Module)
    }


def _check_found(blocks: Mapping[str, nn.Module], preset: Preset, ctx: Context) -> None:
    """Some rank must have found a block (a pipeline stage may have none)."""
    found = len(blocks)
    if ctx.world_size > 1:
        found = sum(comm.all_gather_json(found))
    if not found:
        raise config_error(
            ctx,
            "moe_layer_pattern",
            f"no module matches {preset.layers!r} and has children {preset.router!r} and "
            f"{preset.experts!r} (preset {preset.name})",
            "compare with model.named_modules(), and set moe_layer_pattern, router_pattern and "
            "expert_pattern",
        )
