"""What AutoEP will do with one MoE block; errors are found here, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ds_core.entries import resolve
from ds_core.errors import ConfigError, Problem, UsageError
from ds_moe.autoep.expert_fn import gated
from ds_moe.autoep.experts import Act, ExpertShare, FusedExperts, ListedExperts
from ds_moe.autoep.routing import RouterRule

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_moe.autoep.presets import Preset
    from ds_moe.config import ExpertParallelConfig

ACTIVATIONS: Mapping[str, Act] = {
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
}
"""By the names that model configs have for them; for experts without an ``act_fn`` of their own."""


def config_error(ctx: Context, key: str, message: str, fix: str = "") -> ConfigError:
    """About one key of the section."""
    return ConfigError([Problem(f"expert_parallel.{key}", message, fix)], ctx.config.origin)


class BlockPlan:
    """One MoE block and how it is changed.

    config: the model's; None where it has none.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        preset: Preset,
        section: ExpertParallelConfig,
        config: Any,
        ctx: Context,
    ) -> None:
        # What is planned with.
        self.preset = preset
        self.section = section
        self.config = config
        self.ctx = ctx

        # The block, its child that has the experts, and the names of both in the model.
        self.name = name
        self.block = block
        self.experts: nn.Module = getattr(block, preset.experts)
        self.prefix = f"{name}.{preset.experts}"
        self._check_present()

        # Experts are modules in a list (`listed`), or stacked weights by name (`params`).
        self.listed = [c for n, c in self.experts.named_children() if n.isdecimal()]
        self.params = {} if self.listed else dict(self.experts.named_parameters())
        # Experts of the layer, and which of them are this rank's.
        self.count = self._count()
        self.share = self._share()

        # What an expert computes: a function, what it calls the weights, and the activation.
        self._arithmetic = resolve(preset.arithmetic)
        self._roles = self._listed_roles() if self.listed else self._fused_roles()
        # Listed experts that are called one by one bring their own activation.
        needs_act = not self.listed or section.use_grouped_mm
        self._act = (
            self._activation(self.listed[0] if self.listed else self.experts) if needs_act else None
        )

        # Names of the router, the experts, the shared experts and their gate.
        self.children = (preset.router, preset.experts, *self._shared())
        # Whether the model's block calls its experts as ours are called.
        self.hands_over = hands_over(self.experts)
        # How the block that replaces this one routes; None: the model's block stays.
        self.how = None if self.hands_over and not self._routes_otherwise() else self._routing()
        if self.how is not None:
            self._check_children()

    def error(self, key: str, message: str, fix: str = "") -> ConfigError:
        """An error that names the block, the problem and the fix."""
        return config_error(self.ctx, key, f"{self.prefix}: {message}", fix)

    def make_experts(self, share: ExpertShare) -> FusedExperts | ListedExperts:
        """What runs the experts of `share`: all of them, or this rank's once they are cut."""
        if self.listed:
            local = {
                number: self.listed[number]
                for number in range(share.first, share.first + share.rows)
            }
            return ListedExperts(share, local, self._roles, self._act, self._arithmetic)
        assert self._act is not None
        return FusedExperts(share, self.params, self._roles, self._act, self._arithmetic)

    # -- experts -----------------------------------------------------------------------------------

    def _check_present(self) -> None:
        if isinstance(self.experts, (FusedExperts, ListedExperts)):
            raise UsageError(
                f"{self.prefix} has only this rank's share of experts: the model is a copy of one "
                "that an engine divides; destroy that engine before the model is copied, or build "
                "the model again"
            )
        for name, param in self.experts.named_parameters():
            if param.numel() == 0:
                raise UsageError(
                    f"{self.prefix}.{name} has no elements here; AutoEP divides experts itself, so "
                    "build the model without zero.Init"
                )

    def _count(self) -> int:
        """The number of experts, which must agree with the model's config."""
        attribute = self.preset.num_experts
        configured = getattr(self.config, attribute, None)
        if configured is None and self.section.num_experts_attr is not None:
            raise self.error("num_experts_attr", f"the model's config has no {attribute!r}")
        # Counted from the modules or the weight, so that a wrong attribute is an error and not a
        # wrong cut.
        count = len(self.listed)
        if not self.listed:
            weight = getattr(self.experts, self.preset.w1, None)
            if not isinstance(weight, Tensor) or not weight.dim():
                have = ", ".join(n for n, _ in self.experts.named_parameters()) or "none"
                raise self.error(
                    "expert_w1",
                    f"there is no weight {self.preset.w1!r}",
                    f"name one of its parameters: {have}",
                )
            count = weight.shape[0]
        if configured is not None and configured != count:
            raise self.error(
                "num_experts_attr",
                f"{count} experts, but {attribute} of the model's config is {configured}",
            )
        size = self.section.autoep_size
        if count % size:
            good = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
            what = "is more than" if size > count else "does not divide"
            problem = f"{size} {what} the {count} experts of {self.name}"
            raise config_error(self.ctx, "autoep_size", problem, f"use {good}")
        return count

    def _share(self) -> ExpertShare:
        mesh = self.ctx.mesh
        section = self.section
        return ExpertShare(
            name=self.prefix,
            count=self.count,
            size=section.autoep_size,
            index=mesh.index("ep") if section.autoep_size > 1 else 0,
            group=mesh.group("ep"),
            apply=self.preset.apply,
            combine="legacy_bmm" if section.combine_impl == "legacy_bmm" else "weighted_sum",
            grouped=section.use_grouped_mm,
            check=section.validate_folding_routing,
        )

    def _fused_roles(self) -> dict[str, str]:
        """Stacked weights: name -> what the arithmetic calls it."""
        preset = self.preset
        size = self.share.size
        # A cut matrix is another matrix to an optimizer that works on whole tensors (LAMB's norms,
        # Muon).
        if size > 1 and self.ctx.grain not in ("element", None):
            raise config_error(
                self.ctx,
                "autoep_size",
                f"{size} cuts the stacked weights of {self.prefix}, and the optimizer takes each "
                f"of them as one {self.ctx.grain}",
                "use an optimizer that works element by element, such as AdamW, or 1",
            )
        roles = {
            preset.w1: "w1",
            preset.w2: "w2",
            **({preset.w3: "w3"} if preset.w3 is not None else {}),
        }
        if missing := [name for name in roles if name not in self.params]:
            key = f"expert_{roles[missing[0]]}"
            raise self.error(
                key, f"there is no weight {missing[0]!r}", f"there are {', '.join(self.params)}"
            )
        # A parameter of another first dimension (a norm before the experts, say) cannot be cut by
        # expert.
        for name, param in self.params.items():
            if "." in name or param.dim() == 0 or param.shape[0] != self.count:
                raise self.error(
                    "expert_pattern",
                    f"parameter {name!r} of shape {tuple(param.shape)} is not one of {self.count} "
                    "experts stacked",
                )
        # A plugin's arithmetic checks its own weights.
        if self._arithmetic is gated:
            weights = {role: self.params[name] for name, role in roles.items()}
            self._check_gated(weights, set(self.params) - set(roles))
        if buffers := [name for name, _ in self.experts.named_buffers()]:
            raise self.error(
                "expert_pattern", f"AutoEP does not know what buffers {', '.join(buffers)} are for"
            )
        return roles

    def _check_gated(self, weights: Mapping[str, Tensor], others: Iterable[str]) -> None:
        """Gate and up, then down, as [experts, out, in] without anything else."""
        w1 = weights["w1"]
        w2 = weights["w2"]
        # down is the one that says which width is hidden and which inner.
        hidden, inner = (w2.shape[1], w2.shape[2]) if w2.dim() == 3 else (0, 0)
        wide = inner if "w3" in weights else 2 * inner
        wanted = {"w1": (self.count, wide, hidden), "w3": (self.count, inner, hidden)}
        odd = [
            f"{role} {tuple(w.shape)}"
            for role, w in weights.items()
            if role != "w2" and w.shape != wanted[role]
        ]
        # Flags that the transformers library's experts carry where they are laid out in another
        # way.
        expected = {
            "is_transposed": False,
            "is_concatenated": True,
            "has_gate": True,
            "has_bias": False,
        }
        odd += [
            f"{key} {getattr(self.experts, key)}"
            for key, v in expected.items()
            if getattr(self.experts, key, v) != v
        ]
        odd += [f"parameter {name!r}" for name in sorted(others)]
        if odd or w1.dim() != 3 or w2.dim() != 3:
            raise self.error(
                "expert_w1",
                f"with expert_w2 of shape {tuple(w2.shape)}, [experts, hidden, inner], AutoEP "
                f"cannot use {', '.join(odd) or 'weights that are not 3-d'}",
                f"expert_w1 must be [experts, {'inner' if 'w3' in weights else '2 * inner'}, "
                "hidden] without biases; a preset of a plugin can bring its own arithmetic",
            )

    def _listed_roles(self) -> dict[str, str]:
        """Weights of experts that are modules: the same, of their linear children."""
        names = zip(self.preset.listed, ("w1", "w2", "w3"), strict=True)
        roles = {name: role for name, role in names if name is not None}
        if [n for n, _ in self.experts.named_children()] != [str(i) for i in range(self.count)]:
            raise self.error("expert_pattern", "its children are not just experts 0, 1, ...")
        for number, expert in enumerate(self.listed if self.share.grouped else ()):
            self._check_linear(number, expert, roles)
        return roles

    def _check_linear(self, number: int, expert: nn.Module, roles: Mapping[str, str]) -> None:
        """What can be stacked for a grouped product: linear children without bias, and no other
        parameters.
        """
        known = {f"{name}.weight" for name in roles}
        have = {name for name, _ in expert.named_parameters()}
        if have != known or not all(isinstance(getattr(expert, name), nn.Linear) for name in roles):
            raise self.error(
                "use_grouped_mm",
                f"expert {number} has parameters {', '.join(sorted(have))}; a grouped product "
                f"needs {', '.join(sorted(known))} of linear layers",
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
                f"there is no {self.preset.activation!r}, and hidden_act of the model's config is "
                f"{named}",
                f"use one of {', '.join(ACTIVATIONS)}, or a preset that names the activation's "
                "attribute",
            )
        return ACTIVATIONS[named]

    # -- routing -----------------------------------------------------------------------------------

    def _routes_otherwise(self) -> bool:
        """Whether keys of the config change the model's routing."""
        router = getattr(self.block, self.preset.router)
        # An attribute that names the number the model uses anyway changes nothing: the block stays.
        if self.section.top_k_attr is not None:
            theirs = next(
                (
                    v
                    for v in (getattr(m, "top_k", None) for m in (router, self.block))
                    if v is not None
                ),
                None,
            )
            if theirs != self._top_k(None):
                return True
        return bool(self.section.reroutes)

    def _routing(self) -> RouterRule:
        """The routing of a replaced block: from the config, else from the preset and the model's
        config.
        """
        preset = self.preset
        section = self.section
        # Noise on the router's input is the block's own code, which goes with the block.
        if getattr(self.block, "jitter_noise", 0):
            raise self.error(
                section.reroutes[0] if section.reroutes else "enabled",
                f"the block has jitter_noise {self.block.jitter_noise}, which a block of AutoEP's "
                "does not add",
                "set the model's router_jitter_noise to 0",
            )
        # Each rule in turn: the config's key, else the preset's value, else the attribute of the
        # model's config that it names.
        normalise = preset.normalise
        if isinstance(normalise, str):
            normalise = bool(getattr(self.config, normalise, False))
        scale = section.routed_scaling_factor
        if scale == "auto":
            scale = getattr(self.config, preset.scale, 1.0) if preset.scale is not None else 1.0
        groups = self._groups()
        top_k = self._top_k(groups)
        scale = float(scale) * section.route_scale
        return RouterRule(top_k, preset.score, normalise, scale, groups, preset.group_score)

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
                raise self.error(
                    "top_k",
                    f"the model's config has no {self.preset.top_k!r}",
                    "set top_k or top_k_attr",
                )
        # With limited groups a token sees only the experts of the groups that are kept.
        most = self.count if groups is None else self.count // groups[0] * groups[1]
        if top_k > most:
            raise self.error(
                "top_k", f"{top_k} experts per token of {most} that it may use", f"use 1 to {most}"
            )
        return int(top_k)

    def _groups(self) -> tuple[int, int] | None:
        """(groups, groups kept), or None."""
        section = self.section
        preset = self.preset
        if section.num_expert_groups is not None:
            assert section.num_limited_groups is not None
            found = (section.num_expert_groups, section.num_limited_groups)
        else:
            when = preset.groups_if
            # Some families have group attributes that count only with a certain method.
            if preset.groups is None or (
                when is not None and getattr(self.config, when[0], None) != when[1]
            ):
                return None
            count, kept = (getattr(self.config, attribute, None) for attribute in preset.groups)
            if count is None or kept is None:
                return None
            found = (int(count), int(kept))
        if self.count % found[0]:
            good = ", ".join(str(d) for d in range(1, self.count + 1) if self.count % d == 0)
            raise self.error(
                "num_expert_groups",
                f"{found[0]} does not divide {self.count} experts",
                f"use {good}",
            )
        return found

    # -- the block's other children ----------------------------------------------------------------

    def _shared(self) -> tuple[str | None, str | None]:
        """The shared experts and their gate; they must agree with the config."""
        section = self.section
        found = []
        asked = (
            ("shared_experts_pattern", self.preset.shared, section.has_shared_experts),
            ("shared_experts_gate_pattern", self.preset.shared_gate, None),
        )
        have = ", ".join(n for n, _ in self.block.named_children())
        for key, name, wanted in asked:
            there = name is not None and isinstance(getattr(self.block, name, None), nn.Module)
            if not there and (wanted or getattr(section, key) is not None) and wanted is not False:
                raise self.error(key, f"the block has no child {name!r}", f"it has {have}")
            if there and wanted is False:
                raise self.error(
                    "has_shared_experts",
                    f"it is false, but the block has a child {name!r}",
                    "leave the key out",
                )
            found.append(name if there else None)
        return found[0], found[1]

    def _check_children(self) -> None:
        """Raise ConfigError if the replacement would drop a trained parameter of the model's
        block."""
        # Children with parameters that the replacement would never call; the bias is used for the
        # choice.
        left = {n for n, c in self.block.named_children() if any(True for _ in c.parameters())}
        left |= {n for n, _ in self.block.named_parameters(recurse=False)} - {self.preset.bias}
        if unknown := sorted(left - set(self.children)):
            raise self.error(
                "shared_experts_pattern",
                f"a block of AutoEP's would not use {', '.join(unknown)}",
                "name it with shared_experts_pattern or shared_experts_gate_pattern",
            )


def hands_over(experts: nn.Module) -> bool:
    """Whether a block calls these experts with (tokens, chosen experts, scores)."""
    # The transformers library's names for fused experts: an interface by convention, so it is
    # recognized by them.
    names = list(inspect.signature(type(experts).forward).parameters)
    return names[2:4] == ["top_k_index", "top_k_weights"]
