"""The transform: layers change their class, parameters are cut to this rank's parts, and the parts
are declared.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.changes import changing, gather_slices, reshape
from ds_run_state.lazy import lazy_weight, with_shapes
from ds_run_state.slices import SLICES, Slice
from torch import Tensor, nn

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.config import Trait
from ds_core.errors import ConfigError, Problem, UsageError
from ds_core.undo import Undo
from ds_tensor_parallel.config import TensorParallelConfig
from ds_tensor_parallel.layers.attention import keep_heads
from ds_tensor_parallel.layers.cross_entropy import divide_loss
from ds_tensor_parallel.layers.embedding import (
    HiddenParallelEmbedding,
    VocabParallelEmbedding,
    embedding,
)
from ds_tensor_parallel.layers.linear import (
    Column,
    ColumnParallelLinear,
    Cut,
    Place,
    RowParallelLinear,
    Siblings,
    column,
    copied,
    row,
)
from ds_tensor_parallel.layers.megatron_sp import divide_sequences
from ds_tensor_parallel.layers.modules import (
    divide_input,
    rope_size,
    share_tail,
    sum_gradient,
    sum_output,
)
from ds_tensor_parallel.layers.random_regions import divide_random_numbers
from ds_tensor_parallel.planning.division import Division
from ds_tensor_parallel.planning.plan import Plan, make_plan
from ds_tensor_parallel.planning.rules import Kind, Rule
from ds_tensor_parallel.same_inputs import compare_inputs

if TYPE_CHECKING:
    from ds_core.context import Context

log = logging.getLogger("ds_tensor_parallel")

_NO_MATRIX = (Kind.WHOLE, Kind.SUM_GRADIENT)


def divide(model: nn.Module, ctx: Context) -> nn.Module:
    """The model with its layers divided over ``tp``. Collective.

    Raises ConfigError when nothing can be divided, or a rule does not fit; UsageError when weights
    are not full. Weights that are sharded or offloaded already, as after ``ds_zero.Init``, are
    gathered one at a time, if they are cut.
    """
    # One undo for all: layers that are full again need full weights.
    undo = Undo()
    ctx.undo(undo.run, collective=True)
    with with_shapes(model), changing(model, undo):
        if empty := [name for name, param in model.named_parameters() if not param.numel()]:
            raise UsageError(
                f"{empty[0]} has no elements here, and tensor parallelism cuts full weights"
            )
        _check_shared(model, ctx)
        return _divide(model, ctx, undo)


def _check_shared(model: nn.Module, ctx: Context) -> None:
    """Raise UsageError where a weight that is kept elsewhere may have other values on other ranks
    along ``tp``.
    """
    ranks = set(ctx.mesh.ranks("tp"))
    for name, param in model.named_parameters():
        if (lazy := lazy_weight(param)) is not None and not ranks <= set(lazy.ranks):
            raise UsageError(
                f"{name} was made by ds_zero.Init over ranks {list(lazy.ranks)}, and the ranks "
                f"along tp are {sorted(ranks)}: their values may differ. Give Init no "
                "data_parallel_group"
            )


def _divide(model: nn.Module, ctx: Context, undo: Undo) -> nn.Module:
    section = ctx.config.section(TensorParallelConfig) or TensorParallelConfig()
    # 1. The plan: which layers are divided, and where. Nothing changes yet.
    place = Place(ctx.mesh.group("tp"), ctx.mesh.size("tp"), ctx.mesh.index("tp"))
    plan = make_plan(model, section, place.size, ctx.config.origin)
    # 2. Layers that the model was written with are bound first: no rule is about them.
    cuts = _Cuts(model, ctx, place)
    families = _Families(model, _overlaps(section, ctx))
    hand_written = list(_bind_hand_written(model, section, place, cuts, families))
    # 3. Errors of all pipeline stages together: one stage alone may have no layer to divide.
    stages = ctx.mesh.group("pp") if ctx.mesh.has("pp") else ALONE
    reports = comm.all_gather_json(
        [bool(plan.divisions or hand_written), plan.unmatched, plan.absent], group=stages
    )
    _check_names(set.intersection(*(set(absent) for _, _, absent in reports)), ctx.config.origin)
    if not any(divides for divides, _, _ in reports):
        raise ConfigError(
            [
                Problem(
                    "tensor_parallel",
                    f"no layer of {type(model).__name__} can be divided: it has no tp_plan, no "
                    "preset is for it, and no pair of linear layers was recognized",
                    "describe its layers with partition_config.layer_specs, or build it of "
                    "ds_tensor_parallel's layers",
                )
            ],
            ctx.config.origin,
        )
    # 4. Modules change their classes and get hooks; their weights are still full.
    _convert(model, plan, place, cuts, families)
    if section.vocab_parallel_loss:
        _divide_losses(model, plan)
    # 5. Weights are shared and cut, all at once, so that a failure before leaves the model as it
    # was.
    undo(lambda: gather_slices(cuts.done, ctx.mesh, "tp"))
    cuts.share_and_cut()
    # 6. What follows from the cuts: numbers of heads, divided sequences, random numbers, the check
    # of the first inputs.
    for name, heads in plan.attentions.items():
        keep_heads(model.get_submodule(name), heads, heads.share(place.size, place.rank))
    if section.sequence_parallel or any(rule.kind is Kind.SEQUENCE for rule in plan.rules.values()):
        divide_sequences(model, place, ctx.config.origin)
    divide_random_numbers(model, ctx, place)
    compare_inputs(model, ctx.accelerator, place)
    if ctx.rank == 0:
        _log_plan(plan, len(hand_written), place.size)
        _warn_unmatched(section, set.intersection(*(set(unmatched) for _, unmatched, _ in reports)))
    return model


def _check_names(absent: set[str], origin: str) -> None:
    """Raise ConfigError for names that no layer has on any stage: the layers that are meant would
    not be summed.
    """
    if absent:
        shown = ", ".join(map(repr, sorted(absent)))
        why = f"{shown}: no linear layer of the model has a name that ends so"
        fix = "give ends of names of linear layers, as in 'attention.output.dense'"
        raise ConfigError([Problem("tensor_parallel.injection_policy_tuple", why, fix)], origin)


def _warn_unmatched(section: TensorParallelConfig, unmatched: set[int]) -> None:
    """Warn of specs that match nothing on any stage: one list may serve several models, and a slip
    looks the same.
    """
    specs = section.partition_config.layer_specs if section.partition_config is not None else []
    for number in sorted(unmatched):
        log.warning(
            "tensor_parallel.partition_config.layer_specs.%d.patterns: %s match no parameter of "
            "the model",
            number,
            specs[number].patterns,
        )


def _overlaps(section: TensorParallelConfig, ctx: Context) -> bool:
    """Whether sums of gradients of inputs go on while gradients of weights are computed."""
    if not section.tp_overlap_comm:
        return False
    # ZeRO-3 releases a weight once its module has run, and the overlapped backward reads weights
    # later.
    if sharded := ctx.config.has(Trait.RELEASES_WEIGHTS):
        if ctx.rank == 0:
            log.warning(
                "tp_overlap_comm has no effect with ZeRO 3: weights come and go layer by layer"
            )
    return not sharded


class _Families:
    """The column-parallel layers beside each other, which may be given the same tensor."""

    def __init__(self, model: nn.Module, overlap: bool) -> None:
        self._model = model
        self._overlap = overlap
        self._known: dict[str, Siblings] = {}

    def of(self, name: str) -> Siblings:
        """Those of the layer `name`."""
        around = name.rpartition(".")[0]
        if around not in self._known:
            made = self._known[around] = Siblings(self._overlap)
            module = self._model.get_submodule(around)
            module.register_forward_pre_hook(made.forget)
            # Always: where a block is recomputed, torch leaves it by an exception once it has what
            # it needs.
            module.register_forward_hook(made.forget, always_call=True)
        return self._known[around]


def _bind_hand_written(
    model: nn.Module, section: TensorParallelConfig, place: Place, cuts: _Cuts, families: _Families
) -> Iterable[str]:
    """Bind the layers that the model is written with."""
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and module.tp is None:
            unit = module.unit if module.unit > 1 else section.tensor_parallel.tp_grain_size
            division = Division.by_unit(module.segments, unit, place.size)
            if isinstance(module, ColumnParallelLinear) and name:
                module.siblings = families.of(name)
                module.siblings.add(module, type(module).__mro__[1] is Column)
        elif (
            isinstance(module, (VocabParallelEmbedding, HiddenParallelEmbedding))
            and module.tp is None
        ):
            length = module.weight.shape[0 if isinstance(module, VocabParallelEmbedding) else 1]
            division = Division.by_unit(
                (length,), section.tensor_parallel.tp_grain_size, place.size
            )
        else:
            continue
        module.bind(place, division)
        cuts.add(module, module.cuts())
        yield name


def _convert(model: nn.Module, plan: Plan, place: Place, cuts: _Cuts, families: _Families) -> None:
    """Make the modules that have rules what the rules say."""
    modules = dict(model.named_modules())
    for name, rule in plan.rules.items():
        module = modules.get(name)
        division = plan.divisions.get(name)
        # A rule for a parameter: experts that are stacked.
        if module is None:
            assert division is not None
            _cut_parameter(model, name, rule, division, cuts)
        elif rule.kind is Kind.COLUMN:
            made = column(module, gather_output=rule.gather_output, siblings=families.of(name))
            # A local layer is inside a module whose inputs and outputs are summed as a whole.
            made.copies = not rule.local
            _bind(made, place, division, cuts)
        elif rule.kind is Kind.ROW:
            made = row(module, split_input=rule.split_input)
            made.sums = not rule.local
            _bind(made, place, division, cuts)
        elif rule.kind is Kind.COPIED:
            heads = plan.attentions[name.rpartition(".")[0]]
            outputs = [
                (key * heads.size, heads.size) for key in heads.share(place.size, place.rank).keys
            ]
            copied(module, families.of(name)).choose(place, outputs)
        elif rule.kind in (Kind.VOCABULARY, Kind.EMBEDDING, Kind.HEADS):
            assert isinstance(module, nn.Embedding)
            _bind(embedding(module, rule.kind), place, division, cuts)
        else:
            _surround(module, modules[name.rpartition(".")[0]], rule, place)
    partial = [modules[name] for name, rule in plan.rules.items() if rule.kind is Kind.EXPERTS]
    # A list of experts is never called itself, so nothing sums around it.
    partial = [
        module for module in partial if not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    # Their other parameters are used on each rank's own part of the sum.
    for param in {
        param: None for module in partial for param in module.parameters() if param not in cuts
    }:
        sum_gradient(param, place)


def _divide_losses(model: nn.Module, plan: Plan) -> None:
    """Output heads whose model can compute its loss from divided logits."""
    for name, rule in plan.rules.items():
        if rule.kind is Kind.COLUMN and rule.gather_output:
            head = model.get_submodule(name)
            owner = model.get_submodule(name.rpartition(".")[0])
            get = getattr(owner, "get_output_embeddings", None)
            if callable(get) and get() is head:
                divide_loss(owner, head)


def _bind(module: Any, place: Place, division: Division | None, cuts: _Cuts) -> None:
    assert division is not None
    module.bind(place, division)
    cuts.add(module, module.cuts())


def _cut_parameter(
    model: nn.Module, name: str, rule: Rule, division: Division, cuts: _Cuts
) -> None:
    """A parameter that is no linear layer's: experts, stacked as [experts, outputs, inputs]."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    param = getattr(module, last)
    dim = (
        rule.dim
        if rule.dim is not None
        else -1
        if rule.kind is Kind.ROW or param.dim() == 1
        else -2
    )
    cuts.add(module, {last: Cut(dim % param.dim(), division)})


