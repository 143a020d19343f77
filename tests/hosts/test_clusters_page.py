"""Every command of docs/clusters.md, as it is shown."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ds_testing.processes import clean_environment
from ds_testing_hosts.clusters import no_slurm, start_slurm
from ds_testing_hosts.lab import Lab, unavailable
from ds_testing_hosts.ray_hosts import start_ray
from pages import DOCS, Block, blocks
from sites import LIMIT

pytestmark = pytest.mark.hosts
BLOCKS = blocks(DOCS / "clusters.md")
TRAIN = """
import torch, ds_core
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
engine, *_ = ds_core.initialize(model=torch.nn.Linear(4, 4), config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
if engine.global_rank == 0:
    print(f"trained on {torch.distributed.get_world_size()} ranks", flush=True)
engine.destroy()
"""
RANKS = {"--include": 2, "--exclude": 3, "--nnodes 1": 2}


def noted(words: str) -> list[Block]:
    return [block for block in BLOCKS if words in block.note]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path, dict[str, str]]]:
    """Hosts with the names of the page, the folder in which commands are typed, and their
    environment.
    """
    if reason := unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("page")
    (folder / "hosts.txt").write_text(noted("a hostfile")[0].text)
    (folder / "train.sbatch").write_text(noted("the file train.sbatch")[0].text)
    (folder / "train.py").write_text(TRAIN)
    (folder / "bin").mkdir()
    for name, module in (("dscore", "ds_cli"), ("torchrun", "torch.distributed.run")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
    env = clean_environment(DS_ACCELERATOR="cpu")
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    with Lab("node-a", "node-b", ssh=True, shared=[folder]) as lab:
        yield lab, folder, env


def on_head(block: Block, place: tuple[Lab, Path, dict[str, str]], more: dict[str, str]) -> None:
    lab, folder, env = place
    for line in block.text.splitlines():
        said = lab.head.run(["sh", "-ec", line], cwd=folder, env=env | more, timeout=LIMIT)
        if line.startswith("sbatch"):
            said = "".join(file.read_text() for file in folder.glob("slurm-*.out"))
        wanted = next((count for words, count in RANKS.items() if words in line), 4)
        if "train" in line and "--show" not in line:
            assert said.count(f"trained on {wanted} ranks") == 1, said


def on_each(command: str, place: tuple[Lab, Path, dict[str, str]]) -> None:
    lab, folder, env = place
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "29400"}
    started = [
        host.popen(
            ["sh", "-ec", command],
            cwd=folder,
            env=env | shared | {"RANK": str(n), "JOB_COMPLETION_INDEX": str(n)},
        )
        for n, host in enumerate(lab.hosts)
    ]
    said = "".join(process.communicate(timeout=LIMIT)[0] for process in started)
    assert all(process.returncode == 0 for process in started), said
    assert said.count("trained on 4 ranks") == 1, said


@pytest.mark.parametrize("block", noted("on head, by"), ids=lambda block: f"line {block.line}")
def test_from_one_host(place: tuple[Lab, Path, dict[str, str]], block: Block) -> None:
    on_head(block, place, {})


@pytest.mark.parametrize("block", noted("on each host"), ids=lambda block: f"line {block.line}")
def test_on_each_host(place: tuple[Lab, Path, dict[str, str]], block: Block) -> None:
    on_each(block.text.strip(), place)


def test_slurm(place: tuple[Lab, Path, dict[str, str]]) -> None:
    if reason := no_slurm():
        pytest.skip(reason)
    conf = {"SLURM_CONF": start_slurm(place[0], place[1]).environment["SLURM_CONF"]}
    for block in noted("with Slurm"):
        on_head(block, place, conf)


def test_ray(place: tuple[Lab, Path, dict[str, str]]) -> None:
    pytest.importorskip("ray", reason="ray is not installed; make test-hosts does so")
    start_ray(*place[:2])
    for block in noted("with Ray"):
        on_head(block, place, {})


def test_kubernetes(place: tuple[Lab, Path, dict[str, str]]) -> None:
    """The pods' command on hosts that have the pods' names and variables."""
    manifest = noted("Kubernetes")[0].text
    found = re.search(r"command: \[(.*?)\]", manifest, re.DOTALL)
    assert found is not None
    command = " ".join(found[1].replace(",", " ").split()).replace(
        "$(JOB_COMPLETION_INDEX)", "$JOB_COMPLETION_INDEX"
    )
    for host in place[0].hosts:
        with (host.root / "run/lab/hosts").open("a") as table:
            table.write(f"{place[0].hosts[0].address} train-0.train\n")
    on_each(command, place)


def test_all_blocks_are_run() -> None:
    said = ("on head", "on each host", "the file train.sbatch", "a hostfile", "Kubernetes")
    assert all(any(words in block.note for words in said) for block in BLOCKS)
