"""The command ``dscore plan``: which stage and offload a model needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ds_command_kit.config_code import Imports, read_to_look_at

from ds_core.config import Trait
from ds_core.errors import UsageError
from ds_plan import options
from ds_plan.advice import Advice, Room, recommend

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import ConfigSource
    from ds_core.entries import Chart
    from ds_core.precision import Precision
    from ds_core.setup.compose import Composition
    from ds_plan.activations import Activations
    from ds_plan.needs import Need
    from ds_plan.planner import Planner
    from ds_plan.run import PlannedRun
    from ds_plan.tables import Exchange, Plan

LAYERS = 32
"""The assumed number of layers of a model of --params without --largest-layer."""


def plan(
    world: options.World,
    params: options.Params = None,
    largest_layer: options.LargestLayer = None,
    model: options.Model = None,
    config: options.Config = None,
    dtype: options.Dtype = None,
    optimizer_states: options.OptimizerStates = None,
    gas: options.Gas = None,
    tokens: options.Tokens = None,
    device_memory: options.DeviceMemory = None,
    reserve: options.Reserve = "0",
    host_memory: options.HostMemory = None,
    ranks_per_host: options.RanksPerHost = 8,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
    svg: options.Svg = None,
    against: options.Against = None,
    imports: Imports = False,
) -> None:
    """Predict memory and messages of each rank under every stage and offload, and recommend one.

    Exit codes:
      0: the table is shown, and something fits in --device-memory
      1: nothing fits in it, or the config is wrong
      2: wrong usage, such as a size without a unit

    Examples:
      dscore plan --world 64 --params 7B --device-memory 80GB --reserve 20GB
      dscore plan --world 8 --model mine.model:build --tokens 4096
    """
    from ds_core.precision import cast_module, make_precision
    from ds_plan.models import divide_matrices
    from ds_plan.planner import make_planners
    from ds_plan.tables import Plan

    module = _make_model(params, largest_layer, model)
    source = _read(config, imports, dtype, gas)
    chosen = _compose(source, planners := make_planners(source))
    cast_module(module, precision := make_precision(chosen.config, chosen.plugins))
    divided = Divided.by(chosen)
    activations = _count_activations(module, tokens, params, divided)
    part = divide_matrices(module, divided.layers)
    run = _make_run(chosen, precision, part, world, optimizer_states)
    if against is not None:
        _compare(against, planners, chosen, part, run, as_json)
        return
    needs = _choices(planners, chosen, part, run)
    room = _make_room(device_memory, reserve, host_memory, min(ranks_per_host, world))
    result = Plan(
        parameters=sum(p.numel() for p in module.parameters()),
        run=run,
        tensor_parallel=divided.layers,
        activations=activations,
        needs=needs,
        advice=_advise(needs, room, activations, chosen),
        charts=_ask_charts(chosen),
        exchanges=_plan_exchanges(chosen, module, world * divided.layers, needs),
    )
    _answer(result, as_json, verbose, svg)


def _answer(plan: Plan, as_json: bool, verbose: bool, svg: Path | None) -> None:
    """Show the plan; ends with 1 where nothing fits."""
    from ds_plan.tables import draw, show_plan, show_plan_as_json

    if as_json:
        show_plan_as_json(plan)
    else:
        show_plan(plan, verbose=verbose)
    draw(plan.charts, svg)
    if plan.advice is not None and plan.advice.need is None:
        raise typer.Exit(1)


# -- the model -------------------------------------------------------------------------------------


def _make_model(params: str | None, largest_layer: str | None, model: str | None) -> nn.Module:
    """The model on the meta device. Raises UsageError where options do not say which, or twice."""
    from ds_plan.models import find_model, of_size, parse_amount

    if (params is None) == (model is None):
        raise UsageError(
            "give the model: either --params, such as 7B, or --model, such as mine.model:build"
        )
    if params is None:
        if largest_layer is not None:
            raise UsageError(
                "--largest-layer is an option of --params; with --model the sizes of layers are "
                "known"
            )
        assert model is not None
        return find_model(model)
    count = parse_amount(params, "--params")
    if largest_layer is None:
        largest = -(-count // LAYERS)
    else:
        largest = parse_amount(largest_layer, "--largest-layer")
    return of_size(count, largest)


@dataclass(frozen=True, slots=True)
class Divided:
    """Ranks of other mesh axes, which divide what is planned for a data-parallel rank."""

    layers: int
    """Ranks of tensor parallelism: each has a part of every matrix."""

    sequences: int
    """Ranks with the same samples: each has a part of every sequence."""

    @classmethod
    def by(cls, chosen: Composition) -> Divided:
        """Of a config."""
        axes = chosen.plugins.mesh_axes(chosen.config)
        return cls(
            layers=math.prod(axis.size for axis in axes if axis.name == "tp"),
            sequences=math.prod(axis.size for axis in axes if axis.same_batch),
        )


def _count_activations(
    module: nn.Module, tokens: int | None, params: str | None, divided: Divided
) -> Activations | None:
    """In a forward, which a model with divided matrices cannot run."""
    from ds_plan.activations import count_activations

    if tokens is None:
        return None
    if params is not None:
        raise UsageError(
            "--tokens: activations are counted in a forward of the model; give --model instead of "
            "--params"
        )
    return count_activations(module, -(-tokens // divided.sequences))


# -- the config ------------------------------------------------------------------------------------


def _read(config: Path | None, imports: bool, dtype: str | None, gas: int | None) -> ConfigSource:
    """The config as given, in which options of the command line take precedence."""
    from ds_core.config import read_config

    raw: dict[str, Any] = {"bf16": {"enabled": True}}
    if config is not None:
        raw = dict(read_to_look_at(config, imports).raw)
    if dtype is not None:
        raw = {key: value for key, value in raw.items() if key not in ("fp16", "bf16")}
        if dtype != "fp32":
            raw[dtype] = {"enabled": True}
    if gas is not None:
        raw["gradient_accumulation_steps"] = gas
    return read_config(raw)


def _compose(source: ConfigSource, planners: list[Planner]) -> Composition:
    """The checked config; batch sizes have no effect, and neither has what planners leave out."""
    from ds_core.setup.compose import compose

    raw = dict(source.raw)
    for planner in planners:
        raw = planner.prepare(raw)
    return compose(raw)


def _make_run(
    chosen: Composition,
    precision: Precision,
    part: nn.Module,
    world: int,
    optimizer_states: int | None,
) -> PlannedRun:
    """The run of a config; optimizer_states: an option that takes precedence over its optimizer."""
    from ds_plan.run import PlannedRun

    run = PlannedRun.of(chosen.config, chosen.optimizer, precision, part, world)
    return run if optimizer_states is None else replace(run, states=optimizer_states)


def _choices(
    planners: Sequence[Planner], chosen: Composition, part: nn.Module, run: PlannedRun
) -> Sequence[Need]:
    """What each planner offers."""
    _warn_of_grain(chosen)
    return [need for planner in planners for need in planner.choices(chosen.config, part, run)]


def _warn_of_grain(chosen: Composition) -> None:
    """Say on stderr that an optimizer needs more than what is planned."""
    from ds_command_kit.show import say_error

    if chosen.optimizer is None:
        return
    entry = chosen.optimizer.entry
    grain = getattr(entry, "grain", "element")
    # Norms that an optimizer collects are a few numbers per tensor.
    # So are the matrices of one that tells what it takes: see `_plan_exchanges`.
    if grain in ("tensor", "matrix") and getattr(entry, "collects", False):
        return
    if grain != "element":
        say_error(
            "the config's optimizer needs unsharded "
            f"{'matrices' if grain == 'matrix' else 'tensors'}; the memory and "
            "communication for them are not counted"
        )


def _plan_exchanges(
    chosen: Composition, module: nn.Module, world: int, needs: Sequence[Need]
) -> Sequence[Exchange]:
    """What the config's optimizer takes to collect matrices, where it can tell: without ZeRO, and
    with tensors that are cut.

    module: undivided.
    world: ranks that have a part or a replica of each matrix.
    """
    from ds_plan.tables import Exchange

    optimizer = chosen.optimizer
    if optimizer is None or getattr(optimizer.entry, "grain", "element") != "matrix":
        return []
    names = {p: n for n, p in module.named_parameters() if p.requires_grad}
    made = optimizer.build(optimizer.groups([{"params": list(names)}], names))
    plan_one = getattr(made, "planned_exchange", None)
    if plan_one is None or world == 1:
        return []
    found = []
    for sharded in sorted({need.stage > 0 for need in needs}):
        need = plan_one(world, sharded=sharded)
        found.append(Exchange("1, 2, 3" if sharded else "0", need.sent, need.held))
    return found


def _ask_charts(chosen: Composition) -> list[Chart]:
    answers = chosen.plugins.ask("ds_charts", config=chosen.config, plugins=chosen.plugins)
    return [chart for answer in answers for chart in answer.value]


# -- the answers -----------------------------------------------------------------------------------


def _make_room(
    device_memory: str | None, reserve: str, host_memory: str | None, ranks_per_host: int
) -> Room | None:
    """The memory that options name, without what is reserved; None without a device's."""
    from ds_plan.models import parse_amount

    if device_memory is None:
        if host_memory is not None or reserve != "0":
            raise UsageError(
                "--host-memory and --reserve are options of the recommendation; give "
                "--device-memory too"
            )
        return None
    return Room(
        device=parse_amount(device_memory, "--device-memory")
        - (0 if reserve == "0" else parse_amount(reserve, "--reserve")),
        host=None if host_memory is None else parse_amount(host_memory, "--host-memory"),
        ranks_per_host=ranks_per_host,
    )


