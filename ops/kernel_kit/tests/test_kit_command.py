"""``dscore ops``: what it lists, builds, compares and times, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ds_command_kit.show import CommandError
from ds_kernel_kit import command as ops
from ds_kernel_kit import references
from ds_kernel_kit.build import Extension, Unit
from typer.testing import CliRunner

from ds_core.entries import KernelEntry
from ds_core.kernels import Kernels
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import BACKENDS, Found

ENTRIES = (
    KernelEntry("accumulate", "right", "ops_cli:right", 10, build="ops_cli:EXTENSION"),
    KernelEntry("lion", "gpu", "ops_cli:wrong", 30, devices=("cuda",)),
    KernelEntry("lion", "away", "ops_cli:wrong", 20, available=lambda: "g++ not found"),
)

KIT = Found("kernel_kit", BACKENDS, "ds_kernel_kit.plugin", "dscore-kernel-kit", "0.1.0")


def wrong(into: Any, added: Any, *, scale: float = 1.0) -> None:
    """Forgets `scale`."""
    references.accumulate(into, added)


@pytest.fixture
def dscore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(words, entries) -> what ``dscore ops`` said, and its exit code, with a plugin that offers
    `entries`.
    """
    monkeypatch.setenv("DS_CORE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.cpp").write_text("this is no program\n")
    (tmp_path / "no.header").mkdir()  # nor a source
    module: Any = ModuleType("ops_cli")
    module.right = references.accumulate
    module.wrong = wrong
    module.EXTENSION = Extension("ds-ops-cli", "_cli", tmp_path, (Unit("bad.cpp"),))
    monkeypatch.setitem(sys.modules, "ops_cli", module)

    def run(*words: str, entries: tuple[KernelEntry, ...] = ENTRIES) -> Any:
        module.ds_kernels = lambda: entries
        found = [KIT] + (
            [Found("ops_cli", BACKENDS, "ops_cli", "ds-ops-cli", "1.0")] if entries else []
        )
        monkeypatch.setattr(ops, "_kernels", lambda: Kernels(Plugins(found=found)))
        done = CliRunner().invoke(ops.app, list(words))
        if done.exception is not None and not isinstance(
            done.exception, (SystemExit, CommandError)
        ):
            raise done.exception
        return done

    return run


@pytest.mark.parametrize(
    ("dtype", "meant"), [("int99", "int"), ("bf16", "did you mean bfloat16?"), ("", "float32")]
)
def test_list_knows_dtypes(dscore: Any, dtype: str, meant: str) -> None:
    done = dscore("list", "--dtype", dtype)
    assert isinstance(done.exception, CommandError)
    assert f"--dtype {dtype}: no such dtype; " in str(done.exception) and meant in str(
        done.exception
    )
    assert dscore("list", "--dtype", "float8_e5m2").exit_code == 0


def test_list_says_who_serves_and_why_not(dscore: Any) -> None:
    said = json.loads(dscore("list", "--json").stdout)
    rows = {(r["operation"], r["provider"]): r["state"] for r in said}
    assert (
        rows["accumulate", "right"] == "serves" and rows["accumulate", "reference"] == "available"
    )
    assert rows["lion", "gpu"] == "serves cuda only" and rows["lion", "away"] == "g++ not found"
    assert rows["lion", "reference"] == "serves"
    on_gpu = json.loads(dscore("list", "--json", "--device", "cuda").stdout)
    assert {r["provider"]: r["state"] for r in on_gpu if r["operation"] == "lion"}[
        "gpu"
    ] == "serves"
    assert "lion" in dscore("list").stdout


def test_build_shows_the_compilers_words(dscore: Any) -> None:
    done = dscore("build")
    assert done.exit_code == 1
    assert "ds-ops-cli does not compile here" in done.output and "this is no program" in done.output
    assert "no installed distribution has anything to compile" in dscore("build", entries=()).output
    unknown = dscore("build", "ds-ops-cpi")
    assert unknown.exit_code != 0 and "known: ds-ops-cli" in str(unknown.exception)


def test_test_compares(dscore: Any) -> None:
    done = dscore("test")
    assert done.exit_code == 0
    lines = {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}
    assert "ok, 24 comparisons" in lines["accumulate", "right"]
    assert "not available: g++ not found" in lines["lion", "away"]
    assert ("lion", "gpu") not in lines
    bad = dscore("test", entries=(KernelEntry("accumulate", "wrong", "ops_cli:wrong", 10),))
    assert (
        bad.exit_code == 1
        and "differs: accumulate by wrong, torch.float32 contiguous scaled" in bad.stdout
    )
    assert (
        "nothing to compare; `pip install -c dist/constraints.txt dscore-ops-cpu`"
        in dscore("test", entries=()).output
    )


def test_bench_times_every_provider(dscore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_seconds", lambda call: (call(), 0.5)[1])
    done = dscore("bench", "accumulate", "lion", "--size", "1e3")
    assert [line.split() for line in done.stdout.splitlines()[1:4]] == [
        ["accumulate", "reference", "500.00", "1.00x"],
        ["accumulate", "right", "500.00", "1.00x"],
        ["lion", "reference", "500.00", "1.00x"],
    ]
    assert "1,000 elements of fp32" in done.stdout
