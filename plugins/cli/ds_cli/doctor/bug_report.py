"""``dscore doctor --report FILE``: one Markdown file for a bug report, without secrets."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import importlib_metadata

from ds_cli.doctor.checks import Finding
from ds_cli.doctor.cleaning import clean
from ds_cli.doctor.last_failure import kept
from ds_core.config.redaction import REDACTED, is_secret_name, redact, secrets_in
from ds_core.errors import DSError

OTHERS = (
    "torch",
    "triton",
    "numpy",
    "pydantic",
    "pluggy",
    "safetensors",
    "transformers",
    "accelerate",
    "lightning",
)
PREFIXES = (
    *(
        "ACCELERATE_",
        "CUDA_",
        "DS_",
        "GLOO_",
        "GOMP_",
        "HIP_",
        "I_MPI_",
        "KMP_",
        "LOCAL_",
        "MASTER_",
        "MKL_",
        "NCCL_",
    ),
    *(
        "NVIDIA_",
        "OMP_",
        "OMPI_",
        "PMI",
        "PYTHON",
        "PYTORCH_",
        "RANK",
        "RDZV_",
        "ROCR_",
        "SLURM_",
        "TORCH",
        "TRITON_",
    ),
    *("UCX_", "WORLD_SIZE", "XDG_CACHE_HOME", "ZE_"),
)
"""What the names of environment variables begin with that change how a run goes."""


def report(findings: Sequence[Finding], config: Path | None = None) -> str:
    """The whole text.

    config: a file that was used; its problems are told, and its secrets taken out of everything.
    """
    secrets, said = _config(config) if config is not None else (set(), [])
    parts = [
        "# ds_core: report of a machine and an installation",
        f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}. Secrets are {REDACTED}; look it "
        "over before you send.",
        "## What happened",
        "(what you did, what you expected, what happened instead)",
        *_section("Versions", _versions()),
        *_section("Platform", _platform()),
        *_section(
            "Findings",
            [
                f"{f.level:5} {f.part}: {f.found}{f'  -> {f.fix}' if f.fix else ''}"
                for f in findings
            ],
        ),
        *_section("Plugins", _plugins()),
        *_section("Environment", _environment()),
        *(_section("Config", said, "json") if config is not None else []),
        *_section("Last failure of dscore run", kept().splitlines() or ["none is kept"]),
    ]
    return clean("\n\n".join(parts) + "\n", secrets)


def _section(title: str, lines: Sequence[str] | Iterator[str], language: str = "text") -> list[str]:
    body = "\n".join(lines).replace("```", "'''")
    return [f"## {title}", f"```{language}\n{body}\n```"]


def _versions() -> Iterator[str]:
    names = {d.name or "" for d in importlib_metadata.distributions()}
    ours = sorted(name for name in names if name.startswith("dscore-"))
    yield f"python {platform.python_version()} ({platform.python_implementation()})"
    for name in (*OTHERS, *ours):
        try:
            yield f"{name} {importlib_metadata.version(name)}"
        except importlib_metadata.PackageNotFoundError:
            continue


def _platform() -> Iterator[str]:
    yield f"system: {platform.platform()}, {platform.machine()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"cores: {cores} of {os.cpu_count()}"
    if "SC_PHYS_PAGES" in os.sysconf_names:
        yield f"memory: {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    yield f"python: {sys.executable}{' (virtual environment)' if sys.prefix != sys.base_prefix else ''}"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        yield "in a container"


def _plugins() -> Iterator[str]:
    from ds_core.plugins import Plugins

    for row in Plugins().examine():
        found = row.found
        why = f"  {row.why}" if row.why else ""
        yield (
            f"{row.state.value:11} {found.name} ({found.owner}, {found.group}, {found.module}){why}"
        )


def _environment() -> Iterator[str]:
    for name in sorted(os.environ):
        if name.startswith(PREFIXES):
            yield f"{name}={REDACTED if is_secret_name(name) else redact(os.environ[name])}"


def _config(file: Path) -> tuple[set[str], list[str]]:
    """(its secrets, the config without them and what is wrong with it)."""
    from ds_command_kit.config_code import named_code

    from ds_core.config import read_config
    from ds_core.setup.compose import compose

    try:
        source = read_config(str(file))
    except DSError as error:
        return set(), [str(error)]
    problems: list[str] = []
    shown: Any = redact(source.raw)
    secrets = secrets_in(source.raw)
    try:
        if modules := named_code(source):  # a report must not run what a file names
            problems = [f"// not checked: plugins.load names {', '.join(modules)}"]
        else:
            shown = compose(source, fill_later=True).config.redacted()
    except DSError as error:
        problems = [f"// {line}" for line in str(error).splitlines()]
    return secrets, [
        *json.dumps(shown, indent=2).splitlines(),
        *(problems or ["// no problem found"]),
    ]
