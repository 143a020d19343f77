"""The examinations of ``dscore doctor``, one function a part; none changes anything or starts a
device.

Each yields findings: "ok", "--" (a device that is not here), "note" (something is missing that a run
can do without) or "fault" (a run would fail).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ds_cli.plugin import ds_commands
from ds_core.entries import resolve
from ds_core.errors import DSError, PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import Found, PluginState

MIN_PYTHON = (3, 10)
MIN_TORCH = "2.6"
MIN_SHM = 512 * 2**20
BY_NAME = {
    "ds_optimizers": "optimizer",
    "ds_schedulers": "scheduler",
    "ds_state_stores": "state_store",
    "ds_launchers": "launcher",
}


Level = Literal["ok", "--", "note", "fault"]
"""Fine, nothing to say of a run; not here, and not needed; a run can do without; a run would fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    part: str
    level: Level
    found: str
    """What is there."""
    fix: str = ""
    """What to do; "" when nothing is to be done."""


def examine() -> list[Finding]:
    """Everything, in the order of the report; an examination that itself fails is a fault."""
    plugins = Plugins()
    parts: list[tuple[str, Callable[[Plugins], Iterable[Finding]]]] = [
        ("python", _python),
        ("torch", _torch),
        ("accelerator", _accelerator),
        ("compilers", _compilers),
        ("kernel cache", _kernel_cache),
        ("kernels", _kernels),
        ("plugins", _plugins),
        ("/dev/shm", _shared_memory),
        ("loopback", _loopback),
    ]
    findings: list[Finding] = []
    for part, look in parts:
        try:
            findings += look(plugins)
        except Exception as error:  # the report must be completed
            text = str(error) if isinstance(error, DSError) else f"{type(error).__name__}: {error}"
            findings.append(
                Finding(part, "fault", text, "repair or uninstall what the message names")
            )
    return findings


def _python(plugins: Plugins) -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= MIN_PYTHON:
        yield Finding("python", "ok", found)
    else:
        yield Finding(
            "python", "fault", found, f"install python >= {MIN_PYTHON[0]}.{MIN_PYTHON[1]}"
        )


def _torch(plugins: Plugins) -> Iterator[Finding]:
    import importlib_metadata
    from packaging.version import Version

    try:
        version = importlib_metadata.version("torch")
    except importlib_metadata.PackageNotFoundError:
        yield Finding("torch", "fault", "not installed", f"pip install 'torch>={MIN_TORCH}'")
        return
    if Version(version) < Version(MIN_TORCH):
        yield Finding("torch", "fault", version, f"pip install 'torch>={MIN_TORCH}'")
        return
    try:
        import torch.distributed as dist
    except Exception as error:  # a library of it may be missing
        yield Finding(
            "torch",
            "fault",
            f"{version}, but it cannot be imported: {error}",
            "install torch again",
        )
        return
    if not dist.is_available():
        yield Finding(
            "torch",
            "fault",
            f"{version}, built without torch.distributed",
            "install another build of torch",
        )
        return
    backends = [
        b
        for b in ("gloo", "nccl", "xccl", "mpi")
        if getattr(dist, f"is_{b}_available", lambda: False)()
    ]
    yield Finding("torch", "ok", f"{version}, backends: {', '.join(backends) or 'none'}")


def _accelerator(plugins: Plugins) -> Iterator[Finding]:
    from ds_core.accelerator import candidates, select_accelerator

    chosen = ""
    failed = ""
    try:
        accelerator = select_accelerator(plugins)
        chosen = accelerator.name
        count = accelerator.device_count()
        yield Finding("accelerator", "ok", f"{chosen}, {count} device{'' if count == 1 else 's'}")
    except DSError as error:
        failed = str(error)
        fix = "repair or uninstall what the message names" if isinstance(error, PluginError) else ""
        yield Finding(
            "accelerator", "fault", failed, fix or "unset DS_ACCELERATOR, or install what it names"
        )
    for entry, dist, why in candidates(plugins):
        if f"failed to make the accelerator {entry.name} (" in failed:
            yield Finding(
                f"accelerator {entry.name} ({dist})",
                "fault",
                "its device is there, but it cannot be made",
            )
        elif entry.name != chosen:
            found = f"unavailable: {why}" if why else "available, not chosen"
            level: Level = "--" if why else "ok"
            yield Finding(f"accelerator {entry.name} ({dist})", level, found)


def _kernel_cache(plugins: Plugins) -> Iterator[Finding]:
    if importlib.util.find_spec("ds_kernel_kit") is None:
        return
    folder = resolve("ds_kernel_kit.cache:cache_folder")
    try:
        yield Finding("kernel cache", "ok", str(folder(make=False)))
    except DSError as error:
        found, _, fix = str(error).rpartition("; ")
        yield Finding("kernel cache", "fault", found, fix)


