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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_inference_kit import program as p
from ds_inference_kit.reference import load as reference
from ds_inference_kit.step import BLOCK, KVCache, Step
from ds_inference_kit.weights import Quantized, quantize

Cases = Iterator[tuple[str, Callable[[], None]]]
FORMATS = (
    "own",
    "fp32",
    "bf16",
    "fp16",
    "columns",
    "int8",
    "int8 with lows",
    "int4",
    "int4 with lows",
)
ROWS = (1, 3, 9, 40)
_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BOUNDS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Largest difference, as a part of the largest value that is expected (in whole models twice that).
"""


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in fp32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_step(
    parts: Sequence[tuple[Tensor, int]],
    blocks: Tensor | None = None,
    device: str = "cpu",
    **more: Any,
) -> Step:
    """A step of some sequences: for each its tokens, and the position of the first of them."""
    sizes = torch.tensor([len(tokens) for tokens, _ in parts])
    positions = torch.cat([torch.arange(first, first + len(tokens)) for tokens, first in parts])
    return Step(
        torch.cat([tokens for tokens, _ in parts]).int().to(device),
        positions.int().to(device),
        torch.cat([torch.zeros(1), sizes.cumsum(0)]).int(),
        torch.tensor([first + len(tokens) for tokens, first in parts], dtype=torch.int32),
        None if blocks is None else blocks.int().to(device),
        **{
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in more.items()
        },
    )


def inference_program(function: p.Load, device: str, dtypes: tuple[str, ...]) -> Cases:
    """See `ds_kernel_kit.comparisons.CHECKS`."""
    for dtype in (_NAMES[name] for name in dtypes or _NAMES):
        compare = functools.partial(_compare, function, device, dtype)
        name = str(dtype).removeprefix("torch.")
        for what, case in (*_elementwise(dtype), *_products(dtype), *_attention(), *_others(dtype)):
            yield f"{name}, {what}", functools.partial(_run, compare, case)
        for what, whole in _WHOLE.items():
            yield f"{name}, {what}", functools.partial(whole, function, device, dtype)


# -- one instruction -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Case:
    """Registers 0, 1, ... are filled from `inputs` ([rows, width]); `code` follows; register
    `output` is compared.
    """

    inputs: tuple[Tensor, ...]
    code: tuple[p.Instruction, ...]
    more: tuple[int, ...]  # widths of further registers
    output: int
    sizes: tuple[int, ...] = ()  # rows of each sequence; empty: one sequence
    before: tuple[int, ...] = ()  # tokens of each sequence that the cache has
    step: tuple[tuple[str, Any], ...] = ()
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    cache: torch.dtype | None = None
    collectives: p.Collectives | None = None


def _run(compare: Callable[[_Case], None], case: Callable[[], _Case]) -> None:
    compare(case())


def _compare(function: p.Load, device: str, dtype: torch.dtype, case: _Case) -> None:
    rows = case.inputs[0].shape[0]
    sizes = case.sizes or (rows,)
    before = case.before or (0,) * len(case.sizes or (1,))
    widths = (*(x.shape[1] for x in case.inputs), *case.more)
    # Rows are picked by type, since tokens and positions may be what the instruction reads.
    tables = [p.Embed(i, x.to(device, dtype), p.By.TYPES) for i, x in enumerate(case.inputs)]
    code = (*tables, *(_moved(i, device, dtype) for i in case.code))
    parts = [(torch.arange(n) % 5, first) for n, first in zip(sizes, before, strict=True)]
    blocks: Tensor | None = None
    caches: list[KVCache | None] = [None, None]
    if case.layers:
        most = max(-(-(n + first) // BLOCK) for n, first in zip(sizes, before, strict=True))
        order = torch.randperm(most * len(sizes), generator=torch.Generator().manual_seed(1))
        blocks = order.view(len(sizes), most)
        caches = [_cache(case, most * len(sizes), device, dtype) for _ in range(2)]
    more = dict(case.step)
    if not any(isinstance(i, p.Embed) and i.by is p.By.TYPES for i in case.code):
        more["types"] = torch.arange(rows, dtype=torch.int32)
    step = make_step(parts, blocks, device, **more)
    program = p.Program(code, widths, case.output, dtype, case.layers, case.kv_heads, case.head_dim)
    wide = dataclasses.replace(program, dtype=torch.float32)
    wanted = reference(wide, case.collectives)(step, caches[0])
    got = function(program, case.collectives)(step, caches[1])
    _close(got, wanted, _BOUNDS[dtype])
    if caches[0] is not None and caches[1] is not None:
        for mine, theirs in (
            (caches[1].keys, caches[0].keys),
            (caches[1].values, caches[0].values),
        ):
            _close(mine, theirs, max(_BOUNDS[dtype], _BOUNDS[mine.dtype]))


def _cache(case: _Case, blocks: int, device: str, dtype: torch.dtype) -> KVCache:
    made = KVCache.make(
        case.layers, blocks, case.kv_heads, case.head_dim, case.cache or dtype, device
    )
    for seed, arena in enumerate((made.keys, made.values)):
        arena.copy_(random(*arena.shape, seed=seed))
    return made


def _close(got: Tensor, wanted: Tensor, bound: float) -> None:
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel():
        return
    got = got.double()
    wanted = wanted.double()
    assert bool(got.isfinite().all()), f"{int((~got.isfinite()).sum())} numbers are not finite"
    away = (got - wanted).abs()
    most = wanted.abs().max().item()
    worst = int(away.argmax())
    assert away.max().item() <= bound * max(most, 1e-3), (
        f"number {worst} is {got.flatten()[worst]:.7g} instead of {wanted.flatten()[worst]:.7g}, "
        f"{int((away > bound * most).sum())} of {away.numel()} are away by more than {bound:g} of "
        f"{most:.4g}"
    )


def _moved(instruction: p.Instruction, device: str, dtype: torch.dtype) -> Any:
    """The instruction with its tensors on `device`; what is in fp64 (a test's "own dtype") becomes
    `dtype`.
    """

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, dtype if value.dtype == torch.float64 else value.dtype)
        if isinstance(value, tuple):
            return tuple(map(move, value))
        if isinstance(value, Quantized):
            return dataclasses.replace(
                value, q=move(value.q), scales=move(value.scales), lows=move(value.lows)
            )
        return value

    changes = {f.name: move(getattr(instruction, f.name)) for f in dataclasses.fields(instruction)}
    return dataclasses.replace(instruction, **changes)


def _weight(out: int, inner: int, form: str, seed: int = 0) -> p.Weight:
    values: Tensor = random(out, inner, seed=seed) / inner**0.5
    if form.startswith("int"):
        # steps of pairs in 8 bits are too small for fp16
        small = 34 if form == "int8 with lows" else 2
        group = next(g for g in (32, 22, 16, small) if inner % g == 0)
        return quantize(
            values, bits=int(form[3]), group=group, symmetric=not form.endswith("with lows")
        )
    if form == "columns":
        return values.double().t().contiguous().t()
    return values.to({"own": torch.float64, **{k: _NAMES[v] for k, v in _SHORT.items()}}[form])


_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Named = Iterator[tuple[str, Callable[[], _Case]]]


def _elementwise(dtype: torch.dtype) -> Named:
    own = torch.float64

    def embed(by: p.By, more: dict[str, Any]) -> _Case:
        table = random(12, 19).to(own)
        code = p.Embed(1, table, by, 3, 0.5), p.Embed(1, table, by, add=True)
        return _Case((random(6, 19),), code, (19,), 1, (4, 2), (1, 3), tuple(more.items()))

    for by in p.By:
        types = (
            {"types": torch.tensor([1, 0, 2, 4, 5, 0], dtype=torch.int32)}
            if by is p.By.TYPES
            else {}
        )
        yield f"Embed by {by.name.lower()}", functools.partial(embed, by, types)
    yield "Embed by types that are not given", functools.partial(embed, p.By.TYPES, {})

    def normalize(norm: p.Norm, width: int, groups: int, affine: bool, out: int) -> _Case:
        x = random(5, width) * 3 + 1
        weight, bias = (random(width // groups, seed=s).to(own) if affine else None for s in (1, 2))
        code = p.Normalize(0, out, weight, bias, 1e-5, norm, groups)
        return _Case((x,), (code,), (width,), out)

    for norm, (width, groups), affine in itertools.product(
        p.Norm, ((37, 1), (96, 6), (576, 1)), (True, False)
    ):
        what = f"Normalize {norm.name} of {width} in {groups}, weights {affine}"
        yield what, functools.partial(normalize, norm, width, groups, affine, int(affine))

    def add(out: int, bias: bool) -> _Case:
        bent = random(21, seed=3).to(own) if bias else None
        return _Case((random(4, 21), random(4, 21, seed=9)), (p.Add(0, 1, out, bent),), (21,), out)

    for out, bias in itertools.product((0, 1, 2), (False, True)):
        yield f"Add into {out}, bias {bias}", functools.partial(add, out, bias)

    def rotate(rotary: p.Rotary, dim: int, dims: int) -> _Case:
        angles = torch.arange(60.0)[:, None] * 50.0 ** (-torch.arange(dims / 2) / (dims / 2))
        code = p.Rotate(0, dim, angles.cos(), angles.sin(), rotary)
        return _Case((random(9, 3 * dim),), (code,), (), 0, (2, 7), (11, 40))

    for rotary, (dim, dims) in itertools.product(p.Rotary, ((8, 8), (64, 64), (80, 32), (10, 6))):
        yield f"Rotate {rotary.name} {dims} of {dim}", functools.partial(rotate, rotary, dim, dims)


def _products(dtype: torch.dtype) -> Named:
    def linear(
        rows: int, shape: tuple[int, int], form: str, activation: p.Activation, kind: int
    ) -> _Case:
        out, inner = shape
        bias = random(out, seed=5).double() if kind & 1 else None
        add, to = ((None, 2), (1, 2), (1, 1))[kind % 3]
        code = p.Linear(0, to, _weight(out, inner, form), bias, activation, add)
        return _Case((random(rows, inner), random(rows, out, seed=7)), (code,), (out,), to)

    def gated(
        rows: int, shape: tuple[int, int], form: str, activation: p.Activation, kind: int
    ) -> _Case:
        out, inner = shape
        first, second = (random(out, seed=s).double() if kind & 1 else None for s in (5, 6))
        code = p.Gated(
            0, 1, _weight(out, inner, form), _weight(out, inner, form, 1), first, second, activation
        )
        return _Case((random(rows, inner),), (code,), (out,), 1)

    activations = itertools.cycle(p.Activation)
    shapes = ((7, 66), (50, 96), (129, 160), (64, 1536), (1, 34))
    for number, (rows, form) in enumerate(itertools.product(ROWS, FORMATS)):
        for kind, make in enumerate((linear, gated)):
            out, inner = shapes[(number + kind) % len(shapes)]
            activation = next(activations)
            what = (
                f"{make.__name__.title()} {out} x {inner} in {form}, {rows} rows, {activation.name}"
            )
            yield (
                what,
                functools.partial(make, rows, (out, inner), form, activation, number // 2 + kind),
            )

    def twice() -> _Case:
        """A product reads what the one before has written, and writes what it has read."""
        there = _weight(40, 64, "own")
        back = _weight(64, 40, "own")
        return _Case(
            (random(2, 64),),
            (p.Linear(0, 1, there), p.Linear(1, 0, back), p.Linear(0, 1, there)),
            (40,),
            1,
        )

    yield "Linear after Linear", twice


def _attention() -> Named:
    def attend(
        heads: int,
        kv: int,
        dim: int,
        layer: int | None,
        kind: str,
        cache: torch.dtype | None = None,
    ) -> _Case:
        sizes, before = ((5, 1, 33), (0, 0, 0)) if layer is None else ((1, 6, 1, 40), (70, 0, 0, 3))
        if kind.startswith("decode"):
            sizes = (1, 1, 1)
            before = (3, 2 * BLOCK - 1, 300)
        rows = sum(sizes)
        inputs = (
            random(rows, heads * dim),
            random(rows, kv * dim, seed=1),
            random(rows, kv * dim, seed=2),
        )
        code = p.Attend(
            0,
            1,
            2,
            3,
            heads,
            kv,
            dim,
            dim**-0.5,
            layer,
            causal=kind != "both ways",
            window=7 if "window" in kind else None,
            slopes=2.0 ** -torch.arange(1.0, heads + 1) if "slopes" in kind else None,
            groups=(0, 1, *(kv - 1 for _ in range(heads - 2))) if "groups" in kind else None,
        )
        layers = 0 if layer is None else layer + 1
        return _Case(inputs, (code,), (heads * dim,), 3, sizes, before, (), layers, kv, dim, cache)

    for heads, kv, dim, layer, kind in (
        (4, 4, 8, None, "both ways"),
        (4, 2, 20, None, "causal"),
        (9, 3, 64, 0, "mixed"),
        (9, 3, 64, 1, "decode"),
        (4, 4, 80, 0, "decode, slopes"),
        (6, 2, 12, 0, "mixed, slopes, window"),
        (5, 1, 64, 0, "decode, window"),
        (4, 2, 16, 0, "mixed, window"),
        (5, 2, 32, 0, "decode, groups"),
        (5, 2, 32, 0, "mixed, groups"),
        (16, 2, 128, 1, "decode"),
        (3, 3, 7, 0, "decode"),
    ):
        what = f"Attend {heads} heads of {kv} x {dim}, layer {layer}, {kind}"
        yield what, functools.partial(attend, heads, kv, dim, layer, kind)
    for dtype in _NAMES.values():
        what = f"Attend through a cache of {dtype}"
        yield what, functools.partial(attend, 4, 2, 16, 0, "decode", dtype)


def _others(dtype: torch.dtype) -> Named:
    def experts(rows: int, form: str, top_k: int, first: int, normalize: bool) -> _Case:
        gates, ups = (tuple(_weight(48, 64, form, s + e) for e in range(3)) for s in (10, 20))
        downs = tuple(_weight(64, 48, form, 30 + e) for e in range(3))
        router = random(5, 64, seed=4).double() / 8
        code = p.Experts(0, 1, router, gates, ups, downs, top_k, normalize, first=first)
        return _Case((random(rows, 64),), (code,), (64,), 1)

    for rows, form, top_k, first, normal in (
        (1, "own", 2, 0, True),
        (4, "own", 1, 2, False),
        (3, "int8", 2, 1, True),
        (2, "int4 with lows", 3, 0, False),
        (40, "own", 2, 0, True),
        (40, "int4", 2, 2, True),
    ):
        what = f"Experts {form}, {rows} rows, top {top_k}, first {first}"
        yield what, functools.partial(experts, rows, form, top_k, first, normal)

    def keep(wanted: list[int] | None, rows: int) -> _Case:
        code = p.Add(0, 0, 1), p.Keep(1, 2), p.Linear(2, 3, _weight(11, 24, "own")), p.Add(3, 3, 3)
        chosen = () if wanted is None else (("wanted", torch.tensor(wanted, dtype=torch.int64)),)
        return _Case((random(rows, 24),), code, (24, 24, 11), 3, step=chosen)

    for wanted, rows in ((None, 3), ([2, 0], 4), ([7], 40), ([], 2), (list(range(39, -1, -1)), 40)):
        what = f"Keep {'all' if wanted is None else len(wanted)} of {rows} rows"
        yield what, functools.partial(keep, wanted, rows)

    def ranks(rows: int) -> _Case:
        def reduce(x: Tensor) -> None:
            x.mul_(3)

        together = p.Collectives(reduce, lambda x: torch.cat([x, x + 1], 1))
        code = (
            p.Linear(0, 1, _weight(24, 24, "own")),
            p.Reduce(1),
            p.Add(1, 0, 1),
            p.Gather(1, 2),
            p.Add(2, 2, 3),
        )
        return _Case((random(rows, 24),), code, (24, 48, 48), 3, collectives=together)

    def logits(rows: int) -> _Case:
        together = p.Collectives(lambda x: None, lambda x: torch.cat([x, x - 1], 1))
        code = p.Keep(0, 1), p.Linear(1, 2, _weight(7, 24, "own")), p.Gather(2, 3), p.Add(3, 3, 3)
        last = (("wanted", torch.tensor([rows - 1, 0])),)
        return _Case((random(rows, 24),), code, (24, 7, 14), 3, step=last, collectives=together)

    for rows in (3, 40):
        yield f"Reduce and Gather, {rows} rows", functools.partial(ranks, rows)
        yield f"Gather of 2 of {rows} rows", functools.partial(logits, rows)


# -- whole models ----------------------------------------------------------------------------------


def transformer(
    form: str = "own",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    layers: int = 2,
    width: int = 64,
    inner: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 101,
    positions: int = 512,
) -> p.Program:
    """A model like llama with random weights, all projections in `form`."""
    dim = width // heads
    seeds = itertools.count()

    def weight(out: int, inner: int, form: str = form) -> p.Weight:
        made = _weight(out, inner, form, next(seeds) * 1000)
        return (
            made
            if isinstance(made, Quantized)
            else made.to(dtype if made.dtype == torch.float64 else made.dtype)
        )

    def ones() -> Tensor:
        return (1 + random(width, seed=next(seeds)) / 8).to(dtype)

    angles = torch.arange(float(positions))[:, None] * 1e4 ** (-torch.arange(dim / 2) / (dim / 2))
    table = (random(vocab, width) / 4).to(dtype)
    code: list[p.Instruction] = [p.Embed(0, table)]
    for layer in range(layers):
        code += [
            p.Normalize(0, 1, ones(), None, 1e-5, p.Norm.RMS),
            p.Linear(1, 2, weight(width, width)),
            p.Linear(1, 3, weight(kv_heads * dim, width)),
            p.Linear(1, 4, weight(kv_heads * dim, width)),
            p.Rotate(2, dim, angles.cos(), angles.sin()),
            p.Rotate(3, dim, angles.cos(), angles.sin()),
            p.Attend(2, 3, 4, 5, heads, kv_heads, dim, dim**-0.5, layer),
            p.Linear(5, 0, weight(width, width), add=0),
            p.Normalize(0, 1, ones(), None, 1e-5, p.Norm.RMS),
            p.Gated(1, 6, weight(inner, width), weight(inner, width)),
            p.Linear(6, 0, weight(width, inner), add=0),
        ]
    code += [p.Keep(0, 7), p.Normalize(7, 7, ones(), None, 1e-5, p.Norm.RMS), p.Linear(7, 8, table)]
    widths = (width, width, width, kv_heads * dim, kv_heads * dim, width, inner, width, vocab)
    moved = tuple(_moved(i, device, dtype) for i in code)
    return p.Program(moved, widths, 8, dtype, layers, kv_heads, dim, embeds=0)


def _conversation(program: p.Program, device: str) -> tuple[list[Step], int]:
    """Prompts, one in two parts, decoding of one and of three, and a prompt beside decoding; blocks
    it takes.
    """
    words = [torch.arange(200) * 7 % 101, torch.arange(9) * 5 % 101, torch.arange(70) * 3 % 101]
    blocks = torch.tensor([[5, 1, 7, 0], [3, 2, 9, 9], [8, 6, 4, 9]])
    one = torch.ones(1)
    steps = [
        make_step([(words[0][:50], 0)], blocks[:1], device, wanted=torch.tensor([49])),
        make_step(
            [(words[0][50:90], 50), (words[1], 0)],
            blocks[:2],
            device,
            wanted=torch.tensor([39, 48]),
        ),
        make_step([(words[0][90:91], 90)], blocks[:1], device),
        make_step(
            [(one * 4, 91), (words[2], 0)],
            blocks[[0, 2]],
            device,
            wanted=torch.tensor([], dtype=torch.int64),
        ),
        make_step([(one * 8, 92), (one * 9, 9), (one * 2, 70)], blocks, device),
        make_step(
            [(one * 3, 71), (one * 6, 93)], blocks[[2, 0]], device, wanted=torch.tensor([1, 0])
        ),
    ]
    embeds = random(1, program.widths[0], seed=2).to(program.dtype)
    steps.append(make_step([(one, 72)], blocks[2:], device, embeds=embeds))
    return steps, 10


def _follow(program: p.Program, function: p.Load, device: str, dtype: torch.dtype) -> None:
    """Compare logits after every step, each provider with its own cache."""
    wide = dataclasses.replace(program, dtype=torch.float32)
    steps, blocks = _conversation(program, device)
    caches = [
        KVCache.make(program.layers, blocks, program.kv_heads, program.head_dim, dtype, device)
        for _ in range(2)
    ]
    mine = function(program)
    theirs = reference(wide)
    for number, step in enumerate(steps):
        got = mine(step, caches[0])
        wanted = theirs(step, caches[1])
        assert got.dtype == dtype, f"{got.dtype} instead of {dtype}"
        try:
            _close(got, wanted, 2 * _BOUNDS[dtype])
        except AssertionError as error:
            raise AssertionError(f"step {number}: {error}") from error


def _whole(form: str, function: p.Load, device: str, dtype: torch.dtype) -> None:
    _follow(transformer(form, dtype, device), function, device, dtype)


def _rebound(function: p.Load, device: str, dtype: torch.dtype) -> None:
    """Weights move and change between steps, as a gather leaves them; each run returns new
    memory."""
    program = transformer("own", dtype, device)
    steps, blocks = _conversation(program, device)
    caches = [
        KVCache.make(program.layers, blocks, program.kv_heads, program.head_dim, dtype, device)
        for _ in range(2)
    ]
    runs = function(program)
    first = runs(steps[0], caches[0])
    kept = first.clone()
    for instruction in program.instructions:
        if isinstance(instruction, p.Linear) and isinstance(instruction.weight, Tensor):
            instruction.weight.data = instruction.weight * 1.5
    runs.rebind()
    wanted = reference(dataclasses.replace(program, dtype=torch.float32))
    for step in steps[:2]:
        _close(runs(step, caches[0]), wanted(step, caches[1]), 2 * _BOUNDS[dtype])
    assert bool(torch.equal(first, kept)), "a later run has changed what an earlier one returned"


_WHOLE: dict[str, Callable[[p.Load, str, torch.dtype], None]] = {
    **{f"a model in {form}": functools.partial(_whole, form) for form in FORMATS},
    "weights that move": _rebound,
}
