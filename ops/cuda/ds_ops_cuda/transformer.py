"""`DeepSpeedTransformerLayer`: an encoder layer of fused operations, with the documented options.

    h = norm(x) if pre_layer_norm else x
    r = x + dropout(dropout(softmax(q k' / sqrt(d) + mask)) v Wo' + bias)    q, k, v from h
    f = attn_norm(r)
    y = (r if pre_layer_norm else f) + dropout(gelu(f W1' + b1) W2' + b2)
    out = y if pre_layer_norm else norm(y)

Post-LN is BERT's form. GELU is the tanh form. On the CPU, and wherever no kernel serves, the same
in plain torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core.errors import UsageError, nearest
from ds_ops_cuda import fused
from ds_ops_cuda.references import draw_seed


@dataclass
class DeepSpeedTransformerConfig:
    """The settings of a layer; -1 means that it is not given. The layer checks them."""

    # The largest batch that `forward` accepts.
    batch_size: int = -1
    # Required.
    hidden_size: int = -1
    # By default four times hidden_size.
    intermediate_size: int = -1
    heads: int = -1
    # Dropout of the attention's probabilities; not given: 0.
    attn_dropout_ratio: float = -1
    # Dropout of the two outputs that are added to the residual; not given: 0.
    hidden_dropout_ratio: float = -1
    # The number of the model's layers, for adjust_init_range.
    num_hidden_layers: int = -1
    # The weights' standard deviation.
    initializer_range: float = -1
    # The CUDA device that parameters are made on.
    local_rank: int = -1
    # Makes dropout differ from that of another seed under one `torch.manual_seed`.
    seed: int = -1
    # Work in fp16, whatever the parameters and inputs are.
    fp16: bool = False
    # Norms before attention and MLP, not after them.
    pre_layer_norm: bool = True
    # Layer norms keep their output and not their input.
    normalize_invertible: bool = False
    # GELU's output is recomputed in the backward pass.
    gelu_checkpoint: bool = False
    # Weights of the two outputs start smaller, by sqrt(2 num_hidden_layers).
    adjust_init_range: bool = True
    # The attention's dropout is recomputed in the backward pass.
    attn_dropout_checkpoint: bool = False
    # Sums of bias and norm gradients in any order: faster on a GPU, and not the same bits in every
    # run.
    stochastic_mode: bool = False
    # `forward` returns a tuple, as with return_tuple.
    huggingface: bool = False
    # How the layer starts.
    training: bool = True
    layer_norm_eps: float = 1e-12
    return_tuple: bool = False
    # The number of the layer in this process.
    layer_id: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0 < self.hidden_size:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """A config of `values`; UsageError for a key that there is not."""
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        for key in values:
            if key not in known:
                hint = nearest(key, known)
                raise UsageError(
                    f"DeepSpeedTransformerConfig has no {key!r}; "
                    + (f"did you mean {hint!r}?" if hint else f"known: {', '.join(sorted(known))}")
                )
        return cls(**values)

    @classmethod
    def from_json_file(cls, path: str | Path) -> DeepSpeedTransformerConfig:
        """A config of the object in the JSON file `path`."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise UsageError(
                f"{path}: an object of settings is needed, this is a {type(values).__name__}"
            )
        return cls.from_dict(values)

    def check(self, *, draws_weights: bool) -> None:
        """UsageError for settings that no layer can have.

        draws_weights: whether initial weights are to be drawn.
        """
        where = "DeepSpeedTransformerConfig"
        for name in ("hidden_size", "heads", "intermediate_size"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{where}.{name} is {getattr(self, name)}; give a number above 0")
        if self.hidden_size % self.heads:
            raise UsageError(
                f"{where}.hidden_size {self.hidden_size} is no multiple of heads {self.heads}"
            )
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if getattr(self, name) >= 1:
                raise UsageError(f"{where}.{name} is {getattr(self, name)}; it must be below 1")
        if draws_weights and self.initializer_range < 0:
            raise UsageError(
                f"{where}.initializer_range is not given; give the weights' standard deviation, as "
                "0.02"
            )
        if draws_weights and self.adjust_init_range and self.num_hidden_layers <= 0:
            raise UsageError(
                f"{where}.num_hidden_layers is {self.num_hidden_layers}, and adjust_init_range "
                "needs it; give the "
                "number of layers, or set adjust_init_range to False"
            )


class DeepSpeedTransformerLayer(nn.Module):
    """A transformer encoder layer; see the module's text.

    initial_weights, initial_biases: eight tensors each, of query, key, value, attention output,
    attention norm, intermediate, output and norm, to start with instead of random ones.
    """

    layer_id = 0  # of the next layer of this process

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        config.check(draws_weights=initial_weights is None)
        self.config = dataclasses.replace(config)
        self.config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        h = config.hidden_size
        i = config.intermediate_size
        on_gpu = config.local_rank >= 0 and torch.cuda.is_available()
        device = torch.device("cuda", config.local_rank) if on_gpu else None

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, device=device))

        self.attn_qkvw = parameter(3 * h, h)
        self.attn_qkvb = parameter(3 * h)
        self.attn_ow = parameter(h, h)
        self.attn_ob = parameter(h)
        self.attn_nw = parameter(h)
        self.attn_nb = parameter(h)
        self.inter_w = parameter(i, h)
        self.inter_b = parameter(i)
        self.output_w = parameter(h, i)
        self.output_b = parameter(h)
        self.norm_w = parameter(h)
        self.norm_b = parameter(h)
        weights = [
            self.attn_qkvw,
            self.attn_ow,
            self.attn_nw,
            self.inter_w,
            self.output_w,
            self.norm_w,
        ]
        biases = [
            self.attn_qkvb,
            self.attn_ob,
            self.attn_nb,
            self.inter_b,
            self.output_b,
            self.norm_b,
        ]
        with torch.no_grad():
            if initial_weights is None:
                self._draw_weights()
            else:
                _fill("initial_weights", weights, initial_weights)
            if initial_biases is not None:
                _fill("initial_biases", biases, initial_biases)
        self.train(config.training)

    def _draw_weights(self) -> None:
        """Normal ones, norms one, biases zero."""
        std = self.config.initializer_range
        output_std = (
            std / math.sqrt(2 * self.config.num_hidden_layers)
            if self.config.adjust_init_range
            else std
        )
        for weight in (self.attn_qkvw, self.inter_w):
            weight.normal_(0.0, std)
        for weight in (self.attn_ow, self.output_w):
            weight.normal_(0.0, output_std)
        for weight in (self.attn_nw, self.norm_w):
            weight.fill_(1.0)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: None = None,
        layer_head_mask: None = None,
        encoder_hidden_states: None = None,
        encoder_attention_mask: None = None,
        past_key_value: None = None,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor]:
        """The layer's output, of the shape of `hidden_states`: [batch, sequence, hidden].

        attention_mask: added to the attention scores; of floats, it broadcasts to [batch, heads,
        sequence, sequence]. The other arguments are those that Hugging Face's encoders pass; they
        must stay None.
        """
        others = {
            "head_mask": head_mask,
            "layer_head_mask": layer_head_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_value": past_key_value,
        }
        given = [name for name, value in others.items() if value is not None]
        if given or output_attentions:
            names = ", ".join(given + ["output_attentions"] * output_attentions)
            raise UsageError(f"DeepSpeedTransformerLayer does not have {names}; leave it away")
        self._check_input(hidden_states)
        dtype = self._dtype(hidden_states)
        # The layer casts by itself, so autocast must not do so inside.
        with torch.autocast(hidden_states.device.type, enabled=False):
            out = self._layer(hidden_states.to(dtype), attention_mask, dtype)
        return (out,) if self.config.return_tuple or self.config.huggingface else out

    def _check_input(self, x: Tensor) -> None:
        c = self.config
        if x.dim() != 3 or x.shape[-1] != c.hidden_size:
            raise UsageError(
                f"hidden_states are {list(x.shape)}; [batch, sequence, {c.hidden_size}] is needed"
            )
        if 0 < c.batch_size < x.shape[0]:
            raise UsageError(
                f"a batch of {x.shape[0]} is larger than DeepSpeedTransformerConfig.batch_size "
                f"{c.batch_size}; "
                "raise batch_size, or leave it at -1"
            )

    def _dtype(self, x: Tensor) -> torch.dtype:
        """What the layer works in: fp16 by config, else autocast's type, else that of the
        weights."""
        if self.config.fp16:
            return torch.float16
        kind = x.device.type
        return (
            torch.get_autocast_dtype(kind)
            if torch.is_autocast_enabled(kind)
            else self.attn_qkvw.dtype
        )

    def _layer(self, x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        c = self.config
        h = self._norm(x, self.norm_w, self.norm_b, dtype) if c.pre_layer_norm else x
        projected = F.linear(self._attend(h, mask, dtype), self.attn_ow.to(dtype))
        # Sites number the dropouts of a layer, so that each has a seed of its own.
        r = self._add(projected, self.attn_ob, x, dtype, site=1)
        f = self._norm(r, self.attn_nw, self.attn_nb, dtype)
        inter = F.linear(f, self.inter_w.to(dtype))
        output = fused.gelu_linear(
            inter,
            self.inter_b.to(dtype),
            self.output_w.to(dtype),
            recompute=c.gelu_checkpoint,
            deterministic=not c.stochastic_mode,
        )
        y = self._add(output, self.output_b, r if c.pre_layer_norm else f, dtype, site=2)
        return y if c.pre_layer_norm else self._norm(y, self.norm_w, self.norm_b, dtype)

    def _attend(self, h: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[batch, sequence, hidden]: what the heads found, side by side."""
        c = self.config
        batch, length, hidden = h.shape
        size = hidden // c.heads
        qkv = F.linear(h, self.attn_qkvw.to(dtype), self.attn_qkvb.to(dtype))
        query, key, value = (
            qkv.view(batch, length, 3, c.heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        )
        # Scaled before the product: in fp16 the scores could overflow before a later scaling.
        scores = (query * (1 / math.sqrt(size))) @ key.transpose(-1, -2)
        p, seed = self._dropout(c.attn_dropout_ratio, site=0)
        found = fused.attention(
            scores, mask, value, p=p, seed=seed, recompute=c.attn_dropout_checkpoint
        )
        return found.transpose(1, 2).reshape(batch, length, hidden)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        c = self.config
        return fused.layer_norm(
            x,
            weight.to(dtype),
            bias.to(dtype),
            eps=c.layer_norm_eps,
            invertible=c.normalize_invertible,
            deterministic=not c.stochastic_mode,
        )

    def _add(
        self, x: Tensor, bias: Tensor, residual: Tensor, dtype: torch.dtype, *, site: int
    ) -> Tensor:
        p, seed = self._dropout(self.config.hidden_dropout_ratio, site)
        return fused.bias_dropout_add(
            x,
            bias.to(dtype),
            residual,
            p=p,
            seed=seed,
            deterministic=not self.config.stochastic_mode,
        )

    def _dropout(self, ratio: float, site: int) -> tuple[float, int]:
        """The ratio that is in force, and a seed for this place of the layer."""
        if not self.training or ratio <= 0:
            return 0.0, 0
        return ratio, draw_seed(3 * (self.config.seed + 1) + site)

    def extra_repr(self) -> str:
        """The layer's sizes and form."""
        c = self.config
        form = "pre" if c.pre_layer_norm else "post"
        return (
            f"hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}, "
            f"heads={c.heads}, {form}-LN"
        )


def _fill(name: str, parameters: Sequence[nn.Parameter], given: Sequence[Tensor]) -> None:
    """Copy eight tensors into six parameters: the first takes query, key and value."""
    if len(given) != 8:
        raise UsageError(f"{name} has {len(given)} tensors; 8 are needed")
    joined = [torch.cat([t.detach() for t in given[:3]]), *(t.detach() for t in given[3:])]
    for parameter, tensor in zip(parameters, joined, strict=True):
        if parameter.shape != tensor.shape:
            raise UsageError(
                f"{name}: a tensor is {list(tensor.shape)}, {list(parameter.shape)} is needed"
            )
        parameter.copy_(tensor)
