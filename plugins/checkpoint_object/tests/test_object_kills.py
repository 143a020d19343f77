"""A run that is killed at any moment, through a store that is slow and fails: what it said to have
saved is there, whole, and the next life goes on from it, at whatever size.

Lives are forked from a program, ``python test_object_kills.py ADDRESS COUNT SEED LATER SIZES``: a
process that has used a store itself has threads, of which a fork has none.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from ds_testing.processes import run
from object_runs import begin_life, end, hear
from object_server import BUCKET, environment, faulty_proxy, s3_server

# Longer than any life, so that a wrong answer is seen as one.
DEADLINE = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def lives(address: str, count: int, seed: int, worlds: tuple[int, ...], **config: object) -> int:
    """Kill `count` lives, each a random time after it has resumed; the step that was reached."""
    draw = random.Random(seed)
    saved = 0
    url = f"s3://{BUCKET}/kills-{seed}"
    with environment(address):
        for number in range(count + 1):
            ranks, listen = begin_life(url, draw.choice(worlds), free_port(), **config)
            lines = hear(listen, time.monotonic() + DEADLINE, "resumed")
            assert lines and lines[0].startswith("resumed"), (number, lines)
            _, step, *bad = lines[0].split()
            assert bad == [], f"life {number} resumed step {step} with wrong states: {bad}"
            assert int(step) >= saved, f"life {number}: step {saved} was saved, {step} came back"
            if number < count:
                lines += hear(listen, time.monotonic() + draw.uniform(0, 2.5))
            end(ranks)
            said = [line.split() for line in lines + hear(listen, time.monotonic() + 5)]
            os.close(listen)
            assert not [line for line in said if line[0] == "error"], said
            saved = max([saved, *(int(line[1]) for line in said if line[0] == "saved")])
    return saved


def played(seed: int, count: int, later: bool, sizes: str) -> None:
    with s3_server() as upstream, faulty_proxy(upstream, seed=seed) as address:
        command = [sys.executable, __file__, address, str(count), str(seed), str(later), sizes]
        said = run(command, timeout=1700)
    assert said.splitlines()[-1].startswith("reached step "), said


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("later", [False, True])
def test_a_few_kills(later: bool) -> None:
    played(10 + later, 1, later, "1")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_two_hundred_kills(part: int) -> None:
    """25 of them each."""
    played(100 + part, 25, part % 2 == 1, "112")


if __name__ == "__main__":
    address, count, seed, later, sizes = sys.argv[1:]
    config = {"checkpoint": {"async": later == "True", "keep_last": 2}}
    worlds = tuple(map(int, sizes))
    print("reached step", lives(address, int(count), int(seed), worlds, **config))
