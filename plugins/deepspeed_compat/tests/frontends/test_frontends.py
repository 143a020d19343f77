"""The released front-ends, unchanged, on ds_core: their loss curves equal those of their own plain
data parallelism.

Needs what requirements.txt lists: ``make test-frontends``. Each case runs a program of this folder
as its users would.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ds_testing.processes import free_port

HERE = Path(__file__).parent
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": "inf",
    "wall_clock_breakdown": False,
}
BUCKETS = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
}
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "3": {"stage": 3, **BUCKETS},
    "3-offload": {
        "stage": 3,
        **BUCKETS,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}
ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
LINEAR = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.integration


PACKAGES = ("torch", "transformers", "accelerate", "lightning", "peft", "trl", "datasets")


@functools.cache
def server(deepspeed: bool) -> subprocess.Popen[str]:
    """A process that has imported the front-ends and runs programs: warm.py."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("DS_CORE_AS")
    } | ENVIRONMENT
    if deepspeed:
        environment["DS_CORE_AS_DEEPSPEED"] = "1"
    started = subprocess.Popen(
        [sys.executable, str(HERE / "warm.py"), *PACKAGES],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(end, started)
    return started


def end(server: subprocess.Popen[str]) -> None:
    with server:  # closes its pipes and waits
        server.kill()


def run(program: str, ranks: int, *arguments: str, work: Path | None = None) -> dict[str, Any]:
    """What `program` wrote, run on `ranks` processes as torchrun would."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        argv = [
            str(HERE / program),
            "--out",
            str(out),
            "--work",
            str(work or Path(scratch, "work")),
            *arguments,
        ]
        deepspeed = "--deepspeed" in arguments or "--stage" in arguments
        warm = server(deepspeed)
        assert warm.stdin and warm.stdout
        warm.stdin.write(json.dumps({"argv": argv, "ranks": ranks}) + "\n")
        warm.stdin.flush()
        done = json.loads(warm.stdout.readline())
        assert done["code"] == 0, done["output"][-9000:]
        found: dict[str, Any] = json.loads(out.read_text())
        assert ("ds_deepspeed_compat" in found.pop("engine")) == deepspeed
        return found


@functools.cache
def without_deepspeed(program: str, ranks: int, *arguments: str) -> dict[str, Any]:
    """The same program without DeepSpeed."""
    return run(program, ranks, *arguments)


def config(folder: Path, stage: str, **more: Any) -> str:
    file = folder / "ds_config.json"
    file.write_text(json.dumps({**AUTO, "zero_optimization": STAGES[stage], **more}))
    return str(file)


def assert_same(got: dict[str, Any], wanted: dict[str, Any], *names: str) -> None:
    for name in names:
        assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name


stages = pytest.mark.parametrize("stage", list(STAGES))
worlds = pytest.mark.parametrize("ranks", [1, 2])


@worlds
@stages
def test_trainer(stage: str, ranks: int, tmp_path: Path) -> None:
    got = run("trainer.py", ranks, "--deepspeed", config(tmp_path, stage))
    assert_same(
        got, without_deepspeed("trainer.py", ranks), "losses", "norms", "evals", "lrs", "final"
    )


@pytest.mark.parametrize("stage", ["2", "3", "3-offload"])
def test_trainer_with_a_pretrained_model(stage: str, tmp_path: Path) -> None:
    got = run("trainer.py", 2, "--deepspeed", config(tmp_path, stage), "--pretrained", "1")
    assert got["sharded"] == stage.startswith("3")
    assert_same(
        got,
        without_deepspeed("trainer.py", 2, "--pretrained", "1"),
        "losses",
        "norms",
        "evals",
        "lrs",
        "final",
    )


@worlds
@pytest.mark.parametrize("place", ["none", "cpu"])
def test_zero_inference(place: str, ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    zero = {"stage": 3, "param_persistence_threshold": 0, "offload_param": {"device": place}}
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    got = run("zero_inference.py", ranks, "--deepspeed", str(file))
    assert got["sharded"] and got["text"] == without_deepspeed("zero_inference.py", 1)["text"]


@stages
def test_trainer_accumulates_resumes_and_loads_the_best_model(stage: str, tmp_path: Path) -> None:
    file = config(tmp_path, stage)
    more = ["--gas", "2", "--best", "1"]
    whole = run("trainer.py", 2, "--deepspeed", file, *more, work=tmp_path / "work")
    assert_same(
        whole, without_deepspeed("trainer.py", 2, *more), "losses", "norms", "evals", "lrs", "final"
    )
    resumed = run(
        "trainer.py", 2, "--deepspeed", file, *more, "--resume", "3", work=tmp_path / "work"
    )
    assert_same(resumed, whole, "losses", "evals", "final")


@pytest.mark.parametrize("stage", ["1", "3"])
def test_trainer_with_the_configs_optimizer_and_schedule(stage: str, tmp_path: Path) -> None:
    own = config(tmp_path, stage, optimizer=ADAM)
    # the Trainer's own optimizer spares some weights from the decay, a config's does not
    more = ["--decay", "0"]
    got = run("trainer.py", 2, "--deepspeed", own, *more)
    assert_same(got, without_deepspeed("trainer.py", 2, *more), "losses", "norms", "evals")
    both = config(tmp_path, stage, optimizer=ADAM, scheduler=LINEAR)
    assert len(run("trainer.py", 2, "--deepspeed", both)["losses"]) == 6


@worlds
@stages
def test_accelerate(stage: str, ranks: int, tmp_path: Path) -> None:
    got = run(
        "accelerate_loop.py", ranks, "--deepspeed", config(tmp_path, stage, gradient_clipping=0.5)
    )
    assert_same(got, without_deepspeed("accelerate_loop.py", ranks), "losses", "lrs", "total")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accelerate_by_arguments(stage: int) -> None:
    got = run("accelerate_loop.py", 2, "--stage", str(stage), "--gas", "2")
    assert_same(got, without_deepspeed("accelerate_loop.py", 2, "--gas", "2"), "losses", "total")


LAUNCH = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
machine_rank: {rank}
main_process_ip: 127.0.0.1
main_process_port: {port}
main_training_function: main
mixed_precision: 'no'
num_machines: {machines}
num_processes: 2
use_cpu: false
"""


@pytest.mark.parametrize("machines", [1, 2])
def test_accelerate_launch(machines: int, tmp_path: Path) -> None:
    """One process per machine of two, or two on one."""
    out = tmp_path / "out.json"
    port = free_port() if machines > 1 else 0
    program = [
        str(HERE / "accelerate_loop.py"),
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
    ]
    started = []
    for rank in range(machines):
        answers = tmp_path / f"accelerate{rank}.yaml"  # as accelerate config writes it
        answers.write_text(LAUNCH.format(rank=rank, machines=machines, port=port))
        started.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "accelerate.commands.launch",
                    "--config_file",
                    str(answers),
                    *program,
                ],
                env=os.environ | ENVIRONMENT | {"DS_CORE_AS_DEEPSPEED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in started:
        shown, _ = process.communicate(timeout=300)
        assert process.returncode == 0, shown[-9000:]
    got = json.loads(out.read_text())
    assert "ds_deepspeed_compat" in got["engine"]
    assert_same(got, without_deepspeed("accelerate_loop.py", 2), "losses", "lrs", "total")


LIGHTNING = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
}
# these give torch's optimizer, also with offload
LIGHTNING |= {"zero_force_ds_cpu_optimizer": False}


