"""``dscore ops``: what kernels there are, who serves them here, and building, checking and timing
them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ds_command_kit.show import CommandError, say_error, show_json, show_table

from ds_core.catalogue import install
from ds_core.errors import KernelError, PluginError, nearest

if TYPE_CHECKING:
    from ds_core.kernels import Candidate, Kernels
    from ds_kernel_kit.build import Extension

DTYPES = (
    *(
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
    ),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""Dtypes of tensors, as torch names them; written here, since listing kernels need not load torch.
"""
_SHORT = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
}

DEVICES = (
    "cpu",
    "cuda",
    "xpu",
    "mps",
    "hpu",
    "npu",
    "mlu",
    "musa",
    "mtia",
    "meta",
    "privateuseone",
)
"""Device types of torch, besides those that providers and accelerators name."""

Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="A device type, as torch names it, such as cuda.")
]
Dtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="A dtype, as torch names it, such as bfloat16.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Operations; all when left out.")
]

app = typer.Typer(
    help="List, build, check and time kernels.", no_args_is_help=True, add_completion=False
)
"""The group ``dscore ops``."""


@app.command("list")
def list_(device: Device = "cpu", dtype: Dtype = "float32", as_json: Json = False) -> None:
    """Show every operation: its providers, best first, and why one cannot serve.

    Exit codes:
      0: the list is shown

    Examples:
      dscore ops list
      dscore ops list --device cuda --dtype bfloat16
    """
    table = _kernels()
    _check_device(table, device)
    # Providers may offer dtypes that are not in the table.
    offered = {
        d for op in table.ops() for c in table.candidates(op, device, dtype) for d in c.entry.dtypes
    }
    if dtype not in (known := {*DTYPES, *offered}):
        close = nearest(_SHORT.get(dtype, dtype), known)
        meant = f"did you mean {close}? " if close else ""
        raise CommandError(
            f"--dtype {dtype}: no such dtype; {meant}known: {', '.join(sorted(known))}"
        )
    rows = [row for op in table.ops() for row in _providers_of(table, op, device, dtype)]
    if as_json:
        show_json(rows)
    else:
        columns = ("operation", "provider", "distribution", "state")
        show_table(
            (*columns[:3], f"on {device} {dtype}"), [[row[c] for c in columns] for row in rows]
        )


def _providers_of(table: Kernels, op: str, device: str, dtype: str) -> Iterator[dict[str, str]]:
    """A row for each provider of `op`, best first."""
    serving = True
    for candidate in table.candidates(op, device, dtype):
        entry = candidate.entry
        yield {
            "operation": op,
            "provider": entry.provider,
            "distribution": candidate.dist,
            "priority": str(entry.priority),
            "devices": ", ".join(entry.devices) or "any",
            "dtypes": ", ".join(entry.dtypes) or "any",
            "state": candidate.reason or ("serves" if serving else "available"),
        }
        serving = serving and candidate.reason is not None


def _check_device(table: Kernels, device: str) -> None:
    """Raises CommandError for a device type that neither torch nor a provider has."""
    from ds_core.accelerator import candidates
    from ds_core.plugins import Plugins

    offered = {
        d for op in table.ops() for c in table.candidates(op, "", "") for d in c.entry.devices
    }
    known = {*DEVICES, *offered, *(entry.name for entry, _, _ in candidates(Plugins()))}
    if device not in known:
        close = nearest(device, known)
        meant = f"did you mean {close}? " if close else ""
        raise CommandError(
            f"--device {device}: no such device type; {meant}known: {', '.join(sorted(known))}"
        )


@app.command("build")
def build(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Distributions; all when left out."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what is built already.")] = False,
) -> None:
    """Compile kernels now, not when a run first needs them.

    Exit codes:
      0: everything is compiled
      1: something cannot be compiled, and stderr says why

    Examples:
      dscore ops build
      dscore ops build dscore-ops-cpu --again
    """
    from ds_kernel_kit import build as builder

    _log_to_stderr()
    found = _extensions()
    unknown = set(names or ()) - set(found)
    if unknown:
        raise CommandError(
            f"{', '.join(sorted(unknown))}: compiles nothing; known: {', '.join(found) or 'none'}"
        )
    failed = False
    for name in names or sorted(found):
        start = time.perf_counter()
        try:
            path = builder.build(found[name], again=again)
        except KernelError as error:
            say_error(str(error))
            failed = True
            continue
        typer.echo(f"{name}: {path} ({time.perf_counter() - start:.1f} s)")
    if not found:
        typer.echo("no installed distribution has anything to compile")
    if failed:
        raise typer.Exit(1)


