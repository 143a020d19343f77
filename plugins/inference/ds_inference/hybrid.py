"""Train and generate in turn, with the same weights: ``engine.generate`` of the section
``hybrid_engine``.

The program of the model holds its parameters, not copies of them, so what a step or a checkpoint
has written is what is generated with. Under stages 0 to 2 they are always in memory. Stage 3
gathers them for the phase. Where they are kept on a disk, and for partitioners that cannot keep
gathered weights, the module runs by itself, layer by layer (`eager`). So do models without a
program, and those with adapters that are not fused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from ds_inference_kit.program import Program, Runnable
from ds_inference_kit.step import BLOCK, KVCache
from ds_run_state.blocks import HoldsWeights
from torch import Tensor, nn

from ds_core.context import Context, StashKey
from ds_core.engine import RunningEngine, eval_mode
from ds_core.errors import ConfigError, Problem, UsageError
from ds_core.process import log_once
from ds_inference.families import Kind, Lowered, lower, why_not
from ds_inference.generate.generator import Generator
from ds_inference.generate.plain import plain_generate
from ds_inference.hybrid_config import HybridEngine
from ds_inference.run import parallel
from ds_inference.run.eager import Eager

log = logging.getLogger("ds_inference")


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Of all calls of ``engine.generate`` on this rank; times in seconds."""

    calls: int = 0
    # The time in all calls.
    seconds: float = 0.0
    # The part of `seconds` until the weights were in memory.
    gather_seconds: float = 0.0
    # The time between the calls.
    train_seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    # `seconds` and `new_tokens` of the last call alone.
    last_seconds: float = 0.0
    last_new_tokens: int = 0


@dataclass(slots=True)
class _Model:
    """What generates: a loaded program, or the module itself."""

    runnable: Runnable
    program: Program
    # Logits of a row; None: unknown.
    vocab: int | None
    # The most positions of a sequence; None: unknown.
    positions: int | None
    # Tokens that end a text.
    eos: tuple[int, ...]
    # None: the module runs by itself.
    lowered: Lowered | None

    def update(self) -> None:
        """Look the weights up again: they may have moved, and values derived from them are old."""
        if self.lowered is not None:
            self.lowered.refresh()
            self.runnable.rebind()


@dataclass(slots=True)
class _State:
    """Of one engine."""

    section: HybridEngine
    # Made at the first call, when the weights are known to be in memory.
    model: _Model | None = None
    # The last call's cache, if it is kept for the next one.
    cache: KVCache | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    # `stats` when `metrics` was last called.
    reported: GenerationStats = field(default_factory=GenerationStats)
    # When the last call ended.
    ended: float | None = None


_GRAPH = "hybrid_engine.enable_cuda_graph"
_STATE: StashKey[_State] = StashKey("hybrid engine")


def generate(engine: RunningEngine, inputs: Any = None, /, **keywords: Any) -> Any:
    """Texts of the model with its weights as they are now; the keywords and the answer of
    ``module.generate``.

    While the section ``hybrid_engine`` is switched off this is ``module.generate`` itself.

    Of a module without ``generate``: see `plain_generate`. Dropout is off inside, and nothing is
    recorded for backward. Collective where weights are sharded: every rank calls it, with prompts
    of its own.
    """
    if not _section(engine.ctx).enabled:
        own: Any = engine.module.generate
        return own(**keywords) if inputs is None else own(inputs, **keywords)
    state = _state(engine.ctx)
    began = time.perf_counter()
    if not engine.runner.manual:
        raise UsageError(f"generate cannot be called: {engine.runner.manual_reason}")
    # The weights stay gathered for the whole phase: gathering them for each token would cost as
    # much as the token.
    with eval_mode(engine.module), torch.no_grad(), _weights(engine, state.section) as whole:
        model = state.model = state.model or _model(engine, state.section, whole)
        model.update()
        there = time.perf_counter()
        generator = _generator(engine, state, model, _rows(engine.module, inputs, keywords))
        answer = _call(engine.module)(generator, inputs, keywords)
        # Ranks whose prompts are done run along with those that still gather weights.
        if isinstance(model.runnable, Eager):
            model.runnable.drain()
    # Kept, the next call does not allocate it again; released, training has the memory.
    state.cache = None if state.section.release_inference_cache else generator.cache
    now = time.perf_counter()
    last = state.ended
    old = state.stats
    state.stats = replace(
        old,
        calls=old.calls + 1,
        seconds=old.seconds + now - began,
        gather_seconds=old.gather_seconds + there - began,
        train_seconds=old.train_seconds + (0.0 if last is None else began - last),
        last_seconds=now - began,
        prompt_tokens=old.prompt_tokens + generator.prompt_tokens,
        new_tokens=old.new_tokens + generator.new_tokens,
        last_new_tokens=generator.new_tokens,
    )
    state.ended = now
    return answer


def generation_stats(engine: RunningEngine) -> GenerationStats:
    """How long ``engine.generate`` took on this rank so far, and how much it wrote."""
    return _state(engine.ctx).stats


