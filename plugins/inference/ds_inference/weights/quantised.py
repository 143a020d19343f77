"""Linear layers whose weights are 8 or 4 bits, and the change of a model's layers into them, one at
a time.

[Note: what is quantised] The linear layers of the repeated blocks: there is most of the memory that
a token reads. Not embeddings, of which a token reads one line, nor poolers and classifiers, which
are small and make the answer. The output head of a language model is large and read whole for every
token: it is quantised in 8 bits, also where other layers have 4 (in 4 bits it adds 12 % to the
perplexity of SmolLM2-135M, in 8 nothing). Where it is tied to the embedding it becomes a quantised
copy and the embedding stays: more memory (a quarter of the embedding in fp32, half in 16 bits), but
less of it is read.
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from ds_inference_kit.weights import Quantized, dequantize, quantize
from ds_kernel_kit import references
from ds_run_state.divided import DIVIDED, divided
from ds_run_state.lazy import lazy_weight
from torch import Tensor, nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)

_SKIPPED = "named in skip"


class QuantizedLinear(nn.Module):
    """``F.linear`` with a `Quantized` weight, whose parts are buffers: `q`, `scales` and `lows`.

    The bias, a parameter, is that of the layer before. A program reads the same buffers
    (`quantized`).
    """

    q: Tensor
    scales: Tensor
    lows: Tensor | None

    def __init__(self, weight: Quantized, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bits = weight.bits
        self.group = weight.group
        self.out_features, self.in_features = weight.shape
        self.register_buffer("q", weight.q)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("lows", weight.lows)
        self.bias = bias

    def quantized(self) -> Quantized:
        """The weight, of the buffers themselves."""
        return Quantized(self.q, self.scales, self.lows, self.bits, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight as it is in the dtype of `x`."""
        if divided(self) is not None:
            raise RuntimeError(
                "a quantised layer that ranks divide is computed by an inference program only"
            )
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, dequantize(self.quantized(), x.dtype), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves to another device; a change of dtype (``model.half()``) leaves scales and lows in
        fp16.
        """
        # torch converts every floating-point buffer: scales are put back as they were.
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """See the base class."""
        kind = "symmetric" if self.lows is None else "with lows"
        return (
            f"{self.in_features}, {self.out_features}, {self.bits} bits, groups of "
            f"{self.group}, "
            f"{kind}"
        )


class QuantizedExperts(nn.Module):
    """The experts of a mixture of transformers (`gate_up_proj`, `down_proj`), one below the other
    in two layers.
    """

    def __init__(
        self, experts: int, gate_up: QuantizedLinear, down: QuantizedLinear, act_fn: nn.Module
    ) -> None:
        super().__init__()
        self.experts = experts
        self.gate_up = gate_up
        self.down = down
        self.act_fn = act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of the experts `top_k_index` [rows, k] of each row, with these weights."""
        if divided(self) is not None:
            raise RuntimeError(
                "quantised experts that ranks divide are computed by an inference program only"
            )
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, place = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = F.linear(
                hidden_states[rows], self._weight(self.gate_up, expert, out.dtype)
            ).chunk(2, -1)
            inner = F.linear(self.act_fn(gate) * up, self._weight(self.down, expert, out.dtype))
            out.index_add_(0, rows, (inner * top_k_weights[rows, place, None]).to(out.dtype))
        return out

    def _weight(self, layer: QuantizedLinear, expert: int, dtype: torch.dtype) -> Tensor:
        whole = layer.quantized()
        parts = [
            None if x is None else x.chunk(self.experts)[expert]
            for x in (whole.q, whole.scales, whole.lows)
        ]
        assert parts[0] is not None and parts[1] is not None
        return dequantize(Quantized(parts[0], parts[1], parts[2], whole.bits, whole.group), dtype)


@dataclass
class Report:
    """What was quantised."""

    # How many.
    layers: int = 0
    # Bytes of their weights; after: likewise.
    before: int = 0
    after: int = 0
    # Names of layers that stay as they are, and why.
    left: dict[str, str] = field(default_factory=dict)