@app.command("test")
def compare(names: Names = None, device: Device = "cpu") -> None:
    """Compare every available provider with the reference.

    Exit codes:
      0: no provider differs from the reference
      1: one differs, or fails

    Examples:
      dscore ops test
      dscore ops test adam lion --device cuda
    """
    from ds_kernel_kit import comparisons as kit

    _log_to_stderr()
    _check_device(_kernels(), device)
    rows = []
    failed = False
    for op, candidate in _providers(names, device):
        entry = candidate.entry
        name = [op, entry.provider, candidate.dist]
        if entry.provider == "reference":
            continue
        if candidate.reason is not None:
            rows.append([*name, f"not available: {candidate.reason}"])
        elif not kit.has_check(entry):
            rows.append([*name, "has no check"])
        else:
            try:
                rows.append([*name, f"ok, {kit.check(entry, device)} comparisons"])
            except (AssertionError, KernelError) as error:
                failed = True
                rows.append(
                    [
                        *name,
                        f"differs: {error}" if isinstance(error, AssertionError) else str(error),
                    ]
                )
    if not rows:
        typer.echo(
            f"only references serve {device}: nothing to compare; {install('dscore-ops-cpu')}"
        )
        return
    show_table(("operation", "provider", "distribution", "result"), rows)
    if failed:
        raise typer.Exit(1)


@app.command("bench")
def bench(
    names: Names = None,
    size: Annotated[float, typer.Option(metavar="N", help="Elements.")] = 1e7,
    threads: Annotated[int, typer.Option(metavar="N", help="Threads; 0: torch's number.")] = 0,
) -> None:
    """Time every provider on the CPU in fp32, and its speed against the reference.

    Exit codes:
      0: the times are shown

    Examples:
      dscore ops bench
      dscore ops bench adam --size 1e6 --threads 1
    """
    import torch

    _log_to_stderr()
    if threads:
        torch.set_num_threads(threads)
    rows: list[list[str]] = []
    base: dict[str, float] = {}
    for op, candidate in sorted(
        _providers(names, "cpu"), key=lambda r: (r[0], r[1].entry.priority)
    ):
        calls = _timed_calls(int(size))
        if candidate.reason is not None or op not in calls:
            continue
        from ds_core.entries import resolve

        function = resolve(candidate.entry.load)
        seconds = _seconds(lambda call=calls[op], function=function: call(function))  # type: ignore[misc]
        first = base.setdefault(op, seconds)
        rows.append(
            [op, candidate.entry.provider, f"{seconds * 1e3:.2f}", f"{first / seconds:.2f}x"]
        )
    show_table(("operation", "provider", "ms", "speed"), rows)
    typer.echo(f"{int(size):,} elements of fp32, {torch.get_num_threads()} threads, median")


# -- what they share -------------------------------------------------------------------------------


def _kernels() -> Kernels:
    """What is installed: also the kernels of plugins that a run loads only when its config has
    their section.
    """
    from ds_core.kernels import Kernels
    from ds_core.plugins import Plugins

    plugins = Plugins()
    # A section's plugin that cannot be loaded must not hide the others.
    for name in plugins.sections():
        try:
            plugins.load_sections([name])
        except PluginError as error:
            say_error(str(error))
    return Kernels(plugins)


def _providers(names: list[str] | None, device: str) -> Iterator[tuple[str, Candidate]]:
    """Everybody who could serve these operations on `device`, in some dtype."""
    table = _kernels()
    for op in names or table.ops():
        for candidate in table.candidates(op, device, "float32"):
            if not candidate.entry.devices or device in candidate.entry.devices:
                yield op, candidate


def _extensions() -> dict[str, Extension]:
    """What can be compiled, by name."""
    from ds_core.entries import resolve

    table = _kernels()
    found = {}
    for op in table.ops():
        for candidate in table.candidates(op, "", ""):
            if candidate.entry.build is not None:
                extension: Extension = resolve(candidate.entry.build)
                found[extension.name] = extension
    return found


def _log_to_stderr() -> None:
    """Building takes seconds; its log lines say so."""
    import logging

    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)


def _timed_calls(n: int) -> dict[str, Callable[[Any], Any]]:
    """One call of each operation that the core knows, on tensors of `n` elements."""
    import torch

    from ds_kernel_kit import references
    from ds_kernel_kit.steps import STEPS

    p, g, m, v = (torch.rand(n) for _ in range(4))
    half = g.bfloat16()
    how: dict[str, Any] = {"bits": 8, "group": 64}
    q, scales, lows = references.quantize(g, **how, symmetric=True)
    calls: dict[str, Callable[[Any], Any]] = {
        "squared_norm": lambda f: f([g]),
        "accumulate": lambda f: f([p], [half]),
        "quantize": lambda f: f(g, **how, symmetric=True),
        "dequantize": lambda f: f(q, scales, lows, **how, numel=n, dtype=torch.float32),
        "dequantize_sum": lambda f: f(q[None], scales[None], **how, numel=n, dtype=torch.float32),
        "requantize_sum": lambda f: f(q[None], scales[None], **how, numel=n),
    }
    for op, spec in STEPS.items():
        lists = [[t] for t in (p, g, m, v)[: len(spec.tensors)]]
        calls[op] = lambda f, lists=lists, options=spec.trials[0]: f(*lists, **options)  # type: ignore[misc]
    return calls


def _seconds(call: Callable[[], Any]) -> float:
    # Once before: it may build, and touches the memory.
    call()
    times: list[float] = []
    end = time.perf_counter() + 1
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)
