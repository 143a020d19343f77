"""The command ``deepspeed``: documented flags, as ``dscore run`` carries them out; hostfiles and
filters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ds_deepspeed_compat.launcher import fetch_hostfile, parse_args, parse_resource_filter, words

DEVICES = {"a": [0, 1, 2, 3], "b": [0, 1]}


def command(text: str) -> list[str]:
    return words(parse_args([*text.split(), "train.py", "--deepspeed", "-x", "1"]))[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "run --local-rank --log-level=warning"),
        ("--num_gpus 2 --no_local_rank", "run --nproc=2 --log-level=warning"),
        (
            "--num_accelerators=2 --master_port 29501",
            "run --master-port=29501 --local-rank --nproc=2",
        ),
        ("--autotuning run", "run --local-rank --log-level=warning --autotuning=run"),
        ("--module --save_pid -q", "run --module --local-rank --save-pid --quiet"),
        (
            "--enable_each_rank_log logs --bind_cores_to_rank",
            "run --local-rank --bind-cores-to-rank --enable-each-rank-log=logs",
        ),
        (
            "--num_nodes 2 --no_ssh --node_rank 1 --master_addr h0",
            "run --nnodes=2 --node-rank=1 --master-addr=h0 --master-port=29500 --local-rank",
        ),
        (
            "--elastic_training --min_elastic_nodes 1 --max_elastic_nodes 3 --master_addr h0",
            "run --nnodes=1:3 --rdzv-endpoint=h0:29500 --local-rank",
        ),
        (
            "-H f --elastic_training --launcher PDSH --launcher_args=-f --ssh_port 23 "
            "--force_multi --no_ssh_check",
            "run --hostfile=f --elastic-training --min-elastic-nodes=-1 --max-elastic-nodes=-1 "
            "--local-rank "
            "--force-multi --no-ssh-check --launcher=pdsh --launcher-args=-f --ssh-port=23",
        ),
        (
            "-H f -i h0:1,3 --master_addr h0 --node_rank 1 --no_ssh",
            "run --hostfile=f --no-ssh --node-rank=1 --master-addr=h0 --master-port=29500 "
            "--local-rank "
            "--include=h0:1,3",
        ),
    ],
)
def test_flags(given: str, expected: str) -> None:
    found = command(given)
    assert found[: len(expected.split())] == expected.split()
    assert found[-4:] == ["train.py", "--deepspeed", "-x", "1"]


def test_options_of_the_script_are_the_scripts() -> None:
    for own in (["--b", "4"], ["--num", "2", "--hostfile", "x"], ["-q", "--help"], ["--", "x"]):
        found = parse_args(["--num_g", "2", "train.py", *own])
        assert (found.num_gpus, found.user_script, found.user_args) == (2, "train.py", own)
    with pytest.raises(SystemExit):
        parse_args(["--b", "4", "train.py"])


def test_a_hostfile_that_is_no_file_means_this_machine() -> None:
    assert command("--hostfile /dev/null --num_gpus 2") == command("--num_gpus 2")
    assert command("--hostfile /dev/null --num_nodes 1") == command("--num_nodes 1")


def test_hostfiles_and_filters_by_their_documented_names(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nh0 slots=4\n\nh1 slots=2  # small\n")
    assert fetch_hostfile(hostfile_path=str(file)) == {"h0": 4, "h1": 2}
    assert fetch_hostfile(str(tmp_path / "none")) is None
    assert parse_resource_filter(DEVICES, include_str="b@a:2,0") == {"a": [0, 2], "b": [0, 1]}
    assert parse_resource_filter(DEVICES, exclude_str="a:0,1@b") == {"a": [2, 3]}


@pytest.mark.parametrize(
    "given", ["--autotuning maybe", "--num_gpus 1 --include a", "--elastic_training"]
)
def test_what_is_unknown_or_does_not_go_together_ends_with_a_message(given: str) -> None:
    with pytest.raises(SystemExit):
        command(given)


@pytest.mark.slow
def test_two_processes_end_to_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, os, torch, deepspeed\n"
        "parser = argparse.ArgumentParser(); parser.add_argument('--local_rank', type=int)\n"
        "args = deepspeed.add_config_arguments(parser).parse_args()\n"
        "engine, *_ = deepspeed.initialize(args, torch.nn.Linear(2, 1), "
        "config={'train_batch_size': 2,"
        " 'optimizer': {'type': 'Adam', 'params': {'lr': 0.01}}})\n"
        "engine.backward(engine(torch.ones(1, 2)).sum()); engine.step()\n"
        "groups = deepspeed.utils.groups\n"
        "total = torch.ones(1); deepspeed.comm.all_reduce(total, "
        "group=groups._get_data_parallel_group())\n"
        "assert groups._get_sequence_parallel_world_size() == 1\n"
        "assert total.item() == 2 == int(os.environ['LOCAL_SIZE'])\n"
        "print(f'{args.local_rank} of {deepspeed.comm.get_world_size()} in group '"
        " f'{groups._get_data_parallel_rank()}\\n', end='')\n"
    )
    program = [sys.executable, "-m", "ds_deepspeed_compat.launcher", "--num_gpus", "2", str(script)]
    env = {k: v for k, v in os.environ.items() if k != "DS_CORE_AS_DEEPSPEED"}
    ended = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
    assert sorted(ended.stdout.splitlines()) == ["0 of 2 in group 0", "1 of 2 in group 1"], (
        ended.stderr
    )
