"""``dscore verify`` on programs of front-ends, unchanged: what two ranks compute is what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AUTO = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    "auto",
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("program", "config"),
    [("trainer.py", AUTO), ("lightning_fit.py", {"train_micro_batch_size_per_gpu": 2})],
)
def test_a_program_is_equal_to_one_process(
    tmp_path: Path, program: str, config: dict[str, object]
) -> None:
    given = tmp_path / "config.json"
    given.write_text(json.dumps({**config, "zero_optimization": {"stage": 2}}))
    words = ["verify", "--world", "2", "--steps", "2", str(HERE / program)]
    more = ["--out", str(tmp_path / "out.json"), "--work", str(tmp_path / "work")]
    ended = subprocess.run(
        [sys.executable, "-m", "ds_cli", *words, *more, "--deepspeed", str(given)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DS_CORE_AS_DEEPSPEED": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("equal: "), ended.stdout
