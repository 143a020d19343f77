"""How much of what autograd keeps would be left if the repeated blocks were computed again: counted
in one forward.
"""

from __future__ import annotations

from typing import Any

import torch
from ds_run_state.blocks import repeated_blocks
from torch import Tensor, nn

Storages = dict[int, torch.UntypedStorage]


class Saved:
    """Counts from the begin of the next forward of `module` to its end; storages of weights are
    left out.

    part: what would be kept at most, as a part of what is kept: all outside blocks, their inputs,
    and the largest of them, which runs again. None: not counted (yet), or the model has no such
    blocks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.part: float | None = None
        self._module = module
        self._outside: Storages = {}
        self._inputs: Storages = {}
        self._blocks: list[Storages] = []
        self._inside = False
        self._hooks: Any = None
        blocks = repeated_blocks(module)
        self._handles: list[Any] = []
        if blocks:
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        for block in blocks.values():
            self._handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._leave, always_call=True))

    def _begin(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and self._hooks is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._saw, lambda tensor: tensor)
            self._hooks.__enter__()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        everything = {
            **self._outside,
            **{key: value for block in self._blocks for key, value in block.items()},
        }
        kept = _bytes({**self._outside, **self._inputs}) + max(map(_bytes, self._blocks), default=0)
        whole = _bytes(everything)
        self.part = min(1.0, kept / whole) if whole and self._blocks else None
        self._outside = {}
        self._inputs = {}
        self._blocks = []

    def _saw(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place = self._blocks[-1] if self._inside else self._outside
        if storage._cdata not in place and not self._is_weight(storage):
            place[storage._cdata] = storage  # held, lest another one gets its address
        return tensor

    def _is_weight(self, storage: torch.UntypedStorage) -> bool:
        return any(p.untyped_storage()._cdata == storage._cdata for p in self._module.parameters())

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._hooks is None:
            return
        self._inside = True
        self._blocks.append({})
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad:
                self._inputs[value.untyped_storage()._cdata] = value.untyped_storage()

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self._inside = False


def _bytes(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())
