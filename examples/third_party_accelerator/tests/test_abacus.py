"""A vendor's device, built, installed and used as its users would: nothing of ds_core is changed
for it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from building import pip
from distributions import ROOT
from ds_testing.processes import clean_environment, run
from pages import blocks

HERE = Path(__file__).parent
EXAMPLE = HERE.parent
GPT = EXAMPLE.parent / "gpt"
KIT = str(HERE / "conformance.py")
TUTORIAL = ROOT / "docs" / "tutorials" / "write-an-accelerator.md"
pytestmark = pytest.mark.slow  # it is compiled

Run = Callable[..., str]


@pytest.fixture(scope="module")
def abacus(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a command where torch-abacus is installed."""
    place = tmp_path_factory.mktemp("abacus")
    shutil.copytree(
        EXAMPLE,
        place / "source",
        ignore=shutil.ignore_patterns("build", "*.so", "*.egg-info", "tests"),
    )
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place), str(place / "source"))
    (wheel,) = place.glob("*.whl")
    site = place / "site"
    pip("install", "-q", "--no-deps", "--no-compile", "--target", str(site), str(wheel))

    def start(*command: str, cwd: Path, status: int = 0, **variables: str) -> str:
        environment = clean_environment(PYTHONPATH=str(site), **variables)
        done: str = run(
            [sys.executable, *command], cwd=cwd, env=environment, status=status, timeout=300
        )
        return done

    return start


def console(page: Path) -> list[tuple[str, list[str]]]:
    """(command, its output) of the page's console blocks."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(
        block.text for block in blocks(page) if block.language == "console"
    ).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def trained(abacus: Run, folder: Path, device: str, nproc: int) -> list[dict[str, Any]]:
    """What the ranks of tests/train.py leave; run twice, so that the second goes on from the
    first's checkpoint.
    """
    folder.mkdir()
    for _ in range(2):
        command = (
            "-m",
            "ds_cli",
            "run",
            "--nproc",
            str(nproc),
            str(HERE / "train.py"),
            str(folder),
        )
        abacus(*command, cwd=folder, DS_ACCELERATOR=device)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(nproc)]


def test_it_passes_the_kit(abacus: Run, tmp_path: Path) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", KIT)
    output = abacus(*command, cwd=tmp_path)
    assert "18 passed" in output, output


@pytest.mark.parametrize("nproc", [1, 2])
def test_training_is_that_of_the_cpu(abacus: Run, tmp_path: Path, nproc: int) -> None:
    """Zero-2, tied weights, clipping, a checkpoint between: equal losses and weights, each rank on
    its device.
    """
    there, here = (
        trained(abacus, tmp_path / device, device, nproc) for device in ("abacus", "cpu")
    )
    for rank, (mine, reference) in enumerate(zip(there, here, strict=True)):
        assert (mine["device"], mine["accelerator"]) == (f"abacus:{rank}", "abacus")
        assert reference["device"] == "cpu"
        assert mine["steps"] == reference["steps"] == 8
        assert mine["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        for weight, wanted in zip(mine["weights"], reference["weights"], strict=True):
            assert weight == pytest.approx(wanted, abs=1e-6)
        assert 0 < mine["peak"] < 64 * 2**20  # the device's own memory, not the process's


def test_activations_rest_on_the_host(abacus: Run, tmp_path: Path) -> None:
    """By config alone, with ZeRO 0 and 3: the same bits, and the bytes of the device that the
    formula gives.
    """
    abacus(
        "-m", "ds_cli", "run", "--nproc", "2", str(HERE / "offload.py"), str(tmp_path), cwd=tmp_path
    )
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        unit = seen["unit"]
        layers = seen["layers"]
        for stage, without, offloaded in seen["found"]:
            assert offloaded["device"] == f"abacus:{rank}"
            assert (offloaded["losses"], offloaded["weights"]) == (
                without["losses"],
                without["weights"],
            ), stage
            # Each block keeps its input and the output of relu, and the last layer its input;
            # offloaded, the last block's output of relu is still on its way.
            assert without["held"] == pytest.approx((3 * layers + 1) * unit, rel=0.05)
            assert offloaded["held"] == pytest.approx((2 + 1) * unit, rel=0.05)
            assert without["peak"] - offloaded["peak"] > 2 * layers * unit  # most of what rested


def test_the_tutorials_output_is_real(abacus: Run, tmp_path: Path) -> None:
    """Its commands in order, the quickstart as it is among them: found by its probe, resumed, with
    the CPU's losses.
    """
    for command, shown in console(TUTORIAL):
        words = shlex.split(
            command.replace("examples/gpt", str(GPT)).replace("tests/conformance.py", KIT)
        )
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        words = words[len(variables) :]
        program = words[1:] if words[0] == "python" else ["-m", "ds_cli", *words[1:]]
        output = abacus(
            *program, cwd=tmp_path, status=1 if "ABACUS_DEVICES" in variables else 0, **variables
        )
        for line in shown:
            assert line in output, f"{command}: {line!r} is not in\n{output}"
    rows = (tmp_path / "runs/gpt/Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(
        [5.47434, 5.45719, 5.48876, 5.36512], rel=1e-3
    )


DETACHED = """
import torch
from ds_core.accelerator import candidates, get_accelerator
from ds_core.plugins import Plugins
print(get_accelerator(Plugins()).name)
print({entry.name: why for entry, _, why in candidates(Plugins())}["abacus"])
"""


def test_without_a_device_the_reason_is_told(abacus: Run, tmp_path: Path) -> None:
    assert abacus("-c", DETACHED, cwd=tmp_path, ABACUS_DEVICES="0").split("\n")[:2] == [
        "cpu",
        "ABACUS_DEVICES is 0",
    ]


OVERFULL = """
import torch
kept = torch.empty(3 << 20, dtype=torch.uint8, device="abacus")
try:
    torch.empty(2 << 20, dtype=torch.uint8, device="abacus")
except torch.OutOfMemoryError as error:
    print(error)
print(torch.abacus.memory_allocated(), torch.abacus.max_memory_allocated(), torch.abacus.mem_get_info())
"""


def test_its_memory_ends(abacus: Run, tmp_path: Path) -> None:
    output = abacus("-c", OVERFULL, cwd=tmp_path, ABACUS_MEMORY_MIB="4").splitlines()
    assert (
        "abacus:0 is out of memory: 2097152 bytes asked for, 1048576 of 4194304 free" in output[0]
    )
    assert output[-1] == "3145728 3145728 (1048576, 4194304)"


ORDER = """
import torch
host = torch.ones(1 << 22).pin_memory()
side, late = torch.abacus.Stream(), []
for step in range(20):
    here = torch.zeros(1 << 22, device="abacus")
    side.wait_stream(torch.abacus.current_stream())
    with torch.abacus.stream(side):
        here.copy_(host, non_blocking=True)
        late.append(not side.query())
        done = torch.abacus.Event()
        done.record()
    done.wait()
    assert (here + 1).sum().item() == 2 * (1 << 22), step
print(any(late))
"""


def test_copies_are_queued_and_events_order_them(abacus: Run, tmp_path: Path) -> None:
    """The copy has not ended when it was queued; what waits for the event sees it."""
    assert abacus("-c", ORDER, cwd=tmp_path).strip() == "True"
