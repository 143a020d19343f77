"""What a replay needs of each forward of the model: its inputs, and the gradients at its outputs.

Where the model is divided over ranks, one has the inputs and another the outputs. Each writes its
half, by the data-parallel index of the samples and the step: ``callsP.N.*`` and ``endsP.N.*``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_verify.recording.records import decode, encode


@dataclass(slots=True)
class Half:
    """One kind of file that a rank writes."""

    stem: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def put(self, tensor: Tensor) -> str:
        """Keep a copy of `tensor` on the host; returns its name."""
        name = str(len(self.tensors))
        self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return name

    def write(self, folder: Path, part: int, step: int, more: dict[str, Any]) -> None:
        """Write a step, and begin the next."""
        stem = folder / f"{self.stem}{part}.{step}"
        save_file(self.tensors, f"{stem}.safetensors")
        Path(f"{stem}.json").write_text(json.dumps({"calls": self.rows, **more}), encoding="utf-8")
        self.rows.clear()
        self.tensors.clear()


class Calls:
    """Collects the calls of one step on one rank.

    inputs, outputs: which halves this rank writes; of the ranks that have the same samples one does.
    """

    def __init__(self, folder: Path, *, inputs: bool, outputs: bool) -> None:
        self._folder = folder
        self._inputs = Half("calls") if inputs else None
        self._outputs = Half("ends") if outputs else None

    def begin(self, micro: int, args: Any, kwargs: Any) -> None:
        """The inputs of a call.

        Raises UsageError where they are no data.
        """
        if self._inputs is not None:
            given = encode((list(args), kwargs), self._inputs.put, "the model's inputs")
            self._inputs.rows.append({"micro": micro, "arguments": given})

    def end(self, micro: int) -> dict[str, str] | None:
        """What takes the names of the gradients at a call's outputs; None where another has them."""
        if self._outputs is None:
            return None
        gradients: dict[str, str] = {}
        self._outputs.rows.append({"micro": micro, "gradients": gradients})
        return gradients

    def put(self, gradient: Tensor) -> str:
        """Keep a gradient at an output; returns its name."""
        assert self._outputs is not None
        return self._outputs.put(gradient)

    def write(self, part: int, step: int, lr: Sequence[float]) -> None:
        """Write a step, with the learning rates it was made with, and begin the next."""
        for half in (self._inputs, self._outputs):
            if half is not None:
                half.write(self._folder, part, step, {"lr": list(lr)})


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call."""

    micro: int
    args: list[Any]
    kwargs: dict[str, Any]
    gradients: dict[int, Tensor]
    """By the place of the output among the tensors of the model's answer; unscaled."""


def read_calls(folder: Path, part: int, step: int) -> tuple[list[Call], list[float]]:
    """The calls with the samples of a data-parallel index in a step, and its learning rates."""
    begun, inputs = _read(folder / f"calls{part}.{step}")
    ended, outputs = _read(folder / f"ends{part}.{step}")
    found = []
    for begin, end in zip(begun["calls"], ended["calls"], strict=True):
        args, kwargs = decode(begin["arguments"], inputs.__getitem__)
        gradients = {int(place): outputs[name] for place, name in end["gradients"].items()}
        found.append(Call(begin["micro"], args, kwargs, gradients))
    return found, begun["lr"]


def _read(stem: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    rows: dict[str, Any] = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    return rows, load_file(f"{stem}.safetensors")
