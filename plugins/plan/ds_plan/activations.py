"""What autograd keeps of one micro-batch, counted in a forward of fake tensors.

Fake tensors have shapes and no memory, so any model can be counted on any host. Not counted are
temporaries of operators and gradients of activations.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from ds_run_state.blocks import repeated_blocks
from torch import Tensor, nn

from ds_core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one rank, from the forward of a micro-batch to its backward."""

    tokens: int
    """Of this rank."""

    kept: int
    """Without activation checkpointing."""

    recomputed: int | None
    """With activation checkpointing of the repeated blocks: what is saved outside of them, their
    inputs, and what one of them saves while it runs again. None without such blocks.
    """

    def least(self, checkpointing: bool) -> int:
        """What is kept.

        checkpointing: whether the config checkpoints the repeated blocks.
        """
        if checkpointing and self.recomputed is not None:
            return self.recomputed
        return self.kept


def count_activations(module: nn.Module, tokens: int) -> Activations:
    """What one sequence of `tokens` tokens leaves.

    module: its forward accepts token ids of shape (1, tokens); on the meta device, in the dtypes of
        training.

    Raises UsageError where its forward cannot be run without values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    counter = _Counter(module)
    try:
        # In this mode what the forward itself creates, such as masks, takes no memory either.
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = {n: _fake(p) for n, p in (*module.named_parameters(), *module.named_buffers())}
            ids = torch.ones(1, tokens, dtype=torch.long)
            # Weights are saved by autograd too, and are planned as weights.
            counter.ignored = {t.untyped_storage()._cdata for t in fakes.values()}
            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(counter.save, lambda t: t),
            ):
                torch.func.functional_call(module, fakes, *_inputs(module, ids))
    except UsageError:
        raise
    except Exception as error:  # the user's code
        raise UsageError(
            f"--tokens: the forward of {type(module).__name__} failed on token ids of shape (1, "
            f"{tokens}) without "
            f"values: {type(error).__name__}: {error}"
        ) from error
    finally:
        counter.close()
    return counter.result(tokens)


def _fake(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def _inputs(module: nn.Module, ids: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments: those of transformers where the forward has their names, else the token ids."""
    names = inspect.signature(module.forward).parameters
    if "input_ids" not in names:
        return (ids,), {}
    known: dict[str, Any] = {
        "input_ids": ids,
        "labels": ids,
        "use_cache": False,
        "past_key_values": _NoCache(),
    }
    return (), {name: value for name, value in known.items() if name in names}


class _NoCache:
    """A model of transformers that is given a cache does not look for packed sequences, which have
    no values here.
    """

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What attention goes on with."""
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query: int, *_: Any) -> tuple[int, int]:
        """Keys, and the position of the first."""
        return query, 0


Storages = dict[int, torch.UntypedStorage]


class _Counter:
    """Collects the storages that autograd saves, in and outside of the repeated blocks."""

    def __init__(self, module: nn.Module) -> None:
        # Storages that do not count: those of weights.
        self.ignored: set[int] = set()

        # -- What was saved. A storage by its address, so that it counts once.

        # All storages that were saved.
        self._all: Storages = {}
        # Those saved outside of the repeated blocks.
        self._outside: Storages = {}
        # The inputs of the blocks, which activation checkpointing keeps.
        self._inputs: Storages = {}
        # Inside of each run of a block, in their order.
        self._blocks: list[Storages] = []

        # Whether a block runs now.
        self._inside = False
        self._handles = []
        for block in repeated_blocks(module).values():
            self._handles.append(block.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._end))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and give it back as it is."""
        self._add(self._all, tensor)
        self._add(self._blocks[-1] if self._inside else self._outside, tensor)
        return tensor

    def _add(self, place: Storages, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.ignored:
            # Kept alive, so that no later storage gets the same address.
            place[storage._cdata] = storage

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside = True
        self._blocks.append({})
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad:
                self._add(self._inputs, value)

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        self._inside = False

    def result(self, tokens: int) -> Activations:
        """The sums."""
        kept = _bytes(self._all)
        if not self._blocks:
            return Activations(tokens, kept, None)
        # In backward the blocks run again one after the other: the largest counts.
        between = _bytes({**self._outside, **self._inputs})
        return Activations(tokens, kept, between + max(_bytes(block) for block in self._blocks))


def _bytes(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())