@worlds
@stages
@pytest.mark.parametrize("program", ["lightning_fit.py", "fabric_loop.py"])
def test_lightning(program: str, stage: str, ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    zero = {k: v for k, v in STAGES[stage].items() if v != "auto"}
    more = {} if program == "lightning_fit.py" else {"gradient_clipping": 0.0}
    file.write_text(json.dumps({**LIGHTNING, **more, "zero_optimization": zero}))
    names = ("losses", "evals") if program == "lightning_fit.py" else ("losses",)
    assert_same(
        run(program, ranks, "--deepspeed", str(file)), without_deepspeed(program, ranks), *names
    )


@pytest.mark.parametrize("stage", ["2", "3"])
def test_lightning_converts_its_checkpoint(stage: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({**LIGHTNING, "zero_optimization": {"stage": int(stage)}}))
    got = run("lightning_fit.py", 2, "--deepspeed", str(file), "--convert", "1")
    _, _, converted = got["evals"]
    assert converted == pytest.approx(got["evals"][0], rel=1e-5)


@stages
def test_peft_lora(stage: str, tmp_path: Path) -> None:
    got = run("peft_lora.py", 2, "--deepspeed", config(tmp_path, stage))
    assert_same(got, without_deepspeed("peft_lora.py", 2), "losses", "loaded")


@stages
@pytest.mark.parametrize("what", ["sft", "dpo"])
def test_trl(what: str, stage: str, tmp_path: Path) -> None:
    got = run("trl_train.py", 2, "--what", what, "--deepspeed", config(tmp_path, stage))
    assert_same(got, without_deepspeed("trl_train.py", 2, "--what", what), "losses")


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        (("sft", "--lora", "1"), 1),
        (("sft", "--lora", "1"), 2),
        (("dpo", "--lora", "1"), 1),
        (("dpo", "--lora", "1"), 2),
        (
            ("dpo", "--ahead", "1"),
            1,
        ),  # TRL hands what it keeps from rank to rank by a file of the data set, in memory here
        (("dpo",), 1),
    ],
)
def test_trl_with_adapters_and_references(how: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    """At ZeRO-3, where TRL asks each parameter whether it is sharded, also on one rank and of
    frozen models.
    """
    got = run("trl_train.py", ranks, "--what", *how, "--deepspeed", config(tmp_path, "3"))
    assert_same(got, without_deepspeed("trl_train.py", ranks, "--what", *how), "losses")


@pytest.mark.parametrize("lora", ["0", "1"])
def test_trl_trains_on_what_it_generates(lora: str, tmp_path: Path) -> None:
    """Texts are drawn at random, so the stages are compared with each other, of one seed."""
    found = [
        run(
            "trl_train.py",
            2,
            "--what",
            "grpo",
            "--lora",
            lora,
            "--deepspeed",
            config(tmp_path, stage),
        )
        for stage in ("2", "3")
    ]
    assert_same(found[0], found[1], "losses")