def quantise_model(
    model: nn.Module,
    *,
    bits: int,
    group: int = 32,
    symmetric: bool | None = None,
    skip: Iterable[str] = (),
    head_bits: int | None = 8,
    kernel: Callable[..., Any] = references.quantize,
) -> Report:
    """Replace linear layers of `model` by `QuantizedLinear`, each freed before the next; says so in
    the log.

    [Note: what is quantised].

    group: columns to a scale.
    symmetric: no lows; None: in 8 bits, which need none.
    skip: names of modules, with wildcards.
    head_bits: of the output head; None: it stays.
    kernel: a provider of ``quantize``.
    """
    if bits not in (4, 8):
        raise ValueError(f"weights are quantised in 8 or 4 bits, not {bits}")
    report = Report()
    patterns = tuple(skip)
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    names = [name for name, module in model.named_modules() if _serves(module)]
    repeated = any(_in_block(name) for name in names)
    for name in names:
        module: Any = model.get_submodule(name)
        # See [Note: what is quantised].
        mine = head_bits if module is head else bits
        if mine is None or (repeated and module is not head and not _in_block(name)):
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            report.left[name] = _SKIPPED
            continue
        try:
            made = _quantise(
                module, mine, group, mine == 8 if symmetric is None else symmetric, kernel
            )
        except ValueError as why:
            report.left[name] = str(why)
            continue
        report.layers = report.layers + 1
        report.before = report.before + _nbytes(module)
        report.after += _nbytes(made)
        # The old layer is freed before the next one is quantised.
        _replace(model, name, made)
    _say(report, bits)
    return report


def _quantise(
    module: Any, bits: int, group: int, symmetric: bool, kernel: Callable[..., Any]
) -> nn.Module:
    def layer(weight: Tensor, bias: nn.Parameter | None = None) -> QuantizedLinear:
        if weight.is_meta:
            raise ValueError("its weight is on the meta device")
        return QuantizedLinear(
            quantize(weight, bits=bits, group=group, symmetric=symmetric, kernel=kernel), bias
        )

    for param in module.parameters(recurse=False):
        if param is not getattr(module, "bias", None) and (lazy := lazy_weight(param)) is not None:
            param.data = lazy.take(param)  # made under ds_zero.Init
    made: nn.Module
    cut = divided(module)
    if _is_experts(module):
        up = module.gate_up_proj.detach()
        down = module.down_proj.detach()
        made = QuantizedExperts(
            up.shape[0], layer(up.flatten(0, 1)), layer(down.flatten(0, 1)), module.act_fn
        )
    elif type(module) is not nn.Linear and cut is None and not hasattr(module, "nf"):
        raise ValueError(f"{type(module).__name__} is not nn.Linear")
    elif cut is not None and cut.whole_weight:
        raise ValueError("ranks use rows of a full weight")
    else:
        made = layer(
            module.weight.detach().t() if hasattr(module, "nf") else module.weight, module.bias
        )
    if cut is not None:
        # How ranks divide the layer stays known to who lowers or saves it.
        setattr(made, DIVIDED, cut)
    return made.train(module.training)


def _serves(module: nn.Module) -> bool:
    """A linear layer, Conv1D of transformers, or the experts of a mixture."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or _is_experts(module)


def _is_experts(module: nn.Module) -> bool:
    found = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return type(module).__name__ == "MixtralExperts" and all(
        isinstance(x, Tensor) and x.dim() == 3 for x in found
    )


def _nbytes(module: nn.Module) -> int:
    """Of the weights of a layer, without its bias."""
    every = itertools.chain(module.named_parameters(), module.named_buffers())
    return sum(tensor.nbytes for name, tensor in every if name != "bias")


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _replace(model: nn.Module, name: str, made: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, made)


def _say(report: Report, bits: int) -> None:
    mib = 2**20
    logger.info(
        "%d linear layers in %d bits: %.1f MiB were %.1f MiB",
        report.layers,
        bits,
        report.after / mib,
        report.before / mib,
    )
    if unable := [(name, why) for name, why in report.left.items() if why != _SKIPPED]:
        name, why = unable[0]
        logger.warning("%d linear layers were not quantised; %s: %s", len(unable), name, why)
