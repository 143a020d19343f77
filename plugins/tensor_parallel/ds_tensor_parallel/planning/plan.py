"""The plan of a model: which of its layers are divided, and where each is cut.

[Note: sources] In this order, the first that has rules for a layer counts: rules of the user's
(``layer_specs``) or the preset that the user names; the model's own ``tp_plan``; the preset of its
type; heuristics. Of the last three only one is used, so that the two sides of a pair come from one
source.

[Note: one division for a pair] A row-parallel layer must be cut as the layers that give it its
input are. So lengths inside an attention are cut into heads (the attention says how many), all
others at multiples of the grain.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_core.errors import ConfigError, Problem
from ds_tensor_parallel.layers.attention import Heads, heads_of
from ds_tensor_parallel.layers.embedding import check_embedding
from ds_tensor_parallel.layers.linear import is_linear, is_plain, is_transposed, widths
from ds_tensor_parallel.planning import presets, styles
from ds_tensor_parallel.planning.division import Division
from ds_tensor_parallel.planning.heuristics import ends_with, guess
from ds_tensor_parallel.planning.rules import Kind, Rule

if TYPE_CHECKING:
    from ds_tensor_parallel.config import LayerSpec, TensorParallelConfig

CUT = (Kind.COLUMN, Kind.ROW, Kind.VOCABULARY, Kind.EMBEDDING, Kind.HEADS)


@dataclasses.dataclass(slots=True)
class Plan:
    """How a model is divided."""

    rules: dict[str, Rule]
    """By name of a module or a parameter."""
    divisions: dict[str, Division]
    """By the same names, of those that are cut."""
    attentions: dict[str, Heads]
    """By name, the heads of attention modules that are divided."""
    whole: dict[str, str]
    """Linear layers that no rule is for, or that cannot be divided, and why."""
    source: str
    """Where default rules are from, for messages."""
    unmatched: list[int] = dataclasses.field(default_factory=list)
    """The numbers of `layer_specs` whose patterns match no parameter here."""
    absent: list[str] = dataclasses.field(default_factory=list)
    """The names of `injection_policy_tuple` that no linear layer here has."""


class Planner:
    """Makes the plan of one model."""

    def __init__(
        self, model: nn.Module, section: TensorParallelConfig, ranks: int, origin: str
    ) -> None:
        self.section = section
        self.ranks = ranks
        self.origin = origin
        self.model = model
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.types = _model_types(model)
        self.plan = Plan({}, {}, {}, {}, "")

    def make(self) -> Plan:
        """See `make_plan`."""
        # 1. Rules, in the order of [Note: sources]: the first for a layer counts. Hand-written
        # layers get one only to keep the other sources away from them.
        rules = self.plan.rules
        for name, module in self.modules.items():
            if isinstance(module, _hand_written()):
                rules[name] = Rule(Kind.WHOLE, source="the layer itself")
        if self.section.partition_config is not None:
            self._specs(self.section.partition_config.layer_specs)
        if self.section.partition_config is None or self.section.partition_config.use_default_specs:
            self._defaults()
        # 2. Tied weights must have one cut.
        self._tie()
        rules = self.plan.rules = {
            n: r for n, r in rules.items() if not isinstance(self.modules.get(n), _hand_written())
        }
        # 3. Where each layer is cut.
        self._divide()
        linears = {
            n
            for n, m in self.modules.items()
            if is_linear(m) and not isinstance(m, _hand_written())
        }
        # 4. What was left out, for messages and the strict mode.
        given = self.section.injection_policy_tuple or ()
        self.plan.absent = [
            end for end in given if not any(ends_with(name, end) for name in linears)
        ]
        for name in sorted(linears - set(rules)):
            self.plan.whole.setdefault(name, "no rule is for it")
        if self.section.rules.strict_mode and (
            left := [n for n in self.plan.whole if n not in rules]
        ):
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise self._error(
                "partition_config.strict_mode",
                f"linear layers without a rule: {shown}",
                "add layer_specs for them (partition_type skip leaves a layer whole), or set "
                "strict_mode false",
            )
        return self.plan

    # -- where rules come from ---------------------------------------------------------------------

    def _specs(self, specs: list[LayerSpec]) -> None:
        """Rules of the user's, which are about names of parameters."""
        ours = [
            spec.model_types is None
            or bool(set(self.types) & {t.lower() for t in spec.model_types})
            for spec in specs
        ]
        used = {number for number, is_ours in enumerate(ours) if not is_ours}
        for name, param in self.parameters.items():
            found = [
                n
                for n, s in enumerate(specs)
                if ours[n] and any(re.match(p, name) for p in s.patterns)
            ]
            if not found:
                continue
            used.update(found)
            spec = specs[found[0]]
            owner = name.rpartition(".")[0]
            layer = self.modules[owner]
            divisible = is_linear(layer) or isinstance(layer, nn.Embedding)
            sums = spec.partition_type == "skip"
            # A rule for the layer where there is one to convert; else for the parameter itself
            # (stacked experts).
            target = owner if divisible or (sums and param.dim() < 3) else name
            self.plan.rules.setdefault(target, self._rule(spec, found[0], layer, param))
        self.plan.unmatched = [number for number in range(len(specs)) if number not in used]

    def _rule(self, spec: LayerSpec, number: int, layer: nn.Module, param: nn.Parameter) -> Rule:
        source = f"layer_specs[{number}]"
        if spec.partition_type == "skip":
            return Rule(Kind.SUM_GRADIENT if spec.grad_allreduce else Kind.WHOLE, source=source)
        if isinstance(layer, nn.Embedding):
            dim = (
                spec.partition_dim
                if spec.partition_dim is not None
                else self.section.rules.embedding_partition_dim
            )
            return Rule(Kind.EMBEDDING if dim else Kind.VOCABULARY, source=source)
        row = spec.partition_type == "row"
        dim = spec.partition_dim if spec.partition_dim is not None else int(row)
        # A list: lengths of fused matrices; a number: so many equal ones; -1: one.
        entry = spec.shape[dim] if spec.shape is not None else 1
        segments: int | tuple[int, ...] = (
            tuple(entry) if isinstance(entry, list) else 1 if entry == -1 else entry
        )
        gather = spec.gather_output
        return Rule(
            Kind.ROW if row else Kind.COLUMN, segments, spec.partition_dim, gather, source=source
        )

    def _defaults(self) -> None:
        """Rules of the preset, the model's plan, or heuristics, for what has none."""
        names = [*self.modules, *self.parameters]
        try:
            if self.section.preset_model is not None:
                found = self._preset(self.section.preset_model, names)
            else:
                found = self._rules_of_plan(names)
        except ValueError as error:
            raise self._error(
                "", str(error), "write the rules as partition_config.layer_specs"
            ) from error
        for name, rule in found.items():
            self.plan.rules.setdefault(name, rule)
        self.plan.source = next((rule.source for rule in found.values()), "")

    def _preset(self, name: str, names: list[str]) -> Mapping[str, Rule]:
        """The rules of the preset that the user names.

        ConfigError where it is for another family than the model's.
        """
        # What is known of the model without the user: its plan, or the preset of its type.
        own = presets.for_model_types(self.types)
        known: Mapping[str, Rule] = styles.rules_of_plan(styles.plan_of(self.model), names, "")
        if own is not None:
            known = own.choose(names, "")
        fit = {n: p.choose(names, f"preset {n}") for n, p in presets.BUILT_IN.items()}
        if known and name not in (fit := {n: r for n, r in fit.items() if self._alike(r, known)}):
            use = f"use {' or '.join(fit)}, or leave it out" if fit else "leave it out"
            why = f"{name!r} is for another family than this model, whose type is {self.types[0]!r}"
            raise self._error(
                "preset_model", why, f"{use}: the model is known by its type or its tp_plan"
            )
        return presets.BUILT_IN[name].choose(names, f"preset {name}")

    def _alike(self, rules: Mapping[str, Rule], known: Mapping[str, Rule]) -> bool:
        """Whether where both divide linear layers beside each other, they divide the same ones.

        A part of them is wrong without an error: queries that are divided, and keys that are not.
        """
        cut = [
            {
                n: r.kind
                for n, r in some.items()
                if n in self.modules and is_linear(self.modules[n]) and r.kind in CUT
            }
            for some in (rules, known)
        ]
        # Compared only inside modules that both divide: one may know more parts of the model than
        # the other.
        parents = set.intersection(*({name.rpartition(".")[0] for name in some} for some in cut))
        inside = [
            {n: kind for n, kind in some.items() if n.rpartition(".")[0] in parents} for some in cut
        ]
        return bool(parents) and inside[0] == inside[1]

    def _rules_of_plan(self, names: list[str]) -> Mapping[str, Rule]:
        found = styles.rules_of_plan(styles.plan_of(self.model), names, "the model's tp_plan")
        # A plan without rows covers only a part, such as the output head.
        if any(rule.kind is Kind.ROW for rule in found.values()):
            return found
        preset = presets.for_model_types(self.types)
        if preset is not None:
            found = preset.choose(names, f"preset {preset.name}")
        else:
            rows = self.section.injection_policy_tuple or ()
            found = guess(self.model, rows, "injection_policy_tuple" if rows else "heuristics")
        source = next((rule.source for rule in found.values()), "")
        return {**found, **self._ends(source)} if found else found

    def _ends(self, source: str) -> dict[str, Rule]:
        """Rules for the input embedding and the output head, which presets and heuristics leave to
        the config.
        """
        rules = self.section.rules
        found = {}
        for name, module in self.modules.items():
            if is_linear(module) and name.rpartition(".")[2] in rules.lm_head_patterns:
                found[name] = Rule(Kind.COLUMN, gather_output=True, source=source)
            get = getattr(module, "get_input_embeddings", None)
            if name == "" and callable(get):
                inputs = [
                    n for n, m in self.modules.items() if m is get() and isinstance(m, nn.Embedding)
                ]
                kind = Kind.EMBEDDING if rules.embedding_partition_dim else Kind.VOCABULARY
                found |= {n: Rule(kind, source=source) for n in inputs}
        return found

    def _tie(self) -> None:
        """An embedding and an output head with one weight are cut alike: along the vocabulary."""
        rules = self.plan.rules
        heads = {id(m.weight): n for n, m in self.modules.items() if is_linear(m)}
        for name, module in self.modules.items():
            head = heads.get(id(module.weight)) if isinstance(module, nn.Embedding) else None
            if head is None or not any(n in rules and rules[n].kind in CUT for n in (name, head)):
                continue
            source = (rules.get(head) or rules[name]).source
            rules[name] = Rule(Kind.VOCABULARY, source=source)
            if head not in rules or rules[head].kind not in CUT:
                rules[head] = Rule(Kind.COLUMN, gather_output=True, source=source)

    # -- where layers are cut ----------------------------------------------------------------------

    def _divide(self) -> None:
        """Divisions of all that is cut; drops the rules of attentions with too few heads for the
        ranks.
        """
        rules = self.plan.rules
        grain = self.section.tensor_parallel.tp_grain_size
        # 1. Column layers by the module around them, and (with a slash) by the next one outwards.
        around: dict[str, list[str]] = defaultdict(list)
        for name, rule in rules.items():
            if rule.kind is Kind.COLUMN and not rule.gather_output and name in self.modules:
                parent = name.rpartition(".")[0]
                around[parent].append(name)
                around[parent.rpartition(".")[0] + "/"].append(name)
        units = {
            parent: heads_of(self.modules[parent]) for parent in around if not parent.endswith("/")
        }
        # 2. Attentions with fewer key heads than ranks: their keys are copied where that is
        # possible, else the attention stays full.
        few = {
            parent: heads
            for parent, heads in units.items()
            if heads is not None and heads.keys < self.ranks
        }
        whole = {
            parent: heads
            for parent, heads in few.items()
            if not self._copies_keys(around[parent], heads)
        }
        self.plan.attentions = {
            p: heads for p, heads in units.items() if heads is not None and p not in whole
        }
        # 3. A division for every rule that cuts; a full attention takes its rules away.
        self._add_tables()
        for name in list(rules):
            rule = rules[name]
            if rule.kind not in CUT:
                if rule.kind is not Kind.WHOLE and any(
                    name.startswith(parent + ".") for parent in whole
                ):
                    rules[name] = dataclasses.replace(rule, kind=Kind.WHOLE)
                continue
            owner = self._heads_of(name, rule, around, units)
            if owner is not None and owner[0] in whole:
                keys = owner[1].keys
                self.plan.whole[name] = (
                    f"{owner[0]} has {keys} heads of keys and values for {self.ranks} ranks"
                )
                del rules[name]
            elif owner is not None and rule.kind is Kind.COLUMN and self._of_keys(name, owner[1]):
                rules[name] = dataclasses.replace(rule, kind=Kind.COPIED)
            else:
                self.plan.divisions[name] = self._division(
                    name, rule, owner[1] if owner is not None else None, grain
                )

    def _division(self, name: str, rule: Rule, heads: Heads | None, grain: int) -> Division:
        try:
            lengths = rule.lengths(
                self._length(name, rule), heads.fused if heads is not None else ()
            )
            if heads is not None:
                found = Division.by_count(lengths, heads.units(self.ranks), self.ranks)
            else:
                found = Division.by_unit(lengths, grain, self.ranks)
        except ValueError as error:
            raise self._error(
                "", f"{name} ({rule.source}): {error}", "give its shape in layer_specs"
            ) from error
        if min(found.sizes()) == 0:
            why = f"{name}: a length of {found.length} does not reach for {self.ranks} ranks"
            raise self._error("", why, "use fewer ranks")
        return found

    def _copies_keys(self, columns: list[str], heads: Heads) -> bool:
        """Whether queries can be divided one by one: keys and values have plain layers of their
        own.
        """
        queries, keys, _ = heads.fused
        modules = {name: self.modules[name] for name in columns}
        return heads.queries >= self.ranks and all(
            self.plan.rules[name].segments == 1
            and (
                widths(m)[1] == queries
                or (widths(m)[1] == keys and is_plain(m) and not is_transposed(m))
            )
            for name, m in modules.items()
        )

    def _of_keys(self, name: str, heads: Heads) -> bool:
        """Whether every rank computes the outputs of this layer that its queries need."""
        return (
            heads.keys < self.ranks
            and name in self.modules
            and widths(self.modules[name])[1] == heads.fused[1]
        )

    def _add_tables(self) -> None:
        """Embeddings of one number for each head (relative positions) are cut as the heads are."""
        for name, heads in self.plan.attentions.items():
            for key, child in self.modules[name].named_children():
                if isinstance(child, nn.Embedding) and child.embedding_dim == heads.queries:
                    self.plan.rules[f"{name}.{key}"] = Rule(
                        Kind.HEADS, source=f"the heads of {name}"
                    )

    def _heads_of(
        self,
        name: str,
        rule: Rule,
        around: Mapping[str, list[str]],
        units: Mapping[str, Heads | None],
    ) -> tuple[str, Heads] | None:
        """(attention, its heads) where the layer is cut into heads."""
        parent = name.rpartition(".")[0]
        if rule.kind is Kind.HEADS or (rule.kind is Kind.COLUMN and not rule.gather_output):
            owner: str | None = parent
        elif rule.kind is Kind.ROW and not rule.split_input and name in self.modules:
            width = widths(self.modules[name])[0]
            # The row is cut as the columns that give it its input; they are beside it, or a module
            # deeper.
            beside = (
                around.get(parent)
                or around.get(parent + "/")
                or around.get(parent.rpartition(".")[0] + "/")
                or []
            )
            owner = next((c.rpartition(".")[0] for c in beside if self._gives(c, width)), None)
        else:
            owner = None
        # None for layers outside of attention, which are cut at multiples of the grain.
        heads = units.get(owner) if owner is not None else None
        return (owner, heads) if owner is not None and heads is not None else None

    def _gives(self, column: str, width: int) -> bool:
        out = widths(self.modules[column])[1]
        segments = self.plan.rules[column].segments if column in self.plan.rules else 1
        if segments == "heads":
            heads = heads_of(self.modules[column.rpartition(".")[0]])
            segments = heads.fused if heads is not None else 1
        return (
            width in (out, *(segments if isinstance(segments, tuple) else (out // segments,)))
            or out == 3 * width
        )

    def _length(self, name: str, rule: Rule) -> int:
        """The length that is cut."""
        module = self.modules.get(name)
        if module is None:
            param = self.parameters[name]
            dim = (
                rule.dim
                if rule.dim is not None
                else -1
                if rule.kind is Kind.ROW or param.dim() == 1
                else -2
            )
            return param.shape[dim]
        if isinstance(module, nn.Embedding):
            check_embedding(module)
            return module.weight.shape[0 if rule.kind is Kind.VOCABULARY else 1]
        if not is_linear(module):
            raise ValueError(f"a {type(module).__name__} is no linear layer")
        if rule.kind is Kind.ROW and not is_plain(module):
            raise ValueError(
                f"a {type(module).__name__} has its own forward, so its input cannot be cut"
            )
        return widths(module)[0 if rule.kind is Kind.ROW else 1]

    def _error(self, key: str, message: str, fix: str) -> ConfigError:
        path = f"tensor_parallel.{key}" if key else "tensor_parallel"
        return ConfigError([Problem(path, message, fix)], self.origin)


def make_plan(model: nn.Module, section: TensorParallelConfig, ranks: int, origin: str) -> Plan:
    """The plan of `model` for so many ranks.

    ConfigError where rules do not fit. Does not change the model.
    """
    return Planner(model, section, ranks, origin).make()


def _hand_written() -> tuple[type, ...]:
    """Layers that know by themselves how they are cut."""
    from ds_tensor_parallel.layers.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
    from ds_tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear

    return ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, HiddenParallelEmbedding


def _model_types(model: nn.Module) -> list[str]:
    """``config.model_type`` of the model and of its text part, in lower case."""

    def configs() -> Iterator[Any]:
        for module in model.modules():
            if (config := getattr(module, "config", None)) is not None:
                yield config
                text = getattr(config, "get_text_config", None)
                yield text() if callable(text) else config
                return

    return [
        t.lower() for t in (getattr(c, "model_type", None) for c in configs()) if isinstance(t, str)
    ]
