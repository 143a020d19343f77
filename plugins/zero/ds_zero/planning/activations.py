"""What autograd keeps of one micro-batch, for `dscore plan`: counted in a forward of fake tensors,
so of any model.

Fake tensors have shapes and no memory. Not counted are temporaries of operators and gradients of
activations.
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
    """Bytes of one rank, from the forward of a micro-batch to its backward.

    tokens: of this rank. kept: where nothing is computed again. recomputed: where the repeated
    blocks are, each with its inputs, and what one of them saves while it runs again; None without
    such blocks.
    """

    tokens: int
    kept: int
    recomputed: int | None


def count_activations(module: nn.Module, tokens: int) -> Activations:
    """Of one sequence. module: takes token ids, on the meta device, in the dtypes of training.

    Raises UsageError where its forward cannot be run so.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    counter = _Counter(module)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = {n: _fake(p) for n, p in (*module.named_parameters(), *module.named_buffers())}
            ids = torch.ones(1, tokens, dtype=torch.long)
            counter.ignored = {t.untyped_storage()._cdata for t in fakes.values()}
            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(counter.saw, lambda t: t),
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


class _Counter:
    """Adds up storages: of all that is saved, and for each repeated block of its inputs and of what
    it saves.

    ignored: storages of weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self.ignored: set[int] = set()
        self._all: dict[int, torch.UntypedStorage] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._inputs: dict[int, torch.UntypedStorage] = {}
        self._blocks: list[dict[int, torch.UntypedStorage]] = []
        self._inside = False
        self._handles = []
        for block in repeated_blocks(module).values():
            self._handles.append(block.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._end))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def saw(self, tensor: Tensor) -> Tensor:
        """Autograd saves `tensor`."""
        self._add(self._all, tensor)
        self._add(self._blocks[-1] if self._inside else self._outside, tensor)
        return tensor

    def _add(self, place: dict[int, torch.UntypedStorage], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.ignored:
            place[storage._cdata] = storage  # held, lest another one gets its address

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
        resting = _bytes({**self._outside, **self._inputs})
        return Activations(tokens, kept, resting + max(_bytes(block) for block in self._blocks))


def _bytes(storages: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())
