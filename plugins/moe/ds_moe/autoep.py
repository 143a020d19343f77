"""AutoEP: find the MoE blocks of a model, leave each rank its share of their experts, and send tokens to them.

[Note: what is replaced] Where a block hands tokens, chosen experts and scores to a child that holds all experts (as
the transformers library's do), only that child is replaced; the model's own router and block go on running. Where the
config routes otherwise, or experts are a list that the block runs by hand, the block is replaced as well, by one with
the same children. Either way names stay, and stacked experts keep their very `nn.Parameter` objects, cut to this rank's
rows.

[Note: whose weights] Data parallelism starts from the first rank's weights. So do experts: they are sent from there
before they are cut.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.entries import resolve
from ds_core.errors import ConfigError, Problem, UsageError
from ds_core.slices import SLICES, Slice
from ds_moe import presets
from ds_moe.arithmetic import gated
from ds_moe.autoep_block import AutoEPMoELayer
from ds_moe.autoep_experts import Act, FusedExperts, ListedExperts, Share
from ds_moe.config import ExpertParallelConfig
from ds_moe.held import HELD
from ds_moe.presets import Preset
from ds_moe.routing import Routing

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["replace"]

log = logging.getLogger("ds_moe")

ACTIVATIONS: Mapping[str, Act] = {
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
}
"""By the names that model configs have for them; for experts without an ``act_fn`` of their own."""


def replace(model: nn.Module, ctx: Context) -> nn.Module:
    """The transform: `model` with the experts of its MoE blocks divided over ``ep``. Collective.

    Raises ConfigError when no block is found, or one does not fit the config.
    """
    section = ctx.config.section("expert_parallel")
    assert isinstance(section, ExpertParallelConfig)
    if not ctx.mesh.has("ep") or ctx.mesh.size("ep") != section.autoep_size:
        raise _error(ctx, "autoep_size", f"{section.autoep_size} needs a mesh axis of that size", "leave out mpu")
    if ctx.mesh.has("tp") and ctx.mesh.size("tp") > 1:
        raise _error(
            ctx,
            "enabled",
            f"AutoEP cannot be combined with tensor parallelism ({ctx.mesh.size('tp')} ranks)",
            "leave one of them out",
        )
    model_config = _model_config(model)
    preset = _with_overrides(_preset(section, model, ctx), section)
    blocks = _find(model, preset)
    _check_found(blocks, preset, ctx)
    for name, block in blocks.items():
        _Block(name, block, preset, section, model_config, ctx).install(model)
    if blocks and ctx.rank == 0:
        first = next(iter(blocks.values()))
        experts = getattr(first, preset.experts).share
        log.info(
            "AutoEP: %d MoE layers (%s), %d experts, %d on each of %d ranks",
            *(len(blocks), preset.name, experts.count, experts.rows, experts.size),
        )
    return model


def _error(ctx: Context, key: str, message: str, mend: str = "") -> ConfigError:
    return ConfigError([Problem(f"expert_parallel.{key}", message, mend)], ctx.config.origin)


# -- what to look for ----------------------------------------------------------------------------------------------


def _model_config(model: nn.Module) -> Any:
    """The model's own config, of its text part where there are several; None where it has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _preset(section: ExpertParallelConfig, model: nn.Module, ctx: Context) -> Preset:
    """The one that the config names, else the model type's, else, where patterns are given, a bare one."""
    if section.preset_model is not None:
        named = presets.find(section.preset_model)
        assert named is not None  # the section was checked
        return named
    configs = (getattr(model, "config", None), _model_config(model))
    types = [t for t in (getattr(c, "model_type", None) for c in configs) if isinstance(t, str) and t]
    found = presets.for_model_type(types)
    if found is None and section.moe_layer_pattern is None:
        kind = f"model type {types[0]!r}" if types else f"a {type(model).__name__} without config.model_type"
        raise _error(
            ctx,
            "preset_model",
            f"there is no preset for {kind}",
            f"name one ({', '.join(presets.names())}), or describe the blocks with moe_layer_pattern, router_pattern, "
            "expert_pattern, expert_w1 and expert_w2",
        )
    return found or Preset("custom")


def _with_overrides(preset: Preset, section: ExpertParallelConfig) -> Preset:
    """The preset with what the config says otherwise."""
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
    if "expert_w3" in section.model_fields_set:
        changes["w3"] = section.expert_w3
    if {"w1", "w2", "w3"} & set(changes):
        roles = zip(("w1", "w2", "w3"), preset.listed, strict=True)
        changes["listed"] = tuple(changes.get(role, name) for role, name in roles)
    if section.has_shared_experts is False:
        changes |= {"shared": None, "shared_gate": None}
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
        raise _error(
            ctx,
            "moe_layer_pattern",
            f"no module matches {preset.layers!r} and has children {preset.router!r} and {preset.experts!r} (preset "
            f"{preset.name})",
            "compare with model.named_modules(), and set moe_layer_pattern, router_pattern and expert_pattern",
        )


