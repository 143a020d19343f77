"""What the profile run sees of the model, before any plugin changes it: a tree of modules and
parameters.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.blocks import repeated_blocks
from torch import Tensor, nn

from ds_autotuning.records import ModuleRow, Parameter, Profile
from ds_autotuning.search.saved import Saved
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.config import Trait
from ds_core.context import StashKey

if TYPE_CHECKING:
    from ds_core.context import Context


class Look:
    """A transform that changes nothing.

    model: what is known so far; its sequence length from the first forward on.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.model = Profile(0, 0)
        self._saved: Saved | None = None

    def __call__(self, module: nn.Module) -> nn.Module:
        """Describe `module`, and remember the free memory; then wait for its first inputs."""
        accelerator = self.ctx.accelerator
        here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        host = CpuAccelerator().available_memory() // here
        on_host = accelerator.device_type == "cpu"
        shared = max(1, -(-here // max(1, accelerator.device_count())))  # ranks of one device
        found = describe(module)
        facts = {
            **found.facts,
            "world": self.ctx.world_size,
            "device": accelerator.device_type,
            "device_memory": host if on_host else accelerator.available_memory() // shared,
            "host_memory": host,
            "config": self.ctx.config.redacted(),
        }
        self.model = Profile(found.parameters, found.trainable, found.modules, facts=facts)

        def saw(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            if (length := _sequence_length((*args, *kwargs.values()))) is not None:
                self.model.facts["sequence_length"] = length  # type: ignore[index]

        handle = module.register_forward_pre_hook(saw, with_kwargs=True)
        if not self.ctx.config.has(Trait.CHANGES_SAVED):
            self._saved = Saved(module)
        return module

    def finished(self) -> Profile:
        """What was seen of the model until now."""
        part = None if self._saved is None else self._saved.part
        return dataclasses.replace(self.model, facts={**self.model.facts, "recomputed_part": part})


LOOK: StashKey[Look] = StashKey("the profile run's description of the model")


def describe(module: nn.Module) -> Profile:
    """Its parameters, module by module, and what can be said from classes and shapes.

    It may be on the meta device.
    """
    names: dict[nn.Parameter, str] = {}
    rows = []
    for path, each in module.named_modules():
        own = []
        for name, param in each._parameters.items():
            if param is None:
                continue
            full = f"{path}.{name}" if path else name
            first = names.setdefault(param, full)
            # those of ds_zero.Init are sharded
            shape = tuple(int(n) for n in getattr(param, "ds_shape", param.shape))
            dtype = str(param.dtype).removeprefix("torch.")
            own.append(
                Parameter(name, shape, dtype, param.requires_grad, "" if first == full else first)
            )
        rows.append(ModuleRow(path, _kind(each), tuple(own)))
    sizes = {p: int(getattr(p, "ds_numel", p.numel())) for p in names}
    blocks = repeated_blocks(module)
    facts = {
        "pipeline": "pipeline" in getattr(module, "ds_sections", {}),
        "experts": _experts(module),
        "transformers": any(
            kind.__module__.startswith("transformers.") for kind in type(module).__mro__
        ),
        "sequence_length": None,
        "hidden_size": _hidden_size(module),
        "layers": len(blocks),
    }
    return Profile(
        sum(sizes.values()),
        sum(n for p, n in sizes.items() if p.requires_grad),
        tuple(rows),
        facts=facts,
    )


def _kind(module: nn.Module) -> str:
    """Its class; of containers, whose class features look at, the base that is torch's."""
    held = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return next((kind.__name__ for kind in held if isinstance(module, kind)), type(module).__name__)


def _experts(module: nn.Module) -> int:
    """The most experts of a layer: what it says, or modules in a list of that name; 0 without."""
    most = 0
    for path, each in module.named_modules():
        given = getattr(each, "num_experts", 0)
        most = max(most, given if isinstance(given, int) else 0)
        if isinstance(each, nn.ModuleList) and path.rpartition(".")[2] == "experts":
            most = max(most, len(each))
    return most


def _hidden_size(module: nn.Module) -> int | None:
    config = getattr(module, "config", None)
    for name in ("hidden_size", "n_embd", "d_model"):
        if isinstance(given := getattr(config, name, None), int):
            return given
    lengths = Counter(
        int(p.shape[0]) for p in module.parameters() if p.dim() == 1 and p.numel() > 1
    )
    return lengths.most_common(1)[0][0] if lengths else None


def _sequence_length(values: Iterable[Any]) -> int | None:
    """The length of the first rows of token ids, or of vectors."""
    tensors = list(_tensors(values))
    ids = [t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]
    vectors = [t for t in tensors if t.dim() == 3 and t.is_floating_point()]
    return int((ids + vectors)[0].shape[1]) if ids or vectors else None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
