"""Makes the instructions of a described transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ds_inference_kit import program as p
from ds_inference_kit.weights import Quantized
from ds_run_state.divided import Divided, divided
from torch import Tensor, nn

from ds_inference.families.description import (
    Attention,
    Dense,
    Layer,
    Order,
    Sparse,
    Tables,
    Transformer,
)
from ds_inference.families.reading import Unknown
from ds_inference.weights.quantised import QuantizedExperts, QuantizedLinear


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """A tensor that is made from parameters: a view of one, or small."""

    tensor: Tensor
    # Computes it again after the parameters moved.
    make: Callable[[], Tensor]


def emit(
    model: Transformer, head: nn.Module | None, dtype: torch.dtype
) -> tuple[p.Program, tuple[Derived, ...]]:
    """The program of `model` up to its last hidden states, or with `head` to its logits."""
    e = _Emitter(dtype)
    x = e.embed(model)
    for number, layer in enumerate(model.layers):
        e.layer(layer, x, number, model.causal)
    # From here on only the rows are needed whose output is requested.
    x = e.put(p.Keep(x, kept := e.register("kept", e.widths[x])), kept)
    if model.norm is not None:
        e.normalize(model.norm, x, x)
    if model.project_out is not None:
        x = e.linear(x, model.project_out, "projected")
    if head is not None:
        x = e.logits(x, head)
    cache = e.cache if model.causal else (0, 0, 0)
    program = p.Program(tuple(e.code), tuple(e.widths), x, dtype, *cache, embeds=e.embeds)
    return program, tuple(e.derived)


class _Emitter:
    """Instructions so far, and the registers: one for each use and width, the same in all
    layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.code: list[p.Instruction] = []
        self.widths: list[int] = []
        self.derived: list[Derived] = []
        self.embeds = 0
        self.cache = 0, 0, 0
        self._dtype = dtype
        # Registers live as long as a step, so all layers share them.
        self._named: dict[tuple[str, int], int] = {}
        # By the function that makes them: layers share rotary tables.
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def register(self, name: str, width: int) -> int:
        """The register of that name and width."""
        if (name, width) not in self._named:
            self._named[name, width] = len(self.widths)
            self.widths.append(width)
        return self._named[name, width]

    def put(self, instruction: p.Instruction, out: int) -> int:
        """Append; `out`."""
        self.code.append(instruction)
        return out

    def derive(self, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes, now and in `Lowered.refresh`."""
        self.derived.append(Derived(make(), make))
        return self.derived[-1].tensor

    def embed(self, model: Transformer) -> int:
        """The sum of the embeddings, normalised; sets `embeds`.

        Where ranks divide the table of tokens, by rows or by columns, the instruction is not run:
        `parallel.Embedded` gives each step its vectors.
        """
        table = _table(model.tokens)
        cut = divided(model.tokens)
        # Where ranks gather columns, the register has the full width.
        width = (
            sum(cut.sizes) or table.shape[1] * cut.ranks
            if cut is not None and cut.gathers
            else table.shape[1]
        )
        x = self.embeds = self.put(p.Embed(at := self.register("tokens", width), table), at)
        if model.project_in is not None:
            x = self.linear(x, model.project_in, "x")
        if model.types is not None:
            self.put(p.Embed(x, _table(model.types), p.By.TYPES, add=True), x)
        if model.positions is not None:
            self.put(p.Embed(x, _table(model.positions), p.By.POSITIONS, model.offset, add=True), x)
        if model.embedded is not None:
            self.normalize(model.embedded, x, x)
        return x

    def layer(self, layer: Layer, x: int, number: int, causal: bool) -> None:
        """x += attention, x += MLP, with norms in the order of the layer."""
        first, second = layer.norms
        width = self.widths[x]
        order = layer.order
        # PARALLEL: both norms read the same input, before attention has changed it.
        n = x if order is Order.POST else self.normalize(first, x, self.register("normed", width))
        m = (
            self.normalize(second, x, self.register("also", width))
            if order is Order.PARALLEL
            else x
        )
        self.attention(layer.attention, n, x, number, causal)
        if order is Order.POST:
            self.normalize(first, x, x)
        if order is Order.PRE:
            m = self.normalize(second, x, self.register("normed", width))
        self.mlp(layer.mlp, m, x)
        if order is Order.POST:
            self.normalize(second, x, x)

    def normalize(self, module: Any, x: int, out: int, groups: int = 1) -> int:
        """One norm of `x` to `out`."""
        weight = _own(module, "weight")
        bias = _own(module, "bias")
        if isinstance(module, nn.LayerNorm):
            return self.put(
                p.Normalize(x, out, weight, bias, module.eps, p.Norm.LAYER, groups), out
            )
        if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
            raise Unknown(f"norm {type(module).__name__} is not served")
        return self.put(
            p.Normalize(x, out, weight, None, module.variance_epsilon, p.Norm.RMS, groups), out
        )

    def attention(self, a: Attention, x: int, total: int, number: int, causal: bool) -> None:
        """total += attention to `x`."""
        if len(a.qkv) == 3:
            q, k, v = (
                self.linear(x, module, name) for module, name in zip(a.qkv, "qkv", strict=True)
            )
        else:
            q, k, v = self.apart(
                self.linear(x, a.qkv[0], "qkv"), a.head_dim if a.interleaved else None
            )
        # This rank's heads: a divided layer has fewer rows.
        heads = self.widths[q] // a.head_dim
        kv_heads = self.widths[k] // a.head_dim
        if a.norms is not None:
            for module, at, count in zip(a.norms, (q, k), (heads, kv_heads), strict=True):
                self.normalize(module, at, at, count)
        if a.rotary is not None:
            cos, sin = self.turning(a.rotary)
            self.code += [p.Rotate(at, a.head_dim, cos, sin) for at in (q, k)]
        # One arena has room for one shape of keys and values in all layers.
        if self.cache not in ((0, 0, 0), (number, kv_heads, a.head_dim)):
            raise Unknown("layers with unequal heads are not served")
        self.cache = number + 1, kv_heads, a.head_dim
        out = self.register("attended", self.widths[q])
        slopes = None if a.slopes is None else self.derive(lambda: _slopes(a))
        window, layer = (a.window, number) if causal else (None, None)
        self.put(
            p.Attend(
                q, k, v, out, heads, kv_heads, a.head_dim, a.scale, layer, causal, window, slopes
            ),
            out,
        )
        self.added(out, a.out, total)

    def apart(self, fused: int, head_dim: int | None) -> tuple[int, int, int]:
        """q, k and v of one register.

        head_dim: they lie head by head; else all of q first.
        """
        width = self.widths[fused] // 3
        each = width if head_dim is None else head_dim
        q, k, v = (self.register(name, width) for name in "qkv")
        self.code += [
            p.Columns(fused, at, n * each, each, width // each) for n, at in enumerate((q, k, v))
        ]
        return q, k, v

    def turning(self, make: Tables) -> tuple[Tensor, Tensor]:
        """The tables of a rotary embedding, once for all layers that share it."""
        if id(make) not in self._tables:
            self._tables[id(make)] = self.derive(lambda: make()[0]), self.derive(lambda: make()[1])
        return self._tables[id(make)]

    def mlp(self, mlp: Dense | Sparse, x: int, total: int) -> None:
        """total += MLP of `x`."""
        if isinstance(mlp, Sparse):
            return self.experts(mlp, x, total)
        if mlp.gate is None:
            return self.added(self.linear(x, mlp.up, "inner", mlp.activation), mlp.down, total)
        gate, gate_bias = self.product(mlp.gate)
        up, up_bias = self.product(mlp.up)
        inner = self.register("inner", up.shape[0])
        self.put(p.Gated(x, inner, gate, up, gate_bias, up_bias, mlp.activation), inner)
        return self.added(inner, mlp.down, total)

    def experts(self, s: Sparse, x: int, total: int) -> None:
        """total += experts of `x`."""
        module = s.experts
        router = _own(s.router, "weight")
        cut = divided(module)
        out = self.register("mixed", self.widths[x])
        gates, ups, downs = self.weights_of_experts(module)
        if router is None or (
            router.shape[0] != len(gates) and (cut is None or cut.inputs is None)
        ):
            raise Unknown("the router is of another number of experts")
        # Which of the model's experts are on this rank.
        first = cut.inputs[0][0] if cut is not None and cut.inputs is not None else 0
        self.put(
            p.Experts(x, out, router, gates, ups, downs, s.top_k, True, s.activation, first), out
        )
        if cut is not None and cut.sums:
            self.put(p.Reduce(out), out)
        self.put(p.Add(out, total, total), total)

    def weights_of_experts(self, module: Any) -> tuple[tuple[p.Weight, ...], ...]:
        """gates, ups and downs: slices of two parameters or quantised matrices."""
        quantised = isinstance(module, QuantizedExperts)
        if not quantised and (
            _own(module, "gate_up_proj") is None or _own(module, "down_proj") is None
        ):
            raise Unknown(f"experts of {type(module).__name__} are not served")
        held = (
            (module.gate_up, module.down) if quantised else (module.gate_up_proj, module.down_proj)
        )
        count = module.experts if quantised else held[0].shape[0]

        # Views of the stacked parameters, derived again when those move.
        def part(of: int, expert: int, half: int, halves: int) -> p.Weight:
            if not quantised:
                return self.derive(lambda: _held(module, of).detach()[expert].chunk(halves)[half])
            whole: Quantized = held[of].quantized()
            parts = [
                None
                if x is None
                else self.derive(
                    functools.partial(_slice, held[of], x, count, expert, half, halves)
                )
                for x in ("q", "scales", None if whole.lows is None else "lows")
            ]
            assert parts[0] is not None and parts[1] is not None
            return Quantized(parts[0], parts[1], parts[2], whole.bits, whole.group)

        every = range(count)
        gates, ups = (tuple(part(0, n, half, 2) for n in every) for half in (0, 1))
        return gates, ups, tuple(part(1, n, 0, 1) for n in every)

    def linear(
        self, x: int, module: nn.Module, name: str, activation: p.Activation = p.Activation.NONE
    ) -> int:
        """What a layer that no rank sums makes of `x`, in a register of that name."""
        if (cut := divided(module)) is not None and (cut.sums or cut.gathers):
            raise Unknown(
                f"a {type(module).__name__} that ranks sum or gather is not known at this place"
            )
        weight, bias = self.product(module)
        out = self.register(name, weight.shape[0])
        return self.put(p.Linear(x, out, weight, bias, activation), out)

    def added(self, x: int, module: nn.Module, total: int) -> None:
        """total += what a layer makes of `x`, summed over the ranks where they divide it."""
        weight, bias = self.product(module)
        if (cut := divided(module)) is None:
            self.put(p.Linear(x, total, weight, bias, add=total), total)
            return
        if not cut.sums:
            raise Unknown(
                f"a divided {type(module).__name__} that ranks do not sum is not known at this "
                "place"
            )
        # The bias is added once, after the sum over ranks.
        part = self.register("part", self.widths[total])
        self.code += [p.Linear(x, part, weight), p.Reduce(part), p.Add(part, total, total, bias)]

    def logits(self, x: int, head: nn.Module) -> int:
        """The output head; whole on each rank."""
        cut = divided(head)
        weight, bias = self.product(head)
        out = self.put(
            p.Linear(x, at := self.register("logits", weight.shape[0]), weight, bias), at
        )
        if cut is None:
            return out
        if not cut.gathers:
            raise Unknown("a divided output head whose parts are not gathered is not served")
        # Each rank samples, so each needs all logits.
        every = self.register("gathered", sum(cut.sizes) or weight.shape[0] * cut.ranks)
        return self.put(p.Gather(out, every), every)

    def product(self, module: Any) -> tuple[p.Weight, Tensor | None]:
        """weight [out, in] and bias of a linear layer."""
        cut = divided(module)
        kind = type(module).__name__
        if isinstance(module, QuantizedLinear):
            return module.quantized(), module.bias
        weight = _own(module, "weight")
        bias = _own(module, "bias")
        if weight is None or weight.dim() != 2:
            raise Unknown(f"{kind} is not a linear layer that is served")
        if cut is None and type(module) is nn.Linear:
            return weight, bias
        # A transposed view: providers read contiguous columns as well.
        if kind == "Conv1D" or hasattr(module, "nf"):  # [in, out] in memory, a divided one too
            return self.derive(lambda: module.weight.detach().t()), bias
        if cut is None or not isinstance(module, nn.Linear):
            raise Unknown(f"{kind} is not a linear layer that is served")
        if not cut.whole_weight:
            return weight, bias
        return self.derive(
            lambda: _rows(module.weight, cut)
        ), bias if bias is None else self.derive(lambda: _rows(module.bias, cut))


def _own(module: Any, name: str) -> Tensor | None:
    """A parameter of a module; not what something else recomputes."""
    found = getattr(module, name, None)
    if found is not None and not isinstance(found, nn.Parameter):
        raise Unknown(f"{name} of a {type(module).__name__} is not a parameter")
    return found


def _table(module: Any) -> Tensor:
    """The matrix of an embedding."""
    table = _own(module, "weight")
    if not isinstance(module, nn.Embedding) or table is None or module.max_norm is not None:
        raise Unknown(f"{type(module).__name__} is not an embedding that is served")
    return table


def _held(module: Any, of: int) -> Tensor:
    """gate_up_proj or down_proj [experts, out, in], as it is now."""
    found: Tensor = module.down_proj if of else module.gate_up_proj
    return found


def _slice(
    module: QuantizedLinear, name: str, count: int, expert: int, half: int, halves: int
) -> Tensor:
    """The part of an expert of a buffer [count * out, ...]."""
    whole: Tensor = getattr(module, name)
    return whole.chunk(count)[expert].chunk(halves)[half]


def _rows(whole: Tensor, cut: Divided) -> Tensor:
    """The rows that a rank uses of a whole parameter: a view where they follow each other."""
    parts = [whole.detach()[first : first + size] for first, size in cut.outputs or ()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slopes(a: Attention) -> Tensor:
    """The slopes of this rank's heads."""
    assert a.slopes is not None
    cut = divided(a.qkv[0])
    first = a.qkv[0]
    here = a.slopes.to(
        next(first.buffers() if isinstance(first, QuantizedLinear) else first.parameters()).device
    )
    if cut is None or cut.outputs is None:
        return here
    rows = a.head_dim * (3 if len(a.qkv) == 1 else 1)
    return torch.cat([here[at // rows : (at + size) // rows] for at, size in cut.outputs])
