"""Programs by plain torch, on any device: what each instruction means, and the path for many rows.

Each instruction is a function of torch's own operations. Attention goes sequence by sequence
through ``scaled_dot_product_attention``; where a sequence has rows before this step, its keys and
values are read from the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_inference_kit import program as p
from ds_inference_kit.step import BLOCK, KVCache, Step
from ds_inference_kit.weights import Quantized, dequantize

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ACTIVATIONS: dict[p.Activation, Callable[[Tensor], Tensor]] = {
    p.Activation.NONE: lambda x: x,
    p.Activation.RELU: F.relu,
    p.Activation.GELU: F.gelu,
    p.Activation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
    p.Activation.SILU: F.silu,
    p.Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    p.Activation.TANH: torch.tanh,
}


def load(program: p.Program, collectives: p.Collectives | None = None) -> p.Runnable:
    """See `program.Load`."""
    return Interpreter(program, collectives)


class Interpreter:
    """Runs a program, one torch operation after the other.

    widened: dequantises a weight for a product.
    """

    def __init__(
        self,
        program: p.Program,
        collectives: p.Collectives | None = None,
        widened: Callable[[Quantized, torch.dtype], Tensor] = dequantize,
    ) -> None:
        self.program = program
        self._collectives = collectives
        self._widened = widened
        self._actions: dict[type, Callable[..., None]] = {
            p.Embed: self._embed,
            p.Normalize: self._normalize,
            p.Linear: self._linear,
            p.Gated: self._gated,
            p.Rotate: self._rotate,
            p.Attend: self._attend,
            p.Experts: self._experts,
            p.Add: self._add,
            p.Columns: self._columns,
            p.Reduce: self._reduce,
            p.Gather: self._gather,
            p.Keep: self._keep,
        }

    def rebind(self) -> None:
        """Nothing: weights are read where they are."""

    @torch.inference_mode()
    def __call__(self, step: Step, cache: KVCache | None = None) -> Float[Tensor, "rows width"]:
        """See `program.Runnable`."""
        registers: dict[int, Tensor] = {}
        for instruction in self.program.instructions:
            self.execute(instruction, registers, step, cache)
        return registers[self.program.output]

    def execute(
        self,
        instruction: p.Instruction,
        registers: dict[int, Tensor],
        step: Step,
        cache: KVCache | None,
    ) -> None:
        """Run one instruction, which reads `registers` and sets what it writes there."""
        self._actions[type(instruction)](instruction, registers, step, cache)

    def _embed(self, i: p.Embed, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        if i.by is p.By.TOKENS and step.embeds is not None:
            x = step.embeds.to(self.program.dtype)
        else:
            index = {
                p.By.TOKENS: step.tokens,
                p.By.POSITIONS: step.positions,
                p.By.TYPES: step.types,
            }[i.by]
            # Types that are not given are all 0, as in transformers.
            index = torch.zeros_like(step.tokens) if index is None else index
            x = F.embedding(index + i.offset if i.offset else index, i.table).to(self.program.dtype)
            x = x * i.scale if i.scale != 1 else x
        r[i.out] = r[i.out] + x if i.add else x

    def _normalize(
        self, i: p.Normalize, r: dict[int, Tensor], step: Step, cache: KVCache | None
    ) -> None:
        # In fp32, as models that were trained in 16 bits compute their norms.
        x = r[i.x].unflatten(1, (i.groups, -1)).float()
        weight, bias = (None if w is None else w.float() for w in (i.weight, i.bias))
        if i.norm is p.Norm.LAYER:
            y = F.layer_norm(x, x.shape[-1:], weight, bias, i.eps)
        else:
            y = F.rms_norm(x, x.shape[-1:], None, i.eps)
            y = y if weight is None else y * weight
            y = y if bias is None else y + bias
        r[i.out] = y.flatten(1).to(self.program.dtype)

    def _product(self, x: Tensor, weight: p.Weight, bias: Tensor | None) -> Tensor:
        whole = (
            self._widened(weight, x.dtype) if isinstance(weight, Quantized) else weight.to(x.dtype)
        )
        return F.linear(x, whole, None if bias is None else bias.to(x.dtype))

    def _linear(self, i: p.Linear, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        y = ACTIVATIONS[i.activation](self._product(r[i.x], i.weight, i.bias))
        r[i.out] = y if i.add is None else y + r[i.add]

    def _gated(self, i: p.Gated, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        gate = ACTIVATIONS[i.activation](self._product(r[i.x], i.gate, i.gate_bias))
        r[i.out] = gate * self._product(r[i.x], i.up, i.up_bias)

    def _rotate(self, i: p.Rotate, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        x = r[i.x].unflatten(1, (-1, i.head_dim)).float()
        # Some models rotate only a part of each head.
        dims = 2 * i.cos.shape[1]
        cos, sin = (t[step.positions].unsqueeze(1) for t in (i.cos, i.sin))
        turned = x[..., :dims]
        rest = x[..., dims:]
        if i.rotary is p.Rotary.HALF:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a = turned[..., ::2]
            b = turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        r[i.x] = torch.cat([turned, rest], -1).flatten(1).to(self.program.dtype)

    def _attend(self, i: p.Attend, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        q, k, v = (r[x].unflatten(1, (-1, i.head_dim)) for x in (i.q, i.k, i.v))
        starts = step.starts.tolist()
        lengths = step.lengths.tolist()
        out = torch.empty_like(q)
        for n, length in enumerate(lengths):
            rows = slice(starts[n], starts[n + 1])
            keys = k[rows]
            values = v[rows]
            # The cache has what the sequence had before this step.
            if i.layer is not None and cache is not None:
                assert step.blocks is not None
                keys, values = _through_cache(cache, i.layer, step.blocks[n], length, keys, values)
            out[rows] = _attention(i, q[rows], keys, values)
        r[i.out] = out.flatten(1)

    def _experts(
        self, i: p.Experts, r: dict[int, Tensor], step: Step, cache: KVCache | None
    ) -> None:
        x = r[i.x]
        # Routing in fp32: the order of near probabilities decides which experts run.
        chances = torch.softmax(F.linear(x, i.router.to(x.dtype)).float(), -1)
        shares, chosen = chances.topk(i.top_k, -1)
        if i.normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        # Summed in fp32 and rounded once, whatever the number of experts.
        out = torch.zeros_like(x, dtype=torch.float32)
        for e, (gate, up, down) in enumerate(zip(i.gates, i.ups, i.downs, strict=True)):
            # Each expert runs once, for all rows that chose it.
            rows, place = (chosen == e + i.first).nonzero(as_tuple=True)
            if rows.numel():
                mine = x[rows]
                inner = ACTIVATIONS[i.activation](self._product(mine, gate, None)) * self._product(
                    mine, up, None
                )
                out.index_add_(
                    0, rows, self._product(inner, down, None).float() * shares[rows, place, None]
                )
        r[i.out] = out.to(x.dtype)

    def _add(self, i: p.Add, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        total = r[i.x] + r[i.y]
        r[i.out] = total if i.bias is None else total + i.bias.to(total.dtype)

    def _columns(
        self, i: p.Columns, r: dict[int, Tensor], step: Step, cache: KVCache | None
    ) -> None:
        r[i.out] = r[i.x].unflatten(1, (i.groups, -1))[..., i.first : i.first + i.width].flatten(1)

    def _reduce(self, i: p.Reduce, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        assert self._collectives is not None
        r[i.x] = r[i.x].contiguous()
        self._collectives.reduce(r[i.x])

    def _gather(self, i: p.Gather, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        assert self._collectives is not None
        r[i.out] = self._collectives.gather(r[i.x].contiguous())

    def _keep(self, i: p.Keep, r: dict[int, Tensor], step: Step, cache: KVCache | None) -> None:
        r[i.out] = r[i.x] if step.wanted is None else r[i.x][step.wanted]


def _through_cache(
    cache: KVCache,
    layer: int,
    blocks: Int[Tensor, " most"],
    length: int,
    k: Float[Tensor, "rows heads dim"],
    v: Float[Tensor, "rows heads dim"],
) -> tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "tokens heads dim"]]:
    """Write k and v behind what the sequence has in the cache; all its keys and values.

    blocks: of the sequence.
    length: its tokens, those of `k` included.
    """
    # The new rows are the last of the sequence.
    at = torch.arange(length - k.shape[0], length, device=k.device)
    block = blocks[at // BLOCK]
    place = at % BLOCK
    found = []
    for arena, new in ((cache.keys[layer], k), (cache.values[layer], v)):
        arena[block, :, place] = new.to(arena.dtype)
        # Nothing was cached before, so the new rows are all there is.
        if k.shape[0] == length:
            found.append(new)
        else:
            used = arena[blocks[: (length + BLOCK - 1) // BLOCK]]  # [blocks, heads, BLOCK, dim]
            found.append(used.transpose(1, 2).flatten(0, 1)[:length].to(new.dtype))
    return found[0], found[1]


def _attention(
    i: p.Attend,
    q: Float[Tensor, "rows heads dim"],
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
) -> Float[Tensor, "rows heads dim"]:
    """Attention of queries at the last positions of `k`."""
    rows = q.shape[0]
    length = k.shape[0]
    # The key head of each query head (grouped-query attention).
    per_head = torch.tensor(
        i.groups or [h * i.kv_heads // i.heads for h in range(i.heads)], device=q.device
    )
    q = q.transpose(0, 1)
    k = k.transpose(0, 1)[per_head]
    v = v.transpose(0, 1)[per_head]
    # Without slopes and window torch's own causal mask serves, where queries are all or the last
    # one.
    plain = i.slopes is None and i.window is None
    if plain and (not i.causal or rows == 1 or rows == length):
        mask = None
        causal = i.causal and rows > 1
    else:
        mask = _mask(i, rows, length, q)
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=i.scale
    ).transpose(0, 1)


def _mask(
    i: p.Attend, rows: int, length: int, like: Tensor
) -> Float[Tensor, "heads_or_one rows tokens"]:
    """What is added to the scores, on the device of `like` and in its dtype."""
    query = torch.arange(length - rows, length, device=like.device)[:, None]
    key = torch.arange(length, device=like.device)[None]
    mask = torch.zeros(1, rows, length, dtype=torch.float32, device=like.device)
    if i.slopes is not None:
        mask = i.slopes[:, None, None] * (key - query).float()
    if i.causal:
        mask = mask.masked_fill(key > query, -torch.inf)
    if i.window is not None:
        mask = mask.masked_fill(key <= query - i.window, -torch.inf)
    return mask.to(like.dtype)