def _compilers(plugins: Plugins) -> Iterator[Finding]:
    for tool, argument, fix in (
        ("g++", "--version", "install g++ (Debian: apt install g++)"),
        (
            "nvcc",
            "--version",
            "install the CUDA toolkit of torch's CUDA version, if there is an NVIDIA GPU",
        ),
        ("ninja", "--version", "pip install ninja"),
    ):
        path = shutil.which(tool) or shutil.which(tool, path=os.path.dirname(sys.executable))
        if path is None:
            yield Finding(
                tool, "note", "not found: compiled kernels that need it are not served", fix
            )
            continue
        done = subprocess.run(
            [path, argument], capture_output=True, text=True, timeout=20, check=False
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            yield Finding(tool, "note", f"{path} does not run (exit code {done.returncode})", fix)
        else:  # nvcc says its version in the last line but one
            said = next((line for line in lines if "release" in line), lines[0])
            yield Finding(tool, "ok", f"{said} at {path}")


def _kernels(plugins: Plugins) -> Iterator[Finding]:
    from ds_core.accelerator import select_accelerator
    from ds_core.kernels import Kernels

    kernels = Kernels(plugins)
    try:
        device = select_accelerator(plugins).device_type
    except DSError:  # reported above
        device = "cpu"
    for op in kernels.ops():
        rows = kernels.candidates(op, device, "float32")
        server = next((c for c in rows if c.reason is None), None)
        others = [
            f"{c.entry.provider} ({c.dist}): {c.reason or 'available'}"
            for c in rows
            if c is not server
        ]
        found = (
            f"served by {server.entry.provider} ({server.dist})"
            if server
            else "no provider can serve it"
        )
        yield Finding(
            f"kernel {op}",
            "ok" if server else "note",
            "; ".join([f"{found} on {device} float32", *others]),
            "" if server else "install a provider, or do not use it",
        )


def _plugins(plugins: Plugins) -> Iterator[Finding]:
    reports = plugins.examine()
    for report in reports:
        if report.state is PluginState.QUARANTINED:
            fix = (
                f"repair or uninstall {report.found.dist} (pip install --force-reinstall "
                f"{report.found.dist})"
            )
            yield Finding(f"plugin {report.found.name}", "fault", f"quarantined: {report.why}", fix)
        elif report.state is PluginState.DISABLED:
            yield Finding(f"plugin {report.found.name}", "note", f"disabled: {report.why}")
    loaded = [r for r in reports if r.state is PluginState.LOADED]
    yield Finding("plugins", "ok", f"{len(loaded)} of {len(reports)} loaded; see `dscore plugins`")
    yield from _conflicts(plugins)


def _conflicts(plugins: Plugins) -> Iterator[Finding]:
    """Names that two plugins claim; a run that uses one of them would stop."""
    for name in plugins.sections():
        try:
            plugins.section(name)
        except PluginError as error:
            yield Finding(
                f"section {name}",
                "fault",
                str(error),
                "uninstall one, or choose with plugins.prefer",
            )
    for hook, kind in BY_NAME.items():
        offers = plugins.named(hook, kind)
        for name in offers:
            try:
                plugin = offers[name].plugin
                entry = offers[name].value
            except PluginError as error:
                yield Finding(
                    f"{kind} {name}",
                    "fault",
                    str(error),
                    "uninstall one, or choose with plugins.prefer",
                )
                continue
            if (why := _unreachable(plugin, entry.load)) is not None:
                yield Finding(f"{kind} {name}", "fault", why, f"repair or uninstall {plugin.dist}")
    owners: dict[str, list[str]] = {name: ["dscore-cli"] for name in ds_commands()}
    for answer in plugins.offers("ds_commands"):
        for name in answer.value if answer.plugin.module != ds_commands.__module__ else ():
            owners.setdefault(name, []).append(answer.plugin.owner)
    for name, dists in owners.items():
        if len(dists) > 1:
            why = f"the command {name!r} is offered by {' and '.join(dists)}"
            yield Finding(f"command {name}", "fault", why, "uninstall one of them")


def _unreachable(plugin: Found, reference: str) -> str | None:
    """Why a reference into the plugin's own package leads nowhere; None when its module is there.

    Imports no module.
    """
    module = reference.partition(":")[0]
    if module.partition(".")[0] != plugin.module.partition(".")[0]:
        return None
    try:
        missing = importlib.util.find_spec(module) is None
    except Exception as error:  # a package on the way to it fails
        return f"plugin {plugin} offers {reference!r}: {type(error).__name__}: {error}"
    return f"plugin {plugin} offers {reference!r}, and there is no such module" if missing else None


def _shared_memory(plugins: Plugins) -> Iterator[Finding]:
    if not os.path.isdir("/dev/shm"):
        yield Finding("/dev/shm", "ok", "this system has none")
        return
    usage = shutil.disk_usage("/dev/shm")
    found = f"{usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    if usage.free >= MIN_SHM:
        yield Finding("/dev/shm", "ok", found)
    else:
        fix = (
            "data loader workers may die with a bus error; give more (docker run "
            "--shm-size=8g) or "
            "num_workers 0"
        )
        yield Finding("/dev/shm", "note", found, fix)


def _loopback(plugins: Plugins) -> Iterator[Finding]:
    """A port can be opened and reached on this machine: what the processes of a run meet at."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        fix = "allow connections to 127.0.0.1 (firewall, sandbox)"
        yield Finding(
            "loopback", "fault", f"no process can reach another on this machine: {error}", fix
        )
        return
    yield Finding("loopback", "ok", "ports can be opened and reached on 127.0.0.1")
