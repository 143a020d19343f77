"""``dscore plan``: which stage and offload a model needs; the command line of `ds_zero.planning.plan`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from ds_command_kit.config_code import Imports, read_to_look_at

from ds_core.config import Trait
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import nn

    from ds_core.compose import Composition
    from ds_core.entries import Chart
    from ds_zero.planning.activations import Activations
    from ds_zero.planning.plan import Advice, Need, Offload

LAYERS = 32
"""The assumed number of layers of a model of --params without --largest-layer."""


def plan(
    world: Annotated[int, typer.Option("--world", min=1, help="Data-parallel ranks.")],
    params: Annotated[str | None, typer.Option(help="Parameters of the model, such as 7B.")] = None,
    largest_layer: Annotated[
        str | None,
        typer.Option(
            help="With --params: parameters of the largest layer, such as 200M. Default: 1/32."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function that builds the model, or the path of a Hugging Face config.json."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The config of the run.")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Default: the config's; bf16 without one."),
    ] = None,
    optimizer_states: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Elements that the optimizer keeps per parameter. Default: the config's; 2 "
            "(Adam).",
        ),
    ] = None,
    gas: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches per step. Default: the config's; 1.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of one sequence: tell what activations take too. Needs --model."
        ),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of one device, such as 80GB: recommend what fits.")
    ] = None,
    reserve: Annotated[
        str, typer.Option(help="Device memory to leave for activations, such as 20GB.")
    ] = "0",
    host_memory: Annotated[
        str | None, typer.Option(help="Of one machine, such as 1TB. Default: no limit.")
    ] = None,
    ranks_per_host: Annotated[
        int, typer.Option(min=1, help="Ranks that share a machine's memory.")
    ] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON instead of a table; all in bytes.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="A folder for drawings by plugins, such as timelines.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with a run: the folder of its section memory_snapshot."),
    ] = None,
    imports: Imports = False,
) -> None:
    """Predict memory and communication of each rank under every stage and offload, and recommend
    one.
    """
    from ds_command_kit.show import say_error

    from ds_core.precision import cast_module, make_precision
    from ds_zero.config import ZeroConfig
    from ds_zero.planning import plan as planning
    from ds_zero.planning.memory import measured_states
    from ds_zero.planning.model import divide_matrices, parse_amount

    module = _model(params, largest_layer, model)
    given = (
        dict(read_to_look_at(config, imports).raw)
        if config is not None
        else {"bf16": {"enabled": True}}
    )
    chosen = _config(given, dtype, gas)
    section = chosen.config.section(ZeroConfig)
    assert section is not None
    section = section.model_copy(update=_places(given))
    precision = make_precision(chosen.config, chosen.plugins)
    cast_module(module, precision)
    divided = Divided.by(chosen)
    activations = _activations(module, tokens, params, divided)
    whole, module = module, divide_matrices(module, divided.layers)
    like = next((p for p in module.parameters() if p.requires_grad), None)
    states, wide, casts = measured_states(chosen.optimizer, precision, like)
    wide = wide and not chosen.config.core.bf16.bf16_optimizer_states
    states = states if optimizer_states is None else optimizer_states
    gas = chosen.config.core.gradient_accumulation_steps or 1
    ahead = bool((_zero(given).get("offload_optimizer") or {}).get("super_offload"))
    run = planning.PlannedRun(world, precision, states, gas, casts, ahead, wide)
    if against is not None:
        _show_against(against, module, section, run, _offload(given), as_json)
        return
    needs = planning.plan(module, section, run)
    grain = (
        getattr(chosen.optimizer.entry, "grain", "element")
        if chosen.optimizer is not None
        else "element"
    )
    if grain != "element":
        say_error(
            "the config's optimizer needs unsharded "
            f"{'matrices' if grain == 'matrix' else 'tensors'}; the memory and "
            "communication for them are not counted"
        )
    advice = None
    if device_memory is not None:
        room = parse_amount(device_memory, "--device-memory")
        left = room - (0 if reserve == "0" else parse_amount(reserve, "--reserve"))
        if activations is not None:
            again = chosen.config.has(Trait.RECOMPUTES)
            left -= (
                activations.recomputed
                if again and activations.recomputed is not None
                else activations.kept
            )
        host = None if host_memory is None else parse_amount(host_memory, "--host-memory")
        advice = planning.recommend(needs, left, host, min(ranks_per_host, world))
    elif host_memory is not None or reserve != "0":
        raise UsageError(
            "--host-memory and --reserve are options of the recommendation; give "
            "--device-memory too"
        )
    answers = chosen.plugins.ask("ds_charts", config=chosen.config, plugins=chosen.plugins)
    charts = [chart for answer in answers for chart in answer.value]
    _show(whole, run, divided, activations, needs, advice, charts, as_json)
    _draw(charts, svg)


@dataclass(frozen=True, slots=True)
class Divided:
    """Ranks of other mesh axes. layers: those of tensor parallelism. sequences: those with the same
    samples.
    """

    layers: int
    sequences: int

    @classmethod
    def by(cls, chosen: Composition) -> Divided:
        """Of a config."""
        axes = chosen.plugins.mesh_axes(chosen.config)
        return cls(
            math.prod(axis.size for axis in axes if axis.name == "tp"),
            math.prod(axis.size for axis in axes if axis.same_batch),
        )


def _activations(
    module: nn.Module, tokens: int | None, params: str | None, divided: Divided
) -> Activations | None:
    from ds_zero.planning.activations import count_activations

    if tokens is None:
        return None
    if params is not None:
        raise UsageError(
            "--tokens: activations are counted in a forward of the model; give --model instead of "
            "--params"
        )
    return count_activations(module, -(-tokens // divided.sequences))


def _model(params: str | None, largest_layer: str | None, model: str | None) -> nn.Module:
    from ds_zero.planning.model import find_model, of_size, parse_amount

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
    largest = (
        -(-count // LAYERS)
        if largest_layer is None
        else parse_amount(largest_layer, "--largest-layer")
    )
    return of_size(count, largest)


def _config(raw: dict[str, Any], dtype: str | None, gas: int | None) -> Composition:
    """The config, in which options of the command line take precedence; batch sizes have no
    effect."""
    from ds_core.compose import compose

    if dtype is not None:
        raw = {k: v for k, v in raw.items() if k not in ("fp16", "bf16")}
        if dtype != "fp32":
            raw[dtype] = {"enabled": True}
    if gas is not None:
        raw = {**raw, "gradient_accumulation_steps": gas}
    given = _zero(raw)  # every offload is planned anyway, but zenflow is part of one
    left_out = (
        ("offload_param",)
        if given.get("zenflow") is not None
        else ("offload_optimizer", "offload_param")
    )
    zero = {k: v for k, v in given.items() if k not in left_out}
    return compose({**raw, "zero_optimization": zero})


def _zero(raw: dict[str, Any]) -> dict[str, Any]:
    """The section of ZeRO; true and false are old spellings, and all stages are planned anyway."""
    given = raw.get("zero_optimization")
    return given if isinstance(given, dict) else {}


def _places(raw: dict[str, Any]) -> dict[str, Any]:
    """The sections of offload, whose buffers count where something rests on disk."""
    from ds_zero.config import OffloadOptimizer, OffloadParam

    kinds: dict[str, type[BaseModel]] = {
        "offload_optimizer": OffloadOptimizer,
        "offload_param": OffloadParam,
    }
    return {
        key: kind.model_validate(_zero(raw)[key])
        for key, kind in kinds.items()
        if _zero(raw).get(key)
    }


def _show(
    module: nn.Module,
    run: Any,
    divided: Divided,
    activations: Activations | None,
    needs: list[Need],
    advice: Advice | None,
    charts: list[Chart],
    as_json: bool,
) -> None:
    from ds_command_kit.show import show_json, show_table

    total = sum(p.numel() for p in module.parameters())
    if as_json:
        rows = [_row(need) for need in needs]
        found = None if advice is None or advice.need is None else needs.index(advice.need)
        show_json(
            {
                "parameters": total,
                "world": run.world,
                "tensor_parallel": divided.layers,
                "gradient_accumulation_steps": run.gas,
                "activations": None if activations is None else asdict(activations),
                "choices": rows,
                "recommended": found,
                "reason": None if advice is None else advice.reason,
                "charts": [{"name": c.name, "title": c.title, "text": c.text} for c in charts],
            }
        )
        return
    times = f", each {divided.layers} that divide matrices evenly" if divided.layers > 1 else ""
    typer.echo(
        f"{total:,} parameters on {run.world} ranks{times}; GB of each rank, without activations"
    )
    columns = (
        "stage",
        "offloaded",
        "weights",
        "gradients",
        "masters",
        "states",
        "step",
        "buckets",
        "gathered",
    )
    across = any(need.across for need in needs)
    shown = [
        (
            ("> " if advice is not None and advice.need is need else "") + str(need.stage),
            need.offload.value,
            *(_gb(getattr(need.device, kind)) for kind in need.device.__dataclass_fields__),
            _gb(need.device.peak),
            _gb(need.host.peak),
            _gb(need.disk),
            _gb(need.sent),
            *([_gb(need.across)] if across else []),
        )
        for need in needs
    ]
    last = ("sent per step", "to other blocks") if across else ("sent per step",)
    show_table((*columns, "device", "host", "disk", *last), shown)
    if activations is not None:
        again = (
            ""
            if activations.recomputed is None
            else f", {_gb(activations.recomputed)} GB with its blocks recomputed"
        )
        kept = f"{_gb(activations.kept)} GB{again}"
        typer.echo(
            f"activations of a rank's {activations.tokens:,} tokens, undivided layers: {kept}"
        )
    if advice is not None:
        typer.echo(advice.reason)
    for chart in charts:
        typer.echo(f"\n{chart.title}\n{chart.text}")


def _offload(raw: dict[str, Any]) -> Offload:
    """The offload that the config asks for."""
    from ds_zero.planning.plan import Offload

    section = _zero(raw)
    states, weights = (
        str((section.get(f"offload_{what}") or {}).get("device") or "none").lower()
        for what in ("optimizer", "param")
    )
    if states == "none":
        return Offload.NONE
    if states == "cpu":
        return Offload.OPTIMIZER if weights == "none" else Offload.ALL
    return Offload.DISK_ALL if weights not in ("none", "cpu") else Offload.DISK


def _show_against(
    folder: Path, module: nn.Module, section: Any, run: Any, offload: Offload, as_json: bool
) -> None:
    """The plan of the config's own stage and offload, beside what the rank held that held most."""
    from ds_command_kit.show import show_json, show_table

    from ds_zero.planning.against import compare, read_snapshots
    from ds_zero.planning.plan import predict

    snapshots = read_snapshots(folder)
    for name, planned, held in (
        ("--world", run.world, snapshots[0].dp),
        ("--gas", run.gas, snapshots[0].gas),
    ):
        if planned != held:
            raise UsageError(f"{name}: the run in {folder} had {held}, not {planned}")
    most = max(snapshots, key=lambda s: sum(sum(kinds.values()) for kinds in s.kinds.values()))
    need = predict(module, section, run, offload, most.rank % run.world)
    lines = compare(need, run.states, most)
    if as_json:
        show_json({"rank": most.rank, "kinds": [asdict(line) for line in lines]})
        return
    typer.echo(
        f"rank {most.rank} on {most.device}, stage {need.stage}, {offload.value} on the host; GB"
    )
    rows = [
        (x.kind, _gb(x.planned), _gb(x.measured), _signed(x.measured - x.planned), x.why)
        for x in lines
    ]
    show_table(("between backward and step", "planned", "measured", "difference", "why"), rows)


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{_gb(abs(size))}" if size else "0"


def _draw(charts: list[Chart], folder: Path | None) -> None:
    """Write the drawings, and their paths to stderr: stdout may be JSON."""
    if folder is None:
        return
    drawn = [chart for chart in charts if chart.svg is not None]
    if not drawn:
        raise UsageError("--svg: no plugin draws anything of this config")
    folder.mkdir(parents=True, exist_ok=True)
    for chart in drawn:
        path = folder / f"{chart.name}.svg"
        path.write_text(chart.svg or "")
        typer.echo(f"drawn in {path}", err=True)


def _row(need: Need) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(
        json.dumps(asdict(need), default=lambda offload: offload.value)
    )
    return {**plain, "device_peak": need.device.peak, "host_peak": need.host.peak}


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g}" if size else "0"