# -- one block -----------------------------------------------------------------------------------------------------


class _Block:
    """One MoE block while it is being replaced."""

    def __init__(
        self, name: str, block: nn.Module, preset: Preset, section: ExpertParallelConfig, config: Any, ctx: Context
    ) -> None:
        self.name, self.block, self.preset, self.section, self.config, self.ctx = (
            *(name, block, preset, section),
            *(config, ctx),
        )
        self.experts: nn.Module = getattr(block, preset.experts)
        self.prefix = f"{name}.{preset.experts}"
        self.listed = [c for n, c in self.experts.named_children() if n.isdecimal()]
        self.count = self._count()

    def install(self, model: nn.Module) -> None:
        """Put what AutoEP has in the place of the model's own."""
        by_itself = _hands_over(self.experts) and not self.section.reroutes
        shared = self._shared()
        how = None if by_itself else self._routing()
        share = self._share()
        new = self._listed(share) if self.listed else self._fused(share)
        new.train(self.experts.training)
        setattr(self.block, self.preset.experts, new)
        if how is None:
            return
        preset = self.preset
        self._check_children(shared)
        names = (preset.router, preset.experts, *shared)
        layer = AutoEPMoELayer(self.block, names, how, preset.bias, preset.returns_logits)
        parent, _, last = self.name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)

    def error(self, key: str, message: str, mend: str = "") -> ConfigError:
        """Which block, what, and the mend."""
        return _error(self.ctx, key, f"{self.prefix}: {message}", mend)

    def _count(self) -> int:
        """How many experts there are; what the model's config says must agree."""
        if isinstance(self.experts, (FusedExperts, ListedExperts)):
            raise UsageError(
                f"{self.prefix} was divided by an earlier initialize, and this rank has only its share; build the "
                "model anew"
            )
        attribute = self.preset.num_experts
        said = getattr(self.config, attribute, None)
        if said is None and self.section.num_experts_attr is not None:
            raise self.error("num_experts_attr", f"the model's config has no {attribute!r}")
        if self.listed:
            count = len(self.listed)
        else:
            weight = getattr(self.experts, self.preset.w1, None)
            if not isinstance(weight, Tensor):
                have = ", ".join(n for n, _ in self.experts.named_parameters()) or "none"
                raise self.error(
                    "expert_w1", f"there is no weight {self.preset.w1!r}", f"name one of its parameters: {have}"
                )
            count = weight.shape[0] if weight.dim() else 0
        for name, param in self.experts.named_parameters():
            if param.numel() == 0:
                raise UsageError(
                    f"{self.prefix}.{name} has no elements here; AutoEP divides experts itself, so build the model "
                    "without zero.Init"
                )
        if said is not None and said != count:
            raise self.error("num_experts_attr", f"{count} experts, but {attribute} of the model's config is {said}")
        size = self.section.autoep_size
        if count % size:
            good = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
            what = "is more than" if size > count else "does not divide"
            raise _error(self.ctx, "autoep_size", f"{size} {what} the {count} experts of {self.name}", f"use {good}")
        return int(count)

    def _share(self) -> Share:
        mesh, section = self.ctx.mesh, self.section
        size = section.autoep_size
        return Share(
            name=self.prefix,
            count=self.count,
            size=size,
            index=mesh.index("ep") if size > 1 else 0,
            group=mesh.group("ep"),
            apply=self.preset.apply,
            combine="legacy_bmm" if section.combine_impl == "legacy_bmm" else "weighted_sum",
            grouped=section.use_grouped_mm,
            check=section.validate_folding_routing,
        )

    # -- experts ---------------------------------------------------------------------------------------------

    def _fused(self, share: Share) -> nn.Module:
        """The experts when their weights are stacked."""
        preset = self.preset
        if share.size > 1 and self.ctx.grain in ("tensor", "matrix"):
            raise _error(
                self.ctx,
                "autoep_size",
                f"{share.size} cuts the stacked weights of {self.prefix}, and the optimizer takes each of them as one "
                f"{self.ctx.grain}",
                "use an optimizer that works element by element, such as AdamW, or 1",
            )
        roles = {preset.w1: "w1", preset.w2: "w2", **({preset.w3: "w3"} if preset.w3 is not None else {})}
        params = dict(self.experts.named_parameters())
        if missing := [name for name in roles if name not in params]:
            key = f"expert_{roles[missing[0]]}"
            raise self.error(key, f"there is no weight {missing[0]!r}", f"there are {', '.join(params)}")
        for name, param in params.items():
            if "." in name or param.dim() == 0 or param.shape[0] != self.count:
                raise self.error(
                    "expert_pattern",
                    f"parameter {name!r} of shape {tuple(param.shape)} is not one of {self.count} experts stacked",
                )
        arithmetic = resolve(preset.arithmetic)
        if arithmetic is gated:
            self._check_gated({role: params[name] for name, role in roles.items()}, set(params) - set(roles))
        if buffers := [name for name, _ in self.experts.named_buffers()]:
            raise self.error("expert_pattern", f"AutoEP does not know what buffers {', '.join(buffers)} are for")
        before = self.ctx.stash.get(SLICES)
        slices = dict(before) if before is not None else {}
        for name, param in params.items():
            whole = tuple(param.shape)
            self._cut(param, share)
            slices[f"{self.prefix}.{name}"] = Slice("ep", whole, share.first, share.rows)
        self.ctx.stash[SLICES] = slices
        return FusedExperts(share, params, roles, self._activation(self.experts), arithmetic)

    def _check_gated(self, weights: Mapping[str, Tensor], others: Iterable[str]) -> None:
        """Gate and up, then down, as [experts, out, in] without anything else."""
        w1, w2 = weights["w1"], weights["w2"]
        hidden, inner = (w2.shape[1], w2.shape[2]) if w2.dim() == 3 else (0, 0)
        wide = inner if "w3" in weights else 2 * inner
        wanted = {"w1": (self.count, wide, hidden), "w3": (self.count, inner, hidden)}
        odd = [f"{role} {tuple(w.shape)}" for role, w in weights.items() if role != "w2" and w.shape != wanted[role]]
        told = {"is_transposed": False, "is_concatenated": True, "has_gate": True, "has_bias": False}
        odd += [f"{key} {getattr(self.experts, key)}" for key, v in told.items() if getattr(self.experts, key, v) != v]
        odd += [f"parameter {name!r}" for name in sorted(others)]
        if odd or w1.dim() != 3 or w2.dim() != 3:
            raise self.error(
                "expert_w1",
                f"with expert_w2 of shape {tuple(w2.shape)}, [experts, hidden, inner], AutoEP cannot use "
                f"{', '.join(odd) or 'weights that are not 3-d'}",
                f"expert_w1 must be [experts, {'inner' if 'w3' in weights else '2 * inner'}, hidden] without biases; a "
                "preset of a plugin can bring an arithmetic of its own",
            )

    def _listed(self, share: Share) -> nn.Module:
        """The experts when each is a module."""
        names = dict(zip(self.preset.listed, ("w1", "w2", "w3"), strict=True))
        roles = {name: role for name, role in names.items() if name is not None}
        if [n for n, _ in self.experts.named_children()] != [str(i) for i in range(self.count)]:
            raise self.error("expert_pattern", "its children are not just experts 0, 1, ...")
        if share.grouped:
            for number, expert in enumerate(self.listed):
                self._check_linear(number, expert, roles)
        local = {}
        for number, expert in enumerate(self.listed):
            mine = share.first <= number < share.first + share.rows
            for param in expert.parameters():
                self._send(param)
            if mine:
                local[number] = expert
                for name, _ in (*expert.named_parameters(), *expert.named_buffers()):
                    self._hold(f"{self.prefix}.{number}.{name}")
        act = self._activation(self.listed[0]) if share.grouped else None
        return ListedExperts(share, local, roles, act, resolve(self.preset.arithmetic))

    def _check_linear(self, number: int, expert: nn.Module, roles: Mapping[str, str]) -> None:
        """What can be stacked for a grouped product: linear children without bias, and no other parameters."""
        known = {f"{name}.weight" for name in roles}
        have = {name for name, _ in expert.named_parameters()}
        if have != known or not all(isinstance(getattr(expert, name), nn.Linear) for name in roles):
            raise self.error(
                "use_grouped_mm",
                f"expert {number} has parameters {', '.join(sorted(have))}; a grouped product needs "
                f"{', '.join(sorted(known))} of linear layers",
                "name them with expert_w1, expert_w2 and expert_w3, or set use_grouped_mm to false",
            )

    def _activation(self, owner: nn.Module) -> Act:
        found = getattr(owner, self.preset.activation, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        named = str(getattr(self.config, "hidden_act", None))
        if named not in ACTIVATIONS:
            raise self.error(
                "expert_pattern",
                f"there is no {self.preset.activation!r}, and hidden_act of the model's config is {named}",
                f"use one of {', '.join(ACTIVATIONS)}, or a preset that names the activation's attribute",
            )
        return ACTIVATIONS[named]

    @torch.no_grad()
    def _cut(self, param: nn.Parameter, share: Share) -> None:
        """Leave this rank's rows of `param`, which stays the object it is."""
        whole = self._send(param)
        param.grad = None
        param.data = whole[share.first : share.first + share.rows].clone()

    @torch.no_grad()
    def _send(self, param: nn.Parameter) -> Tensor:
        """The first rank's values of `param`, which it takes over too."""
        mesh = self.ctx.mesh
        if mesh.size("dp") == 1 or param.is_meta:
            return param.data
        whole = param.data.to(self.ctx.accelerator.current_device()).contiguous()
        comm.broadcast(whole, src=mesh.ranks("dp")[0], group=mesh.group("dp"))
        param.data = whole
        return whole

    def _hold(self, name: str) -> None:
        self.ctx.stash[HELD] = {*(self.ctx.stash.get(HELD) or ()), name}

    # -- routing ---------------------------------------------------------------------------------------------

    def _routing(self) -> Routing:
        """What a block of ours does; from the config where it says so, else from the preset and the model's config."""
        preset, section = self.preset, self.section
        if getattr(self.block, "jitter_noise", 0):
            raise self.error(
                section.reroutes[0] if section.reroutes else "enabled",
                f"the block has jitter_noise {self.block.jitter_noise}, which a block of AutoEP's does not add",
                "set the model's router_jitter_noise to 0",
            )
        normalise = preset.normalise
        if isinstance(normalise, str):
            normalise = bool(getattr(self.config, normalise, False))
        scale = section.routed_scaling_factor
        if scale == "auto":
            scale = getattr(self.config, preset.scale, 1.0) if preset.scale is not None else 1.0
        groups = self._groups()
        top_k = self._top_k(groups)
        return Routing(top_k, preset.score, normalise, float(scale) * section.route_scale, groups, preset.group_score)

    def _top_k(self, groups: tuple[int, int] | None) -> int:
        top_k: Any = self.section.top_k
        if top_k == "auto":
            places = (
                (self.config, self.preset.top_k),
                (self.block, "top_k"),
                (getattr(self.block, self.preset.router), "top_k"),
            )
            top_k = next((v for v in (getattr(o, n, None) for o, n in places) if v is not None), 0)
            if not top_k:
                raise self.error("top_k", f"the model's config has no {self.preset.top_k!r}", "set top_k or top_k_attr")
        most = self.count if groups is None else self.count // groups[0] * groups[1]
        if top_k > most:
            raise self.error("top_k", f"{top_k} experts per token of {most} that it may use", f"use 1 to {most}")
        return int(top_k)

    def _groups(self) -> tuple[int, int] | None:
        """(groups, groups kept), or None."""
        section, preset = self.section, self.preset
        if section.num_expert_groups is not None:
            assert section.num_limited_groups is not None
            found = (section.num_expert_groups, section.num_limited_groups)
        else:
            when = preset.groups_if
            if preset.groups is None or (when is not None and getattr(self.config, when[0], None) != when[1]):
                return None
            count, kept = (getattr(self.config, attribute, None) for attribute in preset.groups)
            if count is None or kept is None:
                return None
            found = (int(count), int(kept))
        if self.count % found[0]:
            good = ", ".join(str(d) for d in range(1, self.count + 1) if self.count % d == 0)
            raise self.error("num_expert_groups", f"{found[0]} does not divide {self.count} experts", f"use {good}")
        return found

    def _shared(self) -> tuple[str | None, str | None]:
        """The block's children that all tokens pass, and that weighs what they give; those that the config names must
        be there."""
        found = []
        for key, name in (
            ("shared_experts_pattern", self.preset.shared),
            ("shared_experts_gate_pattern", self.preset.shared_gate),
        ):
            there = name is not None and isinstance(getattr(self.block, name, None), nn.Module)
            if name is not None and not there and getattr(self.section, key) is not None:
                have = ", ".join(n for n, _ in self.block.named_children())
                raise self.error(key, f"the block has no child {name!r}", f"it has {have}")
            found.append(name if there else None)
        return found[0], found[1]

    def _check_children(self, shared: tuple[str | None, str | None]) -> None:
        """A block of ours must not leave out anything that the model's block trains."""
        left = {n for n, c in self.block.named_children() if any(True for _ in c.parameters())}
        left |= {n for n, _ in self.block.named_parameters(recurse=False)} - {self.preset.bias}
        if unknown := sorted(left - {self.preset.router, self.preset.experts, *shared}):
            raise self.error(
                "shared_experts_pattern",
                f"a block of AutoEP's would not use {', '.join(unknown)}",
                "name it with shared_experts_pattern or shared_experts_gate_pattern",
            )


def _hands_over(experts: nn.Module) -> bool:
    """Whether a block calls these experts with (tokens, chosen experts, scores)."""
    names = list(inspect.signature(type(experts).forward).parameters)
    return names[2:4] == ["top_k_index", "top_k_weights"]