def _advise(
    needs: Sequence[Need],
    room: Room | None,
    activations: Activations | None,
    chosen: Composition,
) -> Advice | None:
    """What to use, with room for activations where they were counted."""
    if room is None:
        return None
    if activations is not None:
        kept = activations.least(checkpointing=chosen.config.has(Trait.RECOMPUTES))
        room = replace(room, device=room.device - kept)
    return recommend(needs, room)


def _compare(
    folder: Path,
    planners: list[Planner],
    chosen: Composition,
    part: nn.Module,
    run: PlannedRun,
    as_json: bool,
) -> None:
    """Show the plan of the config's own choice, beside what the rank held that held most."""
    from ds_plan.comparison import compare, read_snapshots
    from ds_plan.tables import show_comparison

    snapshots = read_snapshots(folder)
    for name, planned, held in (
        ("--world", run.world, snapshots[0].dp),
        ("--gas", run.gas, snapshots[0].gas),
    ):
        if planned != held:
            raise UsageError(f"{name}: the run in {folder} had {held}, not {planned}")
    most = max(snapshots, key=lambda snapshot: snapshot.total)
    answers = [p.chosen(chosen.config, part, run, most.rank % run.world) for p in planners]
    need = next((answer for answer in answers if answer is not None), None)
    if need is None:
        raise UsageError("--against: no plugin predicts what this config chooses")
    show_comparison(need, most, compare(need, run.states, most), as_json)
