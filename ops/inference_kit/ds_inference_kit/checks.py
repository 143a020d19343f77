"""Comparing a provider of ``inference_program`` with the reference: each instruction and format,
then whole models.

What is compared with is the reference in fp32 on the same weights, so a provider may keep its
registers wider than the program says. `inference_program` is what ``dscore ops test`` and
`ds_testing.KernelConformance` run (`KernelEntry.check`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ds_inference_kit import program as p
from ds_inference_kit.cases import Case, attention, collectives, elementwise, others, products
from ds_inference_kit.comparing import BOUNDS, DTYPES, check_close, move_to
from ds_inference_kit.comparing import FORMATS as FORMATS
from ds_inference_kit.comparing import make_step as make_step
from ds_inference_kit.comparing import random as random
from ds_inference_kit.models import WHOLE
from ds_inference_kit.models import transformer as transformer
from ds_inference_kit.reference import load as reference
from ds_inference_kit.step import BLOCK, KVCache, Step

Cases = Iterator[tuple[str, Callable[[], None]]]


def inference_program(function: p.Load, device: str, dtypes: tuple[str, ...]) -> Cases:
    """The comparisons of the provider `function`, by name; see `ds_kernel_kit.comparisons.CHECKS`.

    dtypes: of the program's activations; empty: all that a program may have.
    """
    for dtype in (DTYPES[name] for name in dtypes or DTYPES):
        compare = functools.partial(_compare, function, device, dtype)
        name = str(dtype).removeprefix("torch.")
        cases = (elementwise(dtype), products(dtype), attention(), others(dtype), collectives())
        for what, case in itertools.chain.from_iterable(cases):
            yield f"{name}, {what}", functools.partial(_run, compare, case)
        for what, whole in WHOLE.items():
            yield f"{name}, {what}", functools.partial(whole, function, device, dtype)


# -- one instruction -------------------------------------------------------------------------------


def _run(compare: Callable[[Case], None], case: Callable[[], Case]) -> None:
    compare(case())


def _compare(function: p.Load, device: str, dtype: torch.dtype, case: Case) -> None:
    program, step = _program_of(case, device, dtype)
    caches = [_cache(case, step, device, dtype) for _ in range(2)]
    # The reference runs in fp32, so that what is measured is the rounding of the provider alone.
    wide = dataclasses.replace(program, dtype=torch.float32)
    wanted = reference(wide, case.collectives)(step, caches[0])
    got = function(program, case.collectives)(step, caches[1])
    check_close(got, wanted, BOUNDS[dtype])
    # Attention also writes: the rows of this step are in the cache afterwards, and nothing else.
    if caches[0] is not None and caches[1] is not None:
        for mine, theirs in (
            (caches[1].keys, caches[0].keys),
            (caches[1].values, caches[0].values),
        ):
            check_close(mine, theirs, max(BOUNDS[dtype], BOUNDS[mine.dtype]))


def _program_of(case: Case, device: str, dtype: torch.dtype) -> tuple[p.Program, Step]:
    """The case as a program with a step that runs it."""
    rows = case.inputs[0].shape[0]
    sizes = case.sizes or (rows,)
    before = case.before or (0,) * len(sizes)
    # Rows are picked by type, since tokens and positions may be what the instruction reads.
    tables = [p.Embed(i, x.to(device, dtype), p.By.TYPES) for i, x in enumerate(case.inputs)]
    code = (*tables, *(move_to(i, device, dtype) for i in case.code))
    parts = [(torch.arange(n) % 5, first) for n, first in zip(sizes, before, strict=True)]
    blocks: Tensor | None = None
    if case.layers:
        # Blocks in a random order: a provider that takes them for contiguous is found out.
        most = max(-(-(n + first) // BLOCK) for n, first in zip(sizes, before, strict=True))
        order = torch.randperm(most * len(sizes), generator=torch.Generator().manual_seed(1))
        blocks = order.view(len(sizes), most)
    more = dict(case.step)
    if not any(isinstance(i, p.Embed) and i.by is p.By.TYPES for i in case.code):
        more["types"] = torch.arange(rows, dtype=torch.int32)
    step = make_step(parts, blocks, device, **more)
    widths = (*(x.shape[1] for x in case.inputs), *case.more)
    cache = (case.layers, case.kv_heads, case.head_dim)
    return p.Program(code, widths, case.output, dtype, *cache), step


def _cache(case: Case, step: Step, device: str, dtype: torch.dtype) -> KVCache | None:
    """The cache of a case, filled with what earlier tokens could have left; None: it has none."""
    if step.blocks is None:
        return None
    made = KVCache.make(
        case.layers,
        step.blocks.numel(),
        case.kv_heads,
        case.head_dim,
        case.cache or dtype,
        device,
    )
    for seed, arena in enumerate((made.keys, made.values)):
        arena.copy_(random(*arena.shape, seed=seed))
    return made