def _surround(module: nn.Module, around: nn.Module, rule: Rule, place: Place) -> None:
    """Add the hooks of a module that stays full, or whose parameters have rules."""
    match rule.kind:
        case Kind.SUM_GRADIENT:
            for param in module.parameters():
                sum_gradient(param, place)
        case Kind.EXPERTS:
            sum_output(module, place)
        case Kind.SHARED:
            divide_input(module, place)
        case Kind.ROPE_LATENT:
            share_tail(module, rope_size(around), place)


class _Cuts:
    """Which parameters of a model are cut, and how; the cuts are made for all at once."""

    def __init__(self, model: nn.Module, ctx: Context, place: Place) -> None:
        self._model = model
        self._ctx = ctx
        self._place = place
        self._names = {param: name for name, param in model.named_parameters()}
        # By parameter, as layers may share one.
        self._cuts: dict[nn.Parameter, Cut] = {}
        # The slice that this rank has of each, once it is cut; what undo gathers.
        self.done: dict[nn.Parameter, Slice] = {}

    def __contains__(self, param: nn.Parameter) -> bool:
        return param in self._cuts

    def add(self, module: nn.Module, cuts: dict[str, Cut]) -> None:
        """Cut parameters of `module`.

        ConfigError where two layers that share one would cut it differently.
        """
        for key, cut in cuts.items():
            param = getattr(module, key)
            if param is None:
                continue
            if self._cuts.setdefault(param, cut) != cut:
                raise ConfigError(
                    [
                        Problem(
                            "tensor_parallel",
                            f"{self._names[param]} is shared by layers that would be cut "
                            "differently",
                            "give both the same rule in partition_config.layer_specs",
                        )
                    ],
                    self._ctx.config.origin,
                )

    @torch.no_grad()
    def share_and_cut(self) -> None:
        """Broadcast the first rank's parameters and buffers, and keep this rank's parts of them."""
        known = self._ctx.stash.get(SLICES)
        slices = dict(known) if known is not None else {}
        for param, name in self._names.items():
            cut = self._cuts.get(param)
            lazy = lazy_weight(param)
            if cut is None:
                # A lazy weight has the same values on all ranks already (`_check_shared`).
                if lazy is None:
                    param.data = self._broadcast(param)
                continue
            full = self._broadcast(param) if lazy is None else lazy.take(param)
            ranges = cut.division.ranges(self._place.rank)
            # Another transform may have cut it along another axis: its slice is narrowed.
            unsharded = Slice.of(full.shape)
            slices[name] = slices.get(name, unsharded).keep("tp", cut.dim, ranges)
            self.done[param] = own = unsharded.keep("tp", cut.dim, ranges)
            # A clone, so that the full tensor is freed.
            reshape(param, own.take(full).clone())
        for buffer in self._model.buffers():
            buffer.data = self._broadcast(buffer)
        self._ctx.stash[SLICES] = slices

    def _broadcast(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor.data
        full = tensor.data.to(self._ctx.accelerator.current_device()).contiguous()
        comm.broadcast(full, src=self._ctx.mesh.ranks("tp")[0], group=self._place.group)
        return full


def _log_plan(plan: Plan, hand_written: int, size: int) -> None:
    kinds = Counter(
        rule.kind.value for name, rule in plan.rules.items() if rule.kind not in _NO_MATRIX
    )
    if hand_written:
        kinds["written by hand"] = hand_written
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    log.info(
        "tensor parallelism over %d ranks by %s: %s",
        size,
        plan.source or "rules of the config",
        counted,
    )
    if plan.whole:
        some = ", ".join(list(plan.whole)[:5])
        log.info(
            "%d linear layers stay whole: %s%s",
            len(plan.whole),
            some,
            ", ..." if len(plan.whole) > 5 else "",
        )
    for why in dict.fromkeys(plan.whole.values()):
        log.info("whole: %s", why)
