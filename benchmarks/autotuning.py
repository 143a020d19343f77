"""The tuner against an exhaustive search: the GPT of examples/gpt on two ranks, every setting of
`SPACE`.

    python benchmarks/autotuning.py            # the last two of these:
    python benchmarks/autotuning.py measure    # every setting in processes of its own -> benchmarks/autotuning.json
    python benchmarks/autotuning.py measure 20 # the next twenty
    python benchmarks/autotuning.py large      # the memory of a larger model, added to that file
    python benchmarks/autotuning.py replay     # the tuner's searches over that file: how good after 20 trials?
    python benchmarks/autotuning.py memory     # its forecasts of memory against what was measured

`measure` takes up again what it was killed in. `replay` runs no training: a trial is looked up, so
that five seeds of each search see the same timings.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import runpy
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = Path(os.environ.get("BENCH_DATA", HERE / "autotuning.json"))
EXAMPLE = HERE.parent / "examples" / "gpt"
RANKS = 2

SPACE: dict[str, list[Any]] = {
    "zero_optimization.stage": [0, 1, 2, 3],
    "train_micro_batch_size_per_gpu": [4, 8, 16, 32],
    "zero_optimization.overlap_comm": [False, True],
    "zero_optimization.offload_optimizer.device": ["none", "cpu"],
    "activation_checkpointing.modules": [None, "auto"],
}
"""Overlap and offload say nothing in stage 0: 104 settings."""


def settings() -> Iterator[dict[str, Any]]:
    """Every setting, by dotted key."""
    for values in itertools.product(*SPACE.values()):
        setting = dict(zip(SPACE, values, strict=True))
        plain = not setting["zero_optimization.overlap_comm"]
        plain = plain and setting["zero_optimization.offload_optimizer.device"] == "none"
        if setting["zero_optimization.stage"] > 0 or plain:
            yield setting


def name_of(setting: dict[str, Any]) -> str:
    """As the key of a measurement."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in setting.items())


def base() -> dict[str, Any]:
    """The example's config without its monitors and its batch."""
    given: dict[str, Any] = json.loads((EXAMPLE / "ds_config.json").read_text())
    left_out = (
        "train_batch_size",
        "gradient_accumulation_steps",
        "csv_monitor",
        "tensorboard",
        "run_record",
    )
    return {key: value for key, value in given.items() if key not in left_out}


def config_of(setting: dict[str, Any]) -> dict[str, Any]:
    """`base` with `setting`; a value None leaves a key out."""
    config = json.loads(json.dumps(base()))
    for key, value in setting.items():
        *sections, last = key.split(".")
        inner = config
        if value is None:
            continue
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    micro = setting["train_micro_batch_size_per_gpu"]
    return {**config, "train_batch_size": micro * RANKS, "gradient_accumulation_steps": 1}


# -- measure ---------------------------------------------------------------------------------------


