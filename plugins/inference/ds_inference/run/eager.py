"""A module as a `Runnable`: it runs itself, for families without a lowering and for weights that
are offloaded or sharded (ZeRO).

So one scheduler serves all. What is kept of a sequence lies in the same paged cache as that of
programs, so blocks are shared and copied alike. A model of transformers is given a cache object
that reads and writes it. A module that keeps no cache is given the whole sequence each time, and
the paged cache holds the tokens.

[Note: one forward] All sequences of a step go through one forward, padded on the left, where each
forward costs a pass over offloaded weights, or where ranks gather them together and so must run
equally often (`together`). Otherwise those with equally many rows do, since padding a decoded token
to the length of a prompt would cost more.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ds_inference_kit.program import Program
from ds_inference_kit.step import BLOCK, KVCache, Step
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError


class Eager:
    """Runs `module`, which is called with tokens [b, t] and gives logits [b, t, vocab] (or an
    object that has them).

    together: see [Note: one forward].
    group: the process group of ranks that must run equally often, since their weights are gathered
        for each forward. Each step then counts who runs, and `drain` is called when this rank has
        no more to do.

    program: has no instructions, but the shapes of the cache that is needed.
    max_positions, vocab: of the module's config; None: unknown.
    eos: the tokens that end a text.
    """

    def __init__(self, module: nn.Module, *, together: bool = False, group: Any = None) -> None:
        self.module = module
        self._group = group
        self._together = together or group is not None
        self._device = _device(module)
        self._takes = _parameters(module)
        # A module that takes a cache is given ours; another one computes the whole sequence each
        # time.
        self._cached = self._takes.issuperset({"past_key_values", "use_cache"})
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab: int | None = getattr(text, "vocab_size", None)
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.eos = _eos(module)
        self.program = self._probe()

    def rebind(self) -> None:
        """Nothing: the module has its weights itself."""

    @torch.no_grad()
    def __call__(self, step: Step, cache: KVCache | None = None) -> Tensor:
        """See `ds_inference_kit.program.Runnable`."""
        if self._group is not None:
            _count(self._device, 1, self._group)
        starts = step.starts.tolist()
        lengths = step.lengths.tolist()
        counts = [b - a for a, b in itertools.pairwise(starts)]
        # Without a cache (a probe, an encoder) every row is new.
        blocks = step.blocks if cache is not None else None
        found: list[Tensor | None] = [None] * len(lengths)
        last = _last_only(step, starts)
        for batch in self._batches(counts):
            part = _Part(
                step.tokens,
                [starts[i] for i in batch],
                [counts[i] for i in batch],
                [lengths[i] for i in batch],
                None if blocks is None else blocks[batch],
                cache,
            )
            for i, rows in zip(batch, self._run(part, last), strict=True):
                found[i] = rows
        # Back in the order of the step, whatever the batches were.
        out = torch.cat([rows for rows in found if rows is not None])
        return out if step.wanted is None or last else out[step.wanted]

    def drain(self) -> None:
        """This rank has no more steps: run along until no rank has.

        Collective where there is a `group`.
        """
        if self._group is None:
            return
        # A rank that still has steps counts itself, and all others run a forward whose result is
        # unused.
        while _count(self._device, 0, self._group):
            self._alone(torch.zeros(1, 1, dtype=torch.long, device=self._device))

    def _batches(self, counts: Sequence[int]) -> Iterator[list[int]]:
        """The sequences that go through one forward, by how many rows they have."""
        if self._together:
            yield list(range(len(counts)))
            return
        for count in dict.fromkeys(counts):
            yield [i for i, c in enumerate(counts) if c == count]

    def _run(self, part: _Part, last: bool) -> list[Tensor]:
        """The logits of each sequence's rows; of its last row alone where that is asked for."""
        if not self._cached:
            # The rows that are asked for are the last `count` of each sequence's tokens.
            whole = part.whole()
            logits = self._alone(whole)
            ends = zip(part.counts, part.lengths, strict=True)
            return [logits[i, (n - 1 if last else n - c) : n] for i, (c, n) in enumerate(ends)]
        tokens, positions, mask = part.padded()
        given: dict[str, Any] = {"use_cache": part.cache is not None, "attention_mask": mask}
        if part.cache is not None:
            given["past_key_values"] = _cache_class()(_Pages(part))
        if "position_ids" in self._takes:
            given["position_ids"] = positions
        # The output head is large: most rows of a prompt do not need it.
        if last and "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        logits = _logits(self.module(tokens, **given))
        return [logits[i, -1 if last else -c :] for i, c in enumerate(part.counts)]

    def _alone(self, tokens: Tensor) -> Tensor:
        """The logits of whole sequences."""
        return _logits(
            self.module(tokens, **({"use_cache": False} if "use_cache" in self._takes else {}))
        )

    @torch.no_grad()
    def _probe(self) -> Program:
        """Run one token, to see what the cache of each layer looks like.

        Collective where weights are gathered.
        """
        tokens = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        if self._cached:
            out = self.module(tokens, use_cache=True)
            layers = getattr(getattr(out, "past_key_values", None), "layers", None) or ()
            # A paged cache has room for one shape: that of keys and values in all layers.
            shapes = {
                (tuple(k.shape), k.dtype) for each in layers if (k := _keys(each)) is not None
            }
            if len(shapes) == 1 and all(_keys(each) is not None for each in layers):
                (_, heads, _, width), dtype = shapes.pop()
                return Program((), (), 0, dtype, len(layers), heads, width)
            # other states than keys and values of one shape: whole sequences go through it
            self._cached = False
        else:
            self._alone(tokens)
        return Program((), (), 0, torch.float32, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """The sequences of one forward: where their rows begin in `rows`, how many there are, and
    tokens in all.
    """

    rows: Tensor
    starts: Sequence[int]
    counts: Sequence[int]
    lengths: Sequence[int]
    blocks: Tensor | None
    cache: KVCache | None

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and positions [b, most rows], and the mask [b, most tokens], all padded on the
        left.
        """
        device = self.rows.device
        most = max(self.counts)
        longest = max(self.lengths)
        tokens = torch.zeros(len(self.counts), most, dtype=torch.long, device=device)
        for i, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            tokens[i, most - count :] = self.rows[start : start + count]
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        # Of padding 0: a position must be one that the model has; the mask hides it.
        positions = (torch.arange(most, device=device) - most + lengths).clamp_(min=0)
        mask = (torch.arange(longest, device=device) >= longest - lengths).long()
        return tokens, positions, mask

    def whole(self) -> Tensor:
        """All tokens of each sequence [b, most tokens], padded on the right; what is new is noted
        in the cache.
        """
        out = torch.zeros(
            len(self.counts), max(self.lengths), dtype=torch.long, device=self.rows.device
        )
        rows = zip(self.starts, self.counts, self.lengths, strict=True)
        for i, (start, count, length) in enumerate(rows):
            new = self.rows[start : start + count]
            if self.cache is not None:
                # The paged cache keeps token numbers here, in the keys of its one head of width 1.
                at = torch.arange(length, device=new.device)
                block = self.blocks_of(i)[at // BLOCK]
                arena = self.cache.keys[0]
                arena[block[length - count :], 0, at[length - count :] % BLOCK, 0] = new.to(
                    arena.dtype
                )
                out[i, :length] = arena[block, 0, at % BLOCK, 0].long()
            elif count != length:
                raise UsageError(
                    "a step that continues a sequence needs the cache of the steps before"
                )
            else:
                out[i, :length] = new
        return out

    def blocks_of(self, index: int) -> Tensor:
        """The table of one sequence."""
        assert self.blocks is not None
        return self.blocks[index].long()


class _Pages:
    """Reads and writes the paged cache for one forward, in the layout of a batch that is padded on
    the left.
    """

    def __init__(self, part: _Part) -> None:
        assert part.blocks is not None and part.cache is not None
        device = part.rows.device
        longest = max(part.lengths)
        most = max(part.counts)
        # What the model takes for the length before this forward; the same for all sequences of the
        # batch, since they are padded on the left.
        self.past = longest - most
        self.cache = part.cache
        lengths, counts = (
            torch.tensor(x, device=device)[:, None] for x in (part.lengths, part.counts)
        )
        # Padding reads the first token, which the mask hides.
        at = (torch.arange(longest, device=device) - longest + lengths).clamp_(min=0)
        # Block and place of each token of the batch.
        self._block = part.blocks.long().gather(1, at // BLOCK)
        self._place = at % BLOCK
        row = torch.arange(most, device=device)
        # (sequence, row) of each row that is not padding.
        self._new = (row >= most - counts).nonzero(as_tuple=True)
        # Nothing was cached before, and nothing is padded: new keys and values are all there is.
        self._fresh = all(c == longest for c in part.counts)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write what the rows of this forward have, and return that of whole sequences. [b, heads,
        t, width].
        """
        sequence, row = self._new
        block = self._block[sequence, self.past + row]
        place = self._place[sequence, self.past + row]
        found = []
        for arena, new in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
            arena[block, :, place] = new[sequence, :, row].to(arena.dtype)
            found.append(new if self._fresh else self._gather(arena).to(new.dtype))
        return found[0], found[1]

    def _gather(self, arena: Tensor) -> Tensor:
        return arena[self._block, :, self._place].transpose(1, 2)


@functools.cache
def _cache_class() -> type:
    """transformers' cache over a `_Pages`; made when a model of transformers runs."""
    from transformers import DynamicCache

    class PagedCache(DynamicCache):  # type: ignore[misc, unused-ignore]
        def __init__(self, pages: _Pages) -> None:
            super().__init__()
            self._pages = pages

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            return self._pages.update(layer_idx, key_states, value_states)

        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return self._pages.past

        def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
            # positions, before 5
            rows = query_length if isinstance(query_length, int) else query_length.shape[0]
            return self._pages.past + rows, 0

    return PagedCache


def _keys(layer: Any) -> Tensor | None:
    """The keys that a layer of transformers' cache keeps, where it keeps keys and values of one
    shape and no more.
    """
    keys = getattr(layer, "keys", None)
    values = getattr(layer, "values", None)
    if (
        not isinstance(keys, Tensor)
        or not isinstance(values, Tensor)
        or hasattr(layer, "conv_states")
    ):
        return None
    return keys if keys.shape == values.shape and keys.dim() == 4 else None


def _last_only(step: Step, starts: Sequence[int]) -> bool:
    """Whether of each sequence its last row is wanted, and no other."""
    return step.wanted is not None and step.wanted.tolist() == [end - 1 for end in starts[1:]]


def _logits(out: Any) -> Tensor:
    """What a module's forward says of the next tokens."""
    found = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if found is None and isinstance(out, (tuple, list)) and out:
        found = out[0]
    if not isinstance(found, Tensor) or found.dim() != 3:
        raise UsageError(
            "to generate, a model must return logits [batch, length, vocabulary] when it is given "
            "tokens"
        )
    return found


def _parameters(module: Any) -> set[str]:
    """The names that the forward of the module takes; of the model inside an adapter of PEFT."""
    inner: Callable[[], Any] | None = getattr(module, "get_base_model", None)
    return set(inspect.signature((module if inner is None else inner()).forward).parameters)


def _device(module: nn.Module) -> torch.device:
    """Where it computes."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _eos(module: Any) -> tuple[int, ...]:
    for config in (getattr(module, "generation_config", None), getattr(module, "config", None)):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (found,)
    return ()


def _count(device: torch.device, busy: int, group: Any) -> int:
    """How many ranks of the group say `busy`."""
    total = torch.tensor([busy], dtype=torch.int64, device=device)
    comm.all_reduce(total, group=group)
    return int(total.item())
