"""The most memory of each conversion of large tensors, as JSON; run as a program."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import torch
from ds_checkpoint.formats.convert import convert
from ds_checkpoint.formats.foreign import ForeignCheckpoint, Piece, new_run
from ds_checkpoint.formats.ours import write_ours
from torch import Tensor

FORMATS = ("dscore", "deepspeed", "dcp", "safetensors", "megatron")
LARGEST = 4 << 20  # elements
WEIGHTS = 6


def held() -> int:
    """Bytes of this process that no file gives: mapped files can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no RssAnon")


class Watch:
    """The most that is held while it runs, beyond what was held before."""

    def __enter__(self) -> Watch:
        self.before = self.most = held()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._end.wait(0.001):
            self.most = max(self.most, held())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.most - self.before


def piece(name: str, value: float, shape: tuple[int, ...]) -> Piece:
    def read(_: int, out: Tensor) -> None:
        out.fill_(value)

    return Piece(name, shape, torch.float32, read)


def source(folder: Path, count: int) -> ForeignCheckpoint:
    """A checkpoint that takes no memory: its values are made when they are read."""
    shape = (1024, count // 1024)
    pieces = []
    for n in range(WEIGHTS):
        pieces.append(piece(f"module/w{n}", n, shape))
        pieces += [piece(f"optimizer/{k}/w{n}", n, shape) for k in ("exp_avg", "exp_avg_sq")]
        pieces.append(piece(f"optimizer/step/w{n}", 3, ()))
    run = new_run() | {
        "global_steps": 3,
        "optimizer_groups": [{"lr": 0.1}],
        "optimizer_params": [[f"w{n}" for n in range(WEIGHTS)]],
    }
    return ForeignCheckpoint(folder, "t", pieces, run, optimizer="torch:AdamW")


def main() -> None:
    root = Path(sys.argv[1])
    found = {}
    # The first round is of small tensors: what is imported and kept for good is then there.
    for count in (1024, LARGEST):
        write_ours(source(root, count).saved(), root / "dscore")
        for name in FORMATS[1:]:
            convert(root / "dscore" / "t", root / name / "t", name)
        for one in FORMATS:
            begin = root / one / "t" if one != "dscore" else root / one
            for two in FORMATS:
                with Watch() as watch:
                    convert(begin, root / "to" / "t", two)
                found[f"{one} -> {two}"] = watch.bytes
                shutil.rmtree(root / "to")
        for name in FORMATS:
            shutil.rmtree(root / name)
    print(json.dumps({"largest": LARGEST * 4, "most": found}))


if __name__ == "__main__":
    main()
