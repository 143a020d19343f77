"""The text of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_flops_profiler import parameters
from ds_flops_profiler.units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

if TYPE_CHECKING:
    from ds_core.config.core import Batch
    from ds_flops_profiler.counter import Counter
    from ds_flops_profiler.profiler import FlopsProfiler

Rows = Sequence[tuple[str, str]]
"""Names and values, one line each."""
WIDTH = 96


def _rule(title: str) -> str:
    return f" {title} ".center(WIDTH, "-") + "\n"


def _share(part: float, of: float) -> str:
    return f"{100 * part / of if of else 0:.4g}%"


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0)


# -- the totals ------------------------------------------------------------------------------------


def heading(step: int, rows: Rows) -> str:
    """The first lines of a profile."""
    lines = [f"{name + ':':<58} {value}\n" for name, value in rows]
    return "\n" + _rule(f"flops profiler: step {step}") + "".join(lines)


def totals(profiler: FlopsProfiler) -> Rows:
    """What a profiler knows by itself."""
    total = profiler.total()
    model = profiler.model
    whole = parameters.whole(model)
    stored = parameters.stored_here(model)
    engine = profiler.ds_engine
    return [
        *([] if engine is None else [("world size", str(engine.world_size))]),
        ("parameters", params_to_string(whole)),
        *([("parameters on this rank", params_to_string(stored))] if stored != whole else []),
        ("forward MACs", macs_to_string(total.macs)),
        ("forward FLOPs", number_to_string(total.flops)),
        ("forward latency", duration_to_string(total.seconds)),
        ("forward FLOPS", _rate(total.flops, total.seconds)),
    ]


def of_training(
    everywhere: Sequence[Mapping[str, Any]], batch: Batch, recompute: float
) -> Iterator[tuple[str, str]]:
    """Of one micro-batch, on rank 0 and over all ranks.

    everywhere: what each rank has measured.
    """
    mine = everywhere[0]
    ranks = len(everywhere)
    seconds = mine["seconds"]
    forward, backward, step = (seconds.get(phase, 0.0) for phase in ("forward", "backward", "step"))
    flops = mine["flops"]
    factor = 2 + recompute
    yield "parameters of the model", params_to_string(sum(r["summand"] for r in everywhere) / ranks)
    yield "parameters of this rank's part of the model", params_to_string(mine["params"])
    if mine["stored"] != mine["params"]:
        yield "parameters stored on this rank", params_to_string(mine["stored"])
    yield "forward MACs per rank", macs_to_string(mine["macs"])
    yield "forward FLOPs per rank", number_to_string(flops)
    if ranks > 1:
        yield "forward FLOPs of all ranks", number_to_string(sum(r["flops"] for r in everywhere))
    yield "forward latency", duration_to_string(forward)
    yield "forward FLOPS per rank", _rate(flops, forward)
    yield (
        f"backward FLOPs per rank, assumed: {factor:g} x forward",
        number_to_string(factor * flops),
    )
    if backward:
        again = (
            f", with forwards again: {number_to_string(mine['recomputed'])}"
            if mine["recomputed"]
            else ""
        )
        yield "backward FLOPs per rank, measured", number_to_string(mine["backward"]) + again
        yield "backward latency", duration_to_string(backward)
        yield "backward FLOPS per rank, assumed", _rate(factor * flops, backward)
        yield "backward FLOPS per rank, measured", _rate(mine["backward"], backward)
        both = forward + backward
        yield "forward and backward FLOPS per rank, assumed", _rate((1 + factor) * flops, both)
    yield "optimizer step latency", duration_to_string(step)
    if backward:
        whole = batch.gas * (forward + backward) + step
        yield "latency of the whole step", duration_to_string(whole)
        yield (
            "FLOPS per rank over the whole step, assumed",
            _rate(batch.gas * (1 + factor) * flops, whole),
        )
        yield "samples per second, all ranks", f"{batch.train / whole:.4g}"
    yield from _by_rank(everywhere)


def _by_rank(everywhere: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """A line per rank where ranks differ in what they compute: stages of a pipeline, experts."""
    if len({(r["flops"], r["params"]) for r in everywhere}) < 2:
        return
    for rank, row in enumerate(everywhere[:SHOWN_RANKS]):
        place = " ".join(f"{name}{index}" for name, index in row["place"].items())
        parts = (
            params_to_string(row["params"]) + " params",
            number_to_string(row["flops"]) + "FLOPs",
        )
        yield (
            f"  rank {rank} ({place})",
            ", ".join((*parts, duration_to_string(row["seconds"].get("forward", 0.0)))),
        )
    if len(everywhere) > SHOWN_RANKS:
        yield "  ...", f"{len(everywhere) - SHOWN_RANKS} more ranks"


SHOWN_RANKS = 32


# -- modules ---------------------------------------------------------------------------------------


def aggregated(counter: Counter, depth: int, top: int) -> str:
    """The `top` kinds of modules at each depth, by parameters, MACs and latency."""
    lines = [_rule(f"most expensive kinds of modules, {top} at each depth")]
    for level, modules in enumerate(_levels([counter.model], depth)):
        kinds: dict[str, list[float]] = {}
        for module in modules:
            total = counter.total(module)
            sums = kinds.setdefault(type(module).__name__, [0, 0, 0])
            for index, value in enumerate((parameters.whole(module), total.macs, total.seconds)):
                sums[index] += value
        lines.append(f"depth {level}\n")
        columns = (
            ("params", params_to_string),
            ("MACs", macs_to_string),
            ("latency", duration_to_string),
        )
        for index, (name, text) in enumerate(columns):
            best = sorted(kinds.items(), key=lambda kind: -kind[1][index])[:top]
            lines.append(
                f"  {name:<9}"
                + ", ".join(f"{kind} {text(sums[index])}" for kind, sums in best)
                + "\n"
            )
    return "".join(lines)


def _levels(modules: Iterable[nn.Module], depth: int) -> Iterator[list[nn.Module]]:
    """The modules at depth 0, 1, ... up to `depth` (-1: all); one with several places counts once
    at each depth.
    """
    level = list({id(module): module for module in modules}.values())
    while level:
        yield level
        if depth == 0:
            return
        level = list({id(c): c for module in level for c in module.children()}.values())
        depth = depth - 1


def tree(counter: Counter, depth: int) -> str:
    """Every module with its parameters, MACs, latency and FLOPS."""
    total = counter.total(counter.model)
    params = parameters.whole(counter.model)

    def line(name: str, module: nn.Module, level: int) -> Iterator[str]:
        own = counter.total(module)
        mine = parameters.whole(module)
        shown = (
            f"{params_to_string(mine)} params {_share(mine, params)}",
            f"{macs_to_string(own.macs)} {_share(own.macs, total.macs)}",
            f"{duration_to_string(own.seconds)} {_share(own.seconds, total.seconds)}",
            _rate(own.flops, own.seconds),
            *([f"{own.calls} calls"] if own.calls > counter.runs else []),
        )
        extra = module.extra_repr()
        kind = (
            f"{type(module).__name__}({extra})"
            if extra and "\n" not in extra
            else type(module).__name__
        )
        yield f"{'  ' * level}{f'({name}) ' if name else ''}{kind}: {', '.join(shown)}\n"
        if level != depth:
            for child, part in module.named_children():
                yield from line(child, part, level + 1)

    note = "Each with parameters, MACs and latency (and their shares of the model's), and FLOPS.\n"
    return _rule("modules") + note + "".join(line("", counter.model, 0))


def footnotes(counter: Counter) -> str:
    """What a reader should know."""
    lines = []
    if counter.unknown:
        names = ", ".join(sorted(counter.unknown))
        fix = "give them a formula with torch.utils.flop_counter.register_flop_formula"
        lines.append(f"Not counted, since there is no formula: {names}; {fix}.\n")
    return "".join(lines) + "-" * WIDTH + "\n"
