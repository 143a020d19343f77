"""Reading back what each monitor has recorded, as ``(name, value, step)``, from its files."""

from __future__ import annotations

import csv
import json
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

Row = tuple[str, float, int]


def read_csv(folder: Path) -> list[Row]:
    found = []
    for path in sorted(folder.rglob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        found += [(path.stem, float(value), int(step)) for step, value in rows]
    return found


def read_tensorboard(folder: Path) -> list[Row]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return [(tag, e.value, e.step) for tag in reader.Tags()["scalars"] for e in reader.Scalars(tag)]


def wandb_records(folder: Path, timeout: float = 60.0) -> list[Any]:
    """Every record of the run files below `folder`, once wandb's own process has written the last
    one.
    """
    end = time.monotonic() + timeout
    while True:
        found = _wandb_records(folder)
        starts, ends = (
            sum(r.WhichOneof("record_type") == kind for r in found) for kind in ("header", "exit")
        )
        if (ends and starts == ends) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _wandb_records(folder: Path) -> list[Any]:
    """LevelDB's log format, with a header of its own."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.rglob("*.wandb")):
        data = path.read_bytes()
        at = 7
        part = b""
        assert data.startswith(b":W&B")
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            if kind == 0:
                break
            part += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(part)
                found.append(record)
                part = b""
    return found


def read_wandb(folder: Path) -> list[Row]:
    found = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {
                i.key or "/".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            step = row.pop("global_samples")
            found += [
                (name, float(value), int(step))
                for name, value in row.items()
                if not name.startswith("_")
            ]
    return found


def comet_messages(folder: Path) -> list[Any]:
    found = []
    for path in sorted(folder.rglob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            found += [
                json.loads(line) for line in archive.read("messages.json").decode().splitlines()
            ]
    return found


def read_comet(folder: Path) -> list[Row]:
    metrics = [m["payload"]["metric"] for m in comet_messages(folder) if m["type"] == "metric_msg"]
    ours = [m for m in metrics if not m["metricName"].startswith(("sys.", "process duration"))]
    return [(m["metricName"], float(m["metricValue"]), int(m["step"])) for m in ours]


def read_mlflow(folder: Path) -> list[Row]:
    """FileStore: a file per metric, with lines ``time value step``."""
    found = []
    for base in sorted(folder.glob("*/*/metrics")):
        for path in sorted(p for p in base.rglob("*") if p.is_file()):
            lines = [line.split() for line in path.read_text().splitlines()]
            found += [
                (str(path.relative_to(base)), float(value), int(step)) for _, value, step in lines
            ]
    return found


def read_trackio(folder: Path) -> list[Row]:
    import sqlite3

    found = []
    for path in sorted(folder.rglob("*.db")):
        with sqlite3.connect(path) as base:
            rows = base.execute("SELECT metrics, step FROM metrics ORDER BY id").fetchall()
        for text, step in rows:
            found += [(name, float(value), int(step)) for name, value in json.loads(text).items()]
    return found
