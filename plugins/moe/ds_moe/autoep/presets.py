"""What AutoEP knows of model families, as data; how a distribution adds one (torch-free).

A preset names attributes and states facts; no code of it runs. Another distribution adds one with
an entry point of the group ``ds_moe.autoep.presets``, whose name is the preset's and whose value names a
`Preset`:

    [project.entry-points."ds_moe.autoep.presets"]
    my_family = "my_package.moe:PRESET"

One that is not installed can be named by ``expert_parallel.preset_model`` itself, as
``"my_package.moe:PRESET"``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from ds_core.entries import Ref, resolve
from ds_core.errors import PluginError

log = logging.getLogger("ds_moe")

GROUP = "ds_moe.autoep.presets"
"""The entry-point group in which distributions offer presets."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A family of models whose MoE blocks look alike."""

    name: str
    model_types: tuple[str, ...] = ()
    """``model_type`` of the model configs it is for."""

    # The block and its children.
    layers: str = r"(?:.*\.)?layers\.\d+\.mlp"
    """A regular expression that matches the full name of a MoE block; layers without router and
    experts are passed over."""
    router: str = "gate"
    experts: str = "experts"
    shared: str | None = None
    """Shared experts, which count where the block has them."""
    shared_gate: str | None = None
    """Their gate, likewise."""

    # Experts in one module are 3-d parameters of shape [experts, ...].
    w1: str = "gate_up_proj"
    """Gate, or gate and up stacked."""
    w2: str = "down_proj"
    """Down."""
    w3: str | None = None
    """Up; None: `w1` has both."""
    # Experts in a list of modules have linear children.
    listed: tuple[str, str, str | None] = ("gate_proj", "down_proj", "up_proj")
    """(gate, down, up; None: the first is gate and up in one)."""
    arithmetic: Ref = "ds_moe.autoep.expert_fn:gated"
    """The function that an expert computes, see `ds_moe.autoep.expert_fn`."""

    # Attributes of the model config.
    num_experts: str = "num_experts"
    top_k: str = "num_experts_per_tok"

    # Routing: matters where AutoEP replaces the block, see `ds_moe.autoep.transform`.
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of router logits."""
    normalise: bool | str = True
    """Divide the chosen scores by their sum: yes, no, or an attribute of the config that says."""
    scale: str | None = None
    """An attribute of the config by which combined scores are multiplied."""
    groups: tuple[str, str] | None = None
    """Attributes for (number of groups, groups kept) in group-limited routing."""
    groups_if: tuple[str, str] | None = None
    """(attribute, value) without which there are no groups."""
    group_score: Literal["max", "top2"] = "max"
    """How a group is rated: by its best expert, or its two best together."""

    # What the block does with scores and results.
    apply: Literal["pre", "post"] = "post"
    """Whether scores multiply the experts' output ("post") or input ("pre")."""
    activation: str = "act_fn"
    """Attribute of the experts."""
    bias: str = "e_score_correction_bias"
    """Attribute of the router, or the block, that is added to scores for the choice alone."""
    returns_logits: bool = False
    """The block returns (output, router logits) and not just the output."""


BUILT_IN: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("mixtral", ("mixtral",), num_experts="num_local_experts", listed=("w1", "w2", "w3")),
        Preset(
            "qwen3_moe",
            ("qwen3_moe", "qwen2_moe"),
            shared="shared_expert",
            shared_gate="shared_expert_gate",
            normalise="norm_topk_prob",
        ),
        Preset(
            "qwen3_5_moe",
            ("qwen3_5_moe", "qwen3_5_moe_text"),
            shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
        Preset(
            "deepseek_v2",
            ("deepseek_v2",),
            shared="shared_experts",
            num_experts="n_routed_experts",
            # Its config has norm_topk_prob too, which its router does not heed.
            normalise=False,
            scale="routed_scaling_factor",
            groups=("n_group", "topk_group"),
            groups_if=("topk_method", "group_limited_greedy"),
        ),
        Preset(
            "deepseek_v3",
            ("deepseek_v3",),
            shared="shared_experts",
            num_experts="n_routed_experts",
            score="sigmoid",
            normalise="norm_topk_prob",
            scale="routed_scaling_factor",
            groups=("n_group", "topk_group"),
            group_score="top2",
        ),
    )
}
"""The five families of the documents."""


def names() -> list[str]:
    """Every preset that can be named."""
    return sorted({*BUILT_IN, *_find_installed()})


def find(name: str) -> Preset | None:
    """The preset called `name`, or that a reference ``"package.module:attribute"`` means; None:
    there is none.

    Raises PluginError when the entry point is not a preset, or two distributions offer it.
    """
    if ":" in name:
        return _load(name, name)
    offers = _find_installed().get(name)
    if offers is None:
        return BUILT_IN.get(name)
    if name in BUILT_IN or len(offers) > 1:
        who = [f"{dist} ({ref})" for dist, ref in offers] + (
            ["dscore-moe"] if name in BUILT_IN else []
        )
        raise PluginError(
            f"MoE preset {name!r} is offered by {' and '.join(who)}; uninstall one, or name yours "
            "otherwise"
        )
    return _load(offers[0][1], name)


def for_model_type(model_types: Iterable[str]) -> Preset | None:
    """The preset for one of these model types; None if there is none.

    Raises PluginError when there are two.

    A preset that cannot be loaded is skipped with a warning, since the config does not name it.
    """
    wanted = set(model_types)
    found = []
    for name in names():
        try:
            preset = find(name)
        except PluginError as error:
            log.warning("%s; it is not considered", error)
            continue
        if preset is not None and wanted & set(preset.model_types):
            found.append(preset)
    if len(found) > 1:
        raise PluginError(
            f"MoE presets {' and '.join(repr(p.name) for p in found)} are both for model type "
            f"{'/'.join(sorted(wanted))}; choose with expert_parallel.preset_model"
        )
    return found[0] if found else None


def _find_installed() -> dict[str, list[tuple[str, str]]]:
    """Name -> (distribution, reference) of what other distributions offer; nothing is imported."""
    if os.environ.get("DS_PLUGINS_DISABLE_AUTOLOAD") == "1":
        return {}
    found: dict[str, list[tuple[str, str]]] = {}
    for entry in metadata.entry_points(group=GROUP):
        offer = (entry.dist.name if entry.dist is not None else "?", entry.value)
        if offer not in found.setdefault(entry.name, []):
            found[entry.name].append(offer)
    return {name: sorted(offers) for name, offers in sorted(found.items())}


def _load(ref: str, name: str) -> Preset:
    preset = resolve(ref)
    if not isinstance(preset, Preset):
        raise PluginError(
            f"MoE preset {name!r}: {ref} is a {type(preset).__name__}, not a ds_moe.autoep.presets.Preset"
        )
    return preset
