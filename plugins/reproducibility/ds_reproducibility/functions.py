"""torch's random functions with the numbers of a `Source`: their results for given keys and indices.

Each has the arguments of the function that it stands for.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_core.errors import UsageError
from ds_reproducibility import counter
from ds_reproducibility.counter import Grid, Key


class Source(Protocol):
    """Who knows the keys and the elements."""

    def draw(
        self, shape: Any, device: torch.device, target: Tensor | None = None
    ) -> tuple[Key, Grid]:
        """For numbers of that shape.

        target: the tensor that is filled with them, if there is one.
        """


def dropout(
    source: Source, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`torch.nn.functional.dropout`."""
    return _drop(source, input, p, inplace, input.shape) if training else input


def dropout1d(
    source: Source, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`torch.nn.functional.dropout1d`: whole channels, of [samples, channels, length]."""
    return _drop_channels(source, input, p, training, inplace, 3)


def dropout2d(
    source: Source, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`torch.nn.functional.dropout2d`: whole channels, of [samples, channels, height, width]."""
    return _drop_channels(source, input, p, training, inplace, 4)


def dropout3d(
    source: Source, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`torch.nn.functional.dropout3d`: whole channels, of [samples, channels, depth, height, width]."""
    return _drop_channels(source, input, p, training, inplace, 5)


def _drop_channels(
    source: Source, x: Tensor, p: float, training: bool, inplace: bool, dims: int
) -> Tensor:
    if x.dim() != dims:
        raise UsageError(
            f"reproducibility: dropout of whole channels is offered for {dims} dimensions, samples "
            f"first; the input has {x.dim()}"
        )
    shape = (*x.shape[:2], *[1] * (dims - 2))
    return _drop(source, x, p, inplace, shape) if training else x


def _drop(source: Source, x: Tensor, p: float, inplace: bool, shape: Any) -> Tensor:
    """x with the elements of a mask of that shape set to 0, and divided by 1 - p."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0:
        return x
    dropped = counter.below(*source.draw(shape, x.device), p)
    kept = x.masked_fill_(dropped, 0.0) if inplace else x.masked_fill(dropped, 0.0)
    return kept if p == 1 else kept.mul_(1 / (1 - p))


def attention(
    source: Source,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, as its documentation writes it.

    query, key, value: [..., heads, positions, size].
    """
    if dropout_p == 0:
        return functional.scaled_dot_product_attention(
            *(query, key, value, attn_mask), is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1)
    scores = scores * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = _drop(source, scores.softmax(-1), dropout_p, False, scores.shape)
    return weights @ value


def alpha_dropout(
    source: Source, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """`torch.nn.functional.alpha_dropout` and `feature_alpha_dropout`, which draw nothing here."""
    if training and p > 0:
        raise UsageError(
            "reproducibility: alpha dropout is not offered; use nn.Dropout, or set "
            "reproducibility.dropout to false"
        )
    return input


# -- numbers ---------------------------------------------------------------------------------------


def _made(args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Tensor, bool]:
    """What `torch.rand` and the like shall fill, and whether it shall require grad."""
    given = dict(options)
    grad = given.pop("requires_grad", False)
    size = given.pop("size", args[0] if len(args) == 1 else args)
    return torch.empty(size, **given), grad


def rand(source: Source, *size: Any, **options: Any) -> Tensor:
    """`torch.rand`."""
    made, grad = _made(size, options)
    return uniform_(source, made).requires_grad_(grad)


def randn(source: Source, *size: Any, **options: Any) -> Tensor:
    """`torch.randn`."""
    made, grad = _made(size, options)
    return normal_(source, made).requires_grad_(grad)


def rand_like(source: Source, input: Tensor, **options: Any) -> Tensor:
    """`torch.rand_like`."""
    return uniform_(source, torch.empty_like(input, **options))


def randn_like(source: Source, input: Tensor, **options: Any) -> Tensor:
    """`torch.randn_like`."""
    return normal_(source, torch.empty_like(input, **options))


def bernoulli(source: Source, input: Tensor) -> Tensor:
    """`torch.bernoulli`: `input` holds the probabilities."""
    key, grid = source.draw(input.shape, input.device)
    return (counter.uniform(key, grid) < input).to(input.dtype)


def bernoulli_(source: Source, self: Tensor, p: Any = 0.5) -> Tensor:
    """`Tensor.bernoulli_`; p: a number, or a tensor of probabilities."""
    key, grid = source.draw(self.shape, self.device, self)
    one = counter.uniform(key, grid) < p if isinstance(p, Tensor) else counter.below(key, grid, p)
    return self.copy_(one)


def uniform_(
    source: Source, self: Tensor, from_: float = 0.0, to: float = 1.0, **old: Any
) -> Tensor:
    """`Tensor.uniform_`, whose second argument is called ``from``."""
    low = old.get("from", from_)
    key, grid = source.draw(self.shape, self.device, self)
    return self.copy_(counter.uniform(key, grid, self.dtype).mul_(to - low).add_(low))


def normal_(source: Source, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """`Tensor.normal_`."""
    key, grid = source.draw(self.shape, self.device, self)
    return self.copy_(counter.normal(key, grid, self.dtype).mul_(std).add_(mean))


def exponential_(source: Source, self: Tensor, lambd: float = 1.0) -> Tensor:
    """`Tensor.exponential_`."""
    key, grid = source.draw(self.shape, self.device, self)
    # 1 - u is never 0.
    rest = counter.uniform(key, grid, self.dtype).neg_().add_(1)
    return self.copy_(rest.log_().div_(-lambd))


def init_uniform_(source: Source, tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """`torch.nn.init.uniform_`."""
    with torch.no_grad():
        return uniform_(source, tensor, a, b)


def init_normal_(source: Source, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """`torch.nn.init.normal_`."""
    with torch.no_grad():
        return normal_(source, tensor, mean, std)


def init_kaiming_uniform_(
    source: Source,
    tensor: Tensor,
    a: float = 0,
    mode: Literal["fan_in", "fan_out"] = "fan_in",
    nonlinearity: Any = "leaky_relu",
) -> Tensor:
    """`torch.nn.init.kaiming_uniform_` (He et al. 2015): bound = gain sqrt(3 / fan)."""
    if tensor.numel() == 0:
        return tensor
    inputs, outputs = nn.init._calculate_fan_in_and_fan_out(tensor)
    gain = nn.init.calculate_gain(nonlinearity, a)
    bound = gain * math.sqrt(3 / (inputs if mode == "fan_in" else outputs))
    return init_uniform_(source, tensor, -bound, bound)


FUNCTIONS: Mapping[Any, Callable[..., Tensor]] = {
    functional.dropout: dropout,
    functional.dropout1d: dropout1d,
    functional.dropout2d: dropout2d,
    functional.dropout3d: dropout3d,
    functional.alpha_dropout: alpha_dropout,
    functional.feature_alpha_dropout: alpha_dropout,
    functional.scaled_dot_product_attention: attention,
    torch.rand: rand,
    torch.randn: randn,
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
    Tensor.bernoulli_: bernoulli_,
    Tensor.uniform_: uniform_,
    Tensor.normal_: normal_,
    Tensor.exponential_: exponential_,
    nn.init.uniform_: init_uniform_,
    nn.init.normal_: init_normal_,
    nn.init.kaiming_uniform_: init_kaiming_uniform_,
}
"""torch's function -> the one with a source in front."""

OTHERS = frozenset(
    (
        *(torch.multinomial, torch.normal, torch.poisson, torch.binomial, torch.randint),
        *(torch.randint_like, torch.randperm, torch.rrelu, torch.rrelu_, functional.rrelu),
        *(Tensor.multinomial, Tensor.random_, Tensor.cauchy_, Tensor.geometric_),
        Tensor.log_normal_,
    )
)
"""Random functions that are left to torch."""

COMPOSED = frozenset((functional.multi_head_attention_forward, functional.gumbel_softmax))
"""Functions in Python that call those above, but are overridden as a whole by default."""


KNOWN = frozenset((*FUNCTIONS, *OTHERS, *COMPOSED))
"""All of them."""


@functools.cache
def unchecked(function: Any) -> Any:
    """`function` without the check whether it is overridden, so that what it calls may be."""
    checks = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    found = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(checks, _never)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _never(*_: Any) -> bool:
    return False