def metrics(ctx: Context) -> Mapping[str, float]:
    """Seconds and tokens of this rank since the last step; nothing where it did not generate."""
    state = _state(ctx)
    new = state.stats
    old = state.reported
    state.reported = new
    if new.calls == old.calls:
        return {}
    seconds = new.seconds - old.seconds
    tokens = new.new_tokens - old.new_tokens
    return {
        "Train/Generation/seconds": seconds,
        "Train/Generation/gather_seconds": new.gather_seconds - old.gather_seconds,
        "Train/Generation/new_tokens": float(tokens),
        "Train/Generation/tokens_per_second": tokens / max(seconds, 1e-9),
    }


def _state(ctx: Context) -> _State:
    state = ctx.stash.get(_STATE)
    if state is None:
        state = ctx.stash[_STATE] = _State(_section(ctx))
    return state


def _section(ctx: Context) -> HybridEngine:
    return ctx.config.section(HybridEngine) or HybridEngine()


# -- weights and what runs -------------------------------------------------------------------------


@contextlib.contextmanager
def _weights(engine: RunningEngine, section: HybridEngine) -> Iterator[bool]:
    """Inside, all weights are there if they can be; whether they are."""
    partitioner = engine.partitioner
    if not partitioner.releases_weights:
        yield True
    # Gathered once, layer after layer, and released at the end of the phase.
    elif isinstance(partitioner, HoldsWeights) and not partitioner.weights_away:
        with partitioner.weights_held(section.tp_gather_partition_size):
            yield True
    else:
        yield False


def _model(engine: RunningEngine, section: HybridEngine, whole: bool) -> _Model:
    """The program of the engine's model, loaded; where there is none, or weights are not `whole`,
    the module.
    """
    mesh = engine.ctx.mesh
    module = engine.module
    # A program reads all weights by address, so all must be in memory.
    lowered = lower(module) if whole else None
    if lowered is not None and (lowered.kind is not Kind.CAUSAL or lowered.vocab is None):
        raise UsageError(f"generate: {type(module).__name__} has no head that says the next token")
    if lowered is None:
        if section.enable_cuda_graph:
            why = why_not(module) or "its weights are elsewhere"
            text = (
                f"{type(module).__name__} runs by itself, and only steps of a program are "
                f"recorded: {why}"
            )
            raise ConfigError(
                [Problem(_GRAPH, text, "leave the key out")], engine.ctx.config.origin
            )
        log_once(
            log,
            logging.INFO,
            "generate: %s computes by itself, without a program",
            type(module).__name__,
        )
        # Only ranks that gather together must run equally often.
        several = not whole and mesh.size("dp") > 1
        eager = Eager(module, together=not whole, group=mesh.group("dp") if several else None)
        return _Model(eager, eager.program, eager.vocab, eager.max_positions, eager.eos, None)
    runnable = parallel.load(
        lowered, module, engine.ctx, torch.device(engine.ctx.accelerator.current_device())
    )
    if section.enable_cuda_graph:
        parallel.record(runnable, type(module).__name__, _GRAPH)
    return _Model(
        runnable, lowered.program, lowered.vocab, lowered.max_positions, lowered.eos, lowered
    )


# -- one call --------------------------------------------------------------------------------------


def _generator(engine: RunningEngine, state: _State, model: _Model, rows: int) -> Generator:
    """A generator for `rows` sequences, over the cache of the last call where that is large
    enough."""
    program = model.program
    most = state.section.max_out_tokens
    # one sequence more: blocks of beams are copied before they are freed
    blocks = (rows + 1) * -(-most // BLOCK)
    device = engine.ctx.accelerator.current_device()
    cache = state.cache
    # A larger cache serves as well.
    if cache is None or cache.blocks < blocks:
        state.cache = cache = None  # before the new one is made
        cache = KVCache.make(
            program.layers, blocks, program.kv_heads, program.head_dim, program.dtype, device
        )
    positions = most if model.positions is None else min(most, model.positions)
    return Generator(
        model.runnable,
        program=program,
        max_positions=positions,
        cache_tokens=blocks * BLOCK,
        vocab=model.vocab,
        eos=model.eos,
        device=device,
        # Every sequence of the batch has a row in each step.
        max_rows=max(512, rows),
        max_sequences=max(64, rows),
        cache=cache,
        seeds=functools.partial(parallel.one_seed, engine.ctx),
        most_key="hybrid_engine.max_out_tokens",
    )


def _rows(module: Any, inputs: Any, keywords: Mapping[str, Any]) -> int:
    """How many sequences are written at a time."""
    given = inputs if inputs is not None else keywords.get("input_ids")
    if not isinstance(given, Tensor) or given.dim() != 2:
        raise UsageError("generate takes the tokens of prompts, a tensor [batch, length]")
    config = keywords.get("generation_config") or getattr(module, "generation_config", None)
    each = (
        keywords.get(name) or getattr(config, name, None) or 1
        for name in ("num_beams", "num_return_sequences")
    )
    return int(given.shape[0]) * int(max(each))


def _call(module: nn.Module) -> Callable[[Generator, Any, dict[str, Any]], Any]:
    """How the module's own `generate` is asked, by whether it is of transformers."""
    if not hasattr(module, "generation_config"):
        return lambda generator, inputs, keywords: plain_generate(generator, inputs, **keywords)
    from ds_inference.generate.hf import hf_generate

    return lambda generator, inputs, keywords: hf_generate(generator, module, inputs, **keywords)