def run(
    config: dict[str, Any],
    folder: Path,
    *,
    profile: bool = False,
    large: bool = False,
    steps: tuple[int, int] = (3, 6),
) -> Any:
    """One trial in processes of its own; what its rank 0 wrote.

    They are forked, with torch imported already.
    """
    section: dict[str, Any] = {"enabled": True, "metric_path": str(folder / "result.json")}
    section |= {"start_profile_step": steps[0], "end_profile_step": steps[1]}
    if profile:
        section["model_info"] = {"profile": True}
    off = {name: {"enabled": False} for name in ("csv_monitor", "tensorboard", "run_record")}
    (folder / "config.json").write_text(json.dumps({**config, **off, "autotuning": section}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_fork(rank, port, folder, large) for rank in range(RANKS)]
    for child in children:
        os.waitpid(child, 0)
    try:
        result = json.loads((folder / "result.json").read_text())
        marks = [json.loads((folder / f"cpu{rank}").read_text()) for rank in range(RANKS)]
        result["cpu_seconds"] = [
            max(b[i + 1] - b[i] for b in marks) for i in range(len(marks[0]) - 1)
        ]
        return result
    except FileNotFoundError:
        return {"status": "crashed", "reason": (folder / "log0").read_text()[-500:]}


def _import_all() -> None:
    """All that trials import, before any fork."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp

    import ds_core
    from ds_core.setup.compose import compose

    assert ds_core.initialize is not None
    for setting in settings():  # loads their plugins
        compose(config_of(setting))
    torch.set_num_threads(1)


def _count_cpu(folder: Path, rank: int) -> None:
    """Besides the time of each step write this process's CPU time, which work of others does not
    swell as much.
    """
    from ds_autotuning.trials import measuring

    class Counting(measuring.Measuring):
        def _mark(self) -> None:
            super()._mark()
            marks.append(time.process_time())
            (folder / f"cpu{rank}").write_text(json.dumps(marks))

    marks: list[float] = []
    measuring.Measuring = Counting  # type: ignore[misc]


def _fork(rank: int, port: int, folder: Path, large: bool) -> int:
    if child := os.fork():
        return child
    try:
        log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(200)  # a rank that waits for one that has died
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ["DS_CONFIG_OVERRIDES"] = str(folder / "config.json")
        _count_cpu(folder, rank)
        sys.path.insert(0, str(EXAMPLE))
        sys.argv = [str(EXAMPLE / "train.py"), "--run", str(folder / "run")]
        if large:
            _train_large()
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _train_large() -> None:
    """A GPT of 25 million parameters, whose states are several times the process."""
    import torch
    from model import GPT  # of the example

    import ds_core

    engine, *_ = ds_core.initialize(model=GPT(width=512, layers=8, heads=8), config={})
    while True:
        ids = torch.randint(0, 256, (engine.train_micro_batch_size_per_gpu(), 64))
        engine.backward(engine(ids, ids))
        engine.step()


AGAIN = "activation_checkpointing.modules"
LARGE = [
    {"zero_optimization.stage": stage, "train_micro_batch_size_per_gpu": micro, AGAIN: again}
    for again, pairs in {
        None: [(0, 1), (0, 8), (1, 2), (2, 4), (2, 16), (3, 1), (3, 8)],
        "auto": [(0, 8), (2, 16)],
    }.items()
    for stage, micro in pairs
]
"""Settings of the larger GPT, for memory alone."""


def measure_large() -> None:
    """Peaks of a model whose states weigh, and its two profile runs."""
    data: dict[str, Any] = json.loads(DATA.read_text())
    kept: dict[str, Any] = data.setdefault("large", {"profiles": {}, "results": {}})
    _import_all()
    for micro in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            setting = {"zero_optimization.stage": 2, "train_micro_batch_size_per_gpu": micro}
            run(config_of(setting), Path(folder), profile=True, large=True, steps=(2, 3))
            kept["profiles"][str(micro)] = json.loads((Path(folder) / "profile.json").read_text())
    for setting in LARGE:
        with tempfile.TemporaryDirectory() as folder:
            result = run(config_of(setting), Path(folder), large=True, steps=(2, 3))
        kept["results"][name_of(setting)] = {"setting": setting, "result": result}
        print(name_of(setting), result.get("peak_device"), flush=True)
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def measure() -> None:
    """Fill `DATA`."""
    data: dict[str, Any] = (
        json.loads(DATA.read_text()) if DATA.exists() else {"profiles": {}, "results": {}}
    )
    data["about"] = {
        "date": data.get("about", {}).get("date", time.strftime("%Y-%m-%d")),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "model": "GPT of examples/gpt, 2 ranks, fp32, gloo",
    }
    _import_all()
    everything = list(settings())
    most = int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize
    for micro in (1, 8):
        if str(micro) not in data["profiles"]:
            with tempfile.TemporaryDirectory() as folder:
                plain = {key: values[0] for key, values in SPACE.items()} | {
                    "zero_optimization.stage": 2
                }
                run(
                    config_of({**plain, "train_micro_batch_size_per_gpu": micro}),
                    Path(folder),
                    profile=True,
                )
                data["profiles"][str(micro)] = json.loads(
                    (Path(folder) / "profile.json").read_text()
                )
    for number, setting in enumerate(everything):
        if data["results"].get(name_of(setting), {}).get("result", {}).get("status") == "done":
            continue
        if (most := most - 1) < 0:
            return
        with tempfile.TemporaryDirectory() as folder:
            result = run(config_of(setting), Path(folder))
        data["results"][name_of(setting)] = {"setting": setting, "result": result}
        part = DATA.with_suffix(".part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(DATA)
        print(
            f"{number + 1}/{len(everything)} {name_of(setting)}: {result.get('throughput')}",
            flush=True,
        )


# -- replay ----------------------------------------------------------------------------------------


def by_the_clock(row: dict[str, Any]) -> float:
    """Samples per second."""
    return float(row["result"]["throughput"])


def by_cpu_time(row: dict[str, Any]) -> float:
    """Samples per CPU second of a rank, over all ranks: what the clock would say if nothing waited
    for anything.
    """
    return float(
        row["setting"]["train_micro_batch_size_per_gpu"]
        * RANKS
        / statistics.median(row["result"]["cpu_seconds"])
    )


def replay() -> None:
    """The best of 20 trials of each search, as a part of the best of all, in five seeds."""
    for title, speed in (("by the clock", by_the_clock), ("by CPU time", by_cpu_time)):
        print(f"--- {title}")
        search_all(speed)


def search_all(speed: Callable[[dict[str, Any]], float]) -> None:
    """Each search over the data, by one yardstick."""
    from ds_autotuning.config import Autotuning
    from ds_autotuning.records import Result, Status
    from ds_autotuning.search.candidates import Candidate
    from ds_autotuning.search.space import MICRO, Dimension, Space
    from ds_autotuning.search.tuner import Tuning, tune

    data = json.loads(DATA.read_text())
    rows = {json.dumps(row["setting"], sort_keys=True): row for row in data["results"].values()}
    best = max(rows.values(), key=speed)
    spread = sorted((speed(row) / speed(best) for row in rows.values()), reverse=True)
    near = sum(part >= 0.95 for part in spread)
    print(f"{data['about']['date']}, {data['about']['machine']}")
    print(f"{len(rows)} settings; best {speed(best):.1f} samples/s: {name_of(best['setting'])}")
    print(f"within 5 % of it: {near}; median {spread[len(spread) // 2]:.2f} of it")
    idle = ("zero_optimization.overlap_comm", "zero_optimization.offload_optimizer.device")
    space = Space(
        tuple(
            Dimension((key,), tuple(values), (1, 2, 3) if key in idle else ())
            for key, values in SPACE.items()
            if key != MICRO
        )
    )

    def look_up(number: int, name: str, candidate: Candidate) -> Result:
        row = rows[json.dumps(dict(candidate.setting), sort_keys=True)]
        return Result(Status.DONE, throughput=speed(row))

    for patience in (0, 5):
        for kind in ("model_based", "random", "gridsearch"):
            found = []
            for seed in range(5):
                section = Autotuning(
                    tuner_type=kind, seed=seed, tuner_num_trials=20, tuner_early_stopping=patience
                )
                tuning = Tuning(
                    section, space, lambda _: SPACE[MICRO], lambda s: Candidate(s, {}), look_up
                )
                tune(tuning)
                assert tuning.best is not None
                reached = (tuning.best.result.throughput or 0.0) / speed(best)
                found.append((reached, len(tuning.rows)))
            shown = "  ".join(f"{part:.3f} ({trials})" for part, trials in found)
            print(
                f"{kind:12} early stopping {patience}: {shown}   part of the best (trials), seeds "
                "0 to 4"
            )


# -- memory ----------------------------------------------------------------------------------------


def memory() -> None:
    """Forecasts from the two profile runs alone, beside the peaks of every trial."""
    data = json.loads(DATA.read_text())
    compare("GPT of examples/gpt", data)
    if "large" in data:
        compare("GPT of 25 million parameters", data["large"])


def compare(title: str, data: dict[str, Any]) -> None:
    """Forecast and peak of the trials of one model."""
    from ds_autotuning.search.forecast import forecast, make_profile

    from ds_core.setup.compose import compose

    with tempfile.TemporaryDirectory() as folder:
        files = []
        for micro, profile in data["profiles"].items():
            files.append(Path(folder) / f"{micro}.json")
            files[-1].write_text(json.dumps(profile))
        profile = make_profile(files)
    mib = 2**20
    slope = profile.activation_bytes_per_sample or 0.0
    base = profile.fixed_bytes or 0.0
    print(f"{title}: a sample {slope / mib:.3f} MiB, fixed {base / mib:.1f} MiB")
    rows = []
    for name, row in data["results"].items():
        told = forecast(profile, compose(config_of(row["setting"])), RANKS)
        rows.append(
            (
                told.device / row["result"]["peak_device"] - 1,
                told,
                row["result"]["peak_device"],
                name,
            )
        )
    beyond = sorted((abs(told.device - peak) / max(peak - base, mib) for _, told, peak, _ in rows))
    errors = sorted(abs(error) for error, *_ in rows)
    print(
        f"  {len(rows)} trials: error of the forecast at most {errors[-1]:.1%}, median "
        f"{errors[len(errors) // 2]:.1%}"
    )
    print(
        f"  of what is beyond `fixed`: at most {beyond[-1]:.1%}, median "
        f"{beyond[len(beyond) // 2]:.1%}"
    )
    for error, told, peak, name in sorted(rows, key=lambda row: -abs(row[0]))[:9]:
        print(
            f"  {error:+.1%}  told {told.device / mib:.1f} MiB, measured {peak / mib:.1f} MiB  "
            f"{name}"
        )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        replay()
        memory()
    else:
        {"measure": measure, "large": measure_large, "replay": replay, "memory": memory}[
            sys.argv[1]
        ]()
