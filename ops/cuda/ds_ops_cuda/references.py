"""What the fused operations mean, in plain torch with torch's own gradients; and dropout's random
bits.

As in the core, 16-bit tensors are widened to fp32, worked on there and rounded once.

[Note: dropout by counter] Whether an element stays is decided by 32 bits of Philox4x32 (10 rounds;
Salmon et al. 2011) at counter (column / 4, row, 0), word column % 4, under the key `seed`. Every
provider draws these very bits, on every device, in the forward and again in the backward pass, so
no mask is stored and providers can be compared exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_WORD = 0xFFFFFFFF
_SEEDS = 2**62


def wide(x: Tensor) -> Tensor:
    """`x` in the type that is computed in: fp64 stays, all else is fp32."""
    return x if x.dtype == torch.float64 else x.float()


def bias_gelu(
    x: Tensor, bias: Tensor, *, approximate: str = "tanh", deterministic: bool = True
) -> Tensor:
    """GELU of ``x + bias``.

    x: [..., cols].
    bias: [cols].
    approximate: as in `torch.nn.functional.gelu`.
    """
    del deterministic  # gradients are always the same bits here
    return F.gelu(wide(x) + wide(bias), approximate=approximate).to(x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    invertible: bool = False,
    deterministic: bool = True,
) -> Tensor:
    """Layer norm over the last dim.

    x: [..., cols]; weight, bias: [cols]; invertible only changes what is kept.
    """
    del invertible, deterministic
    return F.layer_norm(wide(x), x.shape[-1:], wide(weight), wide(bias), eps).to(x.dtype)


def softmax_dropout(
    x: Tensor, mask: Tensor | None = None, *, p: float = 0.0, seed: int = 0
) -> Tensor:
    """Dropout of the softmax of ``x + mask`` over the last dim.

    mask: broadcasts to the 4-d x; not differentiated.
    """
    scores = wide(x) if mask is None else wide(x) + wide(mask.detach())
    return dropout(F.softmax(scores, -1).to(x.dtype), p, seed)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    *,
    p: float = 0.0,
    seed: int = 0,
    deterministic: bool = True,
) -> Tensor:
    """``residual + dropout(x + bias)``.

    x, residual: [..., cols], of one type; bias: [cols].
    """
    del deterministic
    return (dropout(wide(x) + wide(bias), p, seed) + wide(residual)).to(x.dtype)


# -- dropout ---------------------------------------------------------------------------------------


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """`x` with a share `p` of its elements zero, the others over ``1 - p``; which ones, `seed`
    decides.
    """
    if threshold(p) == 0:
        return x
    # As rows of the last dimension, as kernels see it: the counter is (column, row).
    kept = keep_mask(x.numel() // x.shape[-1] if x.numel() else 0, x.shape[-1], p, seed, x.device)
    return (wide(x) * keep_scale(p)).masked_fill(~kept.view(x.shape), 0.0).to(x.dtype)


def threshold(p: float) -> int:
    """Of 32 random bits, those below it drop their element. ValueError unless ``0 <= p < 1``."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout ratio {p}: it must be at least 0 and below 1")
    return min(round(p * 2**32), _WORD)


def keep_scale(p: float) -> float:
    """What kept elements are multiplied by, rounded as a kernel's argument is."""
    return float(torch.tensor(1 / (1 - p), dtype=torch.float32))


def keep_mask(
    rows: int, cols: int, p: float, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """[rows, cols] bool: which elements stay."""
    row = torch.arange(rows, device=device)[:, None]
    col = torch.arange((cols + 3) // 4, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox((col, row & _WORD, row >> 32, zero), (seed & _WORD, seed >> 32 & _WORD))
    bits = torch.stack([w.expand(rows, col.numel()) for w in words], -1).view(rows, -1)[:, :cols]
    return bits >= threshold(p)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words of 32 random bits for each counter, all in int64 tensors that
    broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # mod 2^64; a negative one's halves come out by masks
        first = c0 * 0xD2511F53
        second = c2 * 0xCD9E8D57
        # One round: high and low halves of the two products, mixed with the other words and the
        # key.
        c0 = (second >> 32 & _WORD) ^ c1 ^ k0
        c1 = second & _WORD
        c2 = (first >> 32 & _WORD) ^ c3 ^ k1
        c3 = first & _WORD
        # The key's schedule (Weyl sequence).
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def draw_seed(salt: int = 0) -> int:
    """A seed from torch's CPU generator, so that `torch.manual_seed` decides it, activation
    checkpoints draw it again, and no device is waited for.

    salt: seeds of different salts differ.
    """
    return int(torch.randint(_SEEDS, ()).item()) ^ (salt * 0x9E3779B97F4A7C15 % _SEEDS)
