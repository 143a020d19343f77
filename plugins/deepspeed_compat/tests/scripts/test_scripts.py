"""The same unchanged scripts and configs, run by DeepSpeed itself and by ds_core: the same losses.

Needs pip's deepspeed beside ds_core, in an environment that ``make test-frontends`` makes; there
`import deepspeed` is DeepSpeed's, and ours when DS_CORE_AS_DEEPSPEED=1 asks for it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
HERE = Path(__file__).parent
pytestmark = pytest.mark.integration

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    # torch_adam: the same arithmetic in both. Clipping and weight decay by default.
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.005, "betas": [0.9, 0.99], "eps": 1e-8, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.005,
            "warmup_num_steps": 3,
            "warmup_type": "linear",
        },
    },
    "steps_per_print": 1000,
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "stage3-offload": {
        "zero_optimization": {"stage": 3, **OFFLOAD},
        "zero_force_ds_cpu_optimizer": False,
    },
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    # no fp16: DeepSpeed refuses it on the CPU
}
# relative; 16-bit weights round in an order of each framework's own
EXACT = 2e-5
ROUNDED = 2e-2


@functools.cache
def run(
    script: str, arguments: tuple[str, ...], config: str, mine: bool, ranks: int = 2
) -> dict[str, Any]:
    """What `script` wrote on `ranks` processes. {config} and {work} in arguments are files of this
    run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "ds_config.json")
        out = Path(scratch, "out.json")
        file.write_text(config)
        given = [a.format(config=file, work=Path(scratch, "work")) for a in arguments]
        environment = {k: v for k, v in os.environ.items() if k != "DS_CORE_AS_DEEPSPEED"}
        environment |= {"DS_CORE_AS_DEEPSPEED": "1"} if mine else {"DS_ACCELERATOR": "cpu"}
        environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
        done = subprocess.run(
            [
                *LAUNCHER,
                "--nproc-per-node",
                str(ranks),
                str(HERE / script),
                "--out",
                str(out),
                *given,
            ],
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
        )
        # which DeepSpeed never unlinks
        for left in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
            left.unlink()
        # DeepSpeed's processes may abort when they exit, after all was written: it leaves its
        # process group open
        ended = done.returncode == 0 if mine else out.exists()
        assert ended, done.stdout[-3000:] + done.stderr[-6000:]
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def check_numbers(
    script: str, arguments: tuple[str, ...], config: dict[str, Any], tolerance: float = EXACT
) -> None:
    text = json.dumps(config)
    theirs, ours = (run(script, arguments, text, mine) for mine in (False, True))
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        exact = (bool, int, type(None))
        if isinstance(values, exact) or (
            isinstance(values, list) and all(isinstance(v, exact) for v in values)
        ):
            assert ours[name] == values, name
        else:
            assert ours[name] == pytest.approx(values, rel=tolerance, abs=tolerance / 10), name


ARGS = ("--deepspeed", "--deepspeed_config", "{config}")


@pytest.mark.parametrize("name", list(CONFIGS))
def test_classifier(name: str) -> None:
    check_numbers(
        "classifier.py",
        ARGS,
        {**BASE, **CONFIGS[name]},
        EXACT if name.startswith("stage") else ROUNDED,
    )


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage2", "stage3", "stage3-offload"])
def test_bert(name: str) -> None:
    check_numbers(
        "bert.py",
        (*ARGS, "--work", "{work}"),
        {**BASE, "gradient_accumulation_steps": 2, **CONFIGS[name]},
    )


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage2", "stage3", "stage3-offload"])
def test_gpt(name: str) -> None:
    check_numbers("gpt.py", ("--config", "{config}", "--work", "{work}"), {**BASE, **CONFIGS[name]})


@pytest.mark.parametrize("stage", [0, 1])
def test_pipeline_alexnet(stage: int) -> None:
    config = {**BASE, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage}}
    check_numbers("alexnet.py", ARGS, config)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    "more", [("--ep", "1"), ("--ep", "2", "--top", "2")], ids=["top1", "ep2-top2"]
)
def test_moe(more: tuple[str, ...], stage: int) -> None:
    check_numbers("moe.py", (*ARGS, *more), {**BASE, "zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("name", ["stage0", "stage2", "stage3"])
def test_four_engines(name: str) -> None:
    check_numbers("rlhf.py", ("--config", "{config}"), {**BASE, **CONFIGS[name]})


@pytest.mark.parametrize(
    "name", ["stage1", "stage2", "stage3"]
)  # DeepSpeed refuses one backward through two at stage 0
def test_two_engines(name: str) -> None:
    check_numbers("gan.py", ARGS, {**BASE, **CONFIGS[name]})
