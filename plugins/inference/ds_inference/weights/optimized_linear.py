"""Linear layers with a frozen base, in few bits or divided over ranks, that are trained by two
small matrices (LoRA).

[Note: the base] Backward needs the base again, for the gradient of the inputs. Kept for it, each
layer's whole weight would be in memory at once; so it is made again: numbers become weights again,
parts of other ranks are gathered again. A base that is divided, or kept on the host, is no
parameter and no buffer: every rank has another part, and what engines do with either (broadcast,
ZeRO's shards, moves to the device) would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from ds_inference_kit.weights import Quantized, dequantize, quantize
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core import comm

_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoRAConfig:
    """The two small matrices, and where the base is kept."""

    # Rows of the first matrix.
    lora_r: int = 64
    lora_alpha: float = 16.0
    # Ranks that the rows of the base are divided over: 1, or all.
    base_weight_sharding: int = 1
    # The base is kept on the host.
    offload: bool = False
    offload_ratio: float = 0.0
    # Wait for `init_lora`.
    delay_lora_init: bool = False
    # Which layers `Init` changes, by parts of their names.
    target_mods: list[str] = field(default_factory=lambda: list(_LLAMA))

    def __post_init__(self) -> None:
        if self.lora_r < 1:
            raise ValueError(f"lora_r {self.lora_r}: the matrices need at least one row")
        if self.offload and self.offload_ratio:
            raise ValueError(
                f"offload_ratio {self.offload_ratio}: a base is kept on the host as a whole; leave it at 0"
            )


@dataclass
class QuantizationConfig:
    """How the base is stored: whole numbers of 8 or 4 bits."""

    q_bits: int = 8
    # For DeepSpeed's floating-point formats, as q_dtype is: accepted, without effect.
    mantissa_bits: int = 3
    # Numbers of a row with a scale in common, at most.
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8

    def __post_init__(self) -> None:
        if self.q_bits not in (8, 4):
            raise ValueError(f"q_bits {self.q_bits}: the base is stored in 8 or 4 bits")

    def numbers(self, weight: Tensor) -> Quantized:
        """`weight` in few bits; a group divides a row."""
        group = math.gcd(self.group_size, weight.shape[1])
        return quantize(weight, bits=self.q_bits, group=group, symmetric=True)


def OptimizedLinear(
    input_dim: int,
    output_dim: int,
    bias: bool = False,
    lora_config: LoRAConfig | None = None,
    quantization_config: QuantizationConfig | None = None,
    device: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    linear_cls: Callable[..., nn.Module] = nn.Linear,
) -> nn.Module:
    """The layer that the two configs ask for: LoRA, numbers of few bits, or an ordinary
    `linear_cls`.
    """
    for name, given in (("LoRAConfig", lora_config), ("QuantizationConfig", quantization_config)):
        if given is not None and not is_dataclass(given):
            raise ValueError(f"expected a {name}, got {type(given).__name__}")
    if lora_config is not None:
        return LoRAOptimizedLinear(
            input_dim, output_dim, bias, lora_config, quantization_config, device, dtype
        )
    if quantization_config is not None:
        return QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype, device)
    return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)


class _Base(nn.Module):
    """A frozen weight: a parameter, buffers of numbers, or parts outside of both; see [Note: the
    base].
    """

    def __init__(
        self, weight: Tensor, quantization: QuantizationConfig | None, ranks: int, offload: bool
    ) -> None:
        super().__init__()
        if weight.dim() != 2 or not weight.numel():
            raise ValueError(
                "the weight of the base is not here: build or change the layer outside of zero.Init"
            )
        self.output_dim, self.input_dim = weight.shape
        self.dtype = weight.dtype
        self.quantization = quantization
        self.offload = offload
        self.ranks = ranks
        self.apart = ranks > 1 or offload
        if ranks > 1 and ranks != comm.world_size():
            raise ValueError(
                f"base_weight_sharding {ranks}: it is 1 or the number of ranks, {comm.world_size()}"
            )
        self._parts: dict[str, Tensor] = {}
        self._group = 0
        self._set(weight.detach())

    def _set(self, whole: Tensor) -> None:
        """Take a whole weight."""
        self._take(self._to_stored(whole))

    def _to_stored(self, whole: Tensor) -> dict[str, Tensor]:
        """A whole weight as it is stored: name -> tensor, whose rows are those of the weight."""
        if self.quantization is None:
            return {"weight": whole.to(self.dtype)}
        numbers = self.quantization.numbers(whole)
        self._group = numbers.group
        return {"q": numbers.q, "scales": numbers.scales}

    @torch.no_grad()
    def _take(self, stored: dict[str, Tensor]) -> None:
        """Keep what `_to_stored` gave, or this rank's rows of it."""
        for name, tensor in stored.items():
            if self.apart:
                self._parts[name] = self._own_rows(tensor)
            elif name == "weight":
                self.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor)

    def _own_rows(self, tensor: Tensor) -> Tensor:
        per_rank = -(-self.output_dim // self.ranks)
        rank = comm.rank() if self.ranks > 1 else 0
        # Rows are divided evenly; the last rank's may be fewer.
        own = tensor[rank * per_rank : (rank + 1) * per_rank]
        padded = tensor.new_zeros(per_rank, *tensor.shape[1:])  # every rank has as many
        padded[: len(own)] = own
        return padded.cpu() if self.offload else padded

    def _gather_stored(self, device: torch.device) -> dict[str, Tensor]:
        """What `_to_stored` gave, whole and on `device`. Collective where ranks have parts."""
        if not self.apart:
            names = ["weight"] if self.quantization is None else ["q", "scales"]
            return {name: getattr(self, name) for name in names}
        found = {}
        for name, part in self._parts.items():
            local = part.to(device)
            whole = local
            if self.ranks > 1:
                # Gathered for this one use, in forward and again in backward.
                whole = local.new_empty(self.ranks * len(local), *local.shape[1:])
                comm.all_gather_into_tensor(whole, local)
            found[name] = whole[: self.output_dim]
        return found

    @torch.no_grad()
    def whole(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The weight. Collective where ranks have parts."""
        stored = self._gather_stored(device)
        if self.quantization is None:
            return stored["weight"].to(dtype)
        bits = self.quantization.q_bits
        return dequantize(Quantized(stored["q"], stored["scales"], None, bits, self._group), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight."""
        if not self.apart and self.quantization is None:
            return F.linear(x, self.weight)
        return _by(_Product, x, self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Base:
        """Parts move along, but not from the host; a change of dtype leaves numbers and scales as
        they are.
        """
        # Numbers and scales keep their dtypes, as in `weights.quantised`.
        before = {name: b for name, b in self._buffers.items() if b is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        for name, part in self._parts.items():
            moved = fn(part)
            device = part.device if self.offload else moved.device
            self._parts[name] = (
                part.to(device) if self.quantization is not None else moved.to(device)
            )
        if self._parts and self.quantization is None:
            self.dtype = self._parts["weight"].dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Whole. Collective where ranks have parts."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.apart:
            device = next(iter(self._parts.values())).device
            destination.update(
                {prefix + name: t for name, t in self._gather_stored(device).items()}
            )

    def _load_from_state_dict(
        self, state: Any, prefix: str, meta: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        """Whole weights, or what is stored of them; this rank keeps its rows."""
        names = ["weight"] if self.quantization is None else ["q", "scales"]
        given = {name: state[prefix + name] for name in names if prefix + name in state}
        if prefix + "weight" in state:
            # A full weight, of a checkpoint of the plain model.
            self._set(state[prefix + "weight"].to(self._device()))
        elif len(given) == len(names):
            self._take({name: t.to(self._device()) for name, t in given.items()})
        else:
            missing += [prefix + name for name in names if name not in given]

    def _device(self) -> torch.device:
        tensors: Iterator[Tensor] = iter(
            [*self.parameters(), *self.buffers(), *self._parts.values()]
        )
        return next(tensors).device


def _by(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


class _Product(torch.autograd.Function):
    """``F.linear`` with a base, which is made again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: _Base) -> Tensor:
        ctx.base = base
        return F.linear(x, base.whole(x.device, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        return grad @ ctx.base.whole(grad.device, grad.dtype), None


class _OnBase(nn.Module):
    """A layer with a base; what an ordinary linear layer calls ``weight`` is loaded as that of the
    base.
    """

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "base.weight"] = state.pop(prefix + "weight")
        super()._load_from_state_dict(state, prefix, *rest)


class QuantizedLinear(_OnBase):
    """A linear layer whose frozen weight is stored in few bits."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
        source: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        source = source or nn.Linear(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
        self.base = _Base(source.weight, quantization_config or QuantizationConfig(), 1, False)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight that the numbers stand for."""
        out: Tensor = self.base(x)
        return out if self.bias is None else out + self.bias


class LoRAOptimizedLinear(_OnBase):
    """A linear layer with low-rank adaptation: ``x W' + (lora_alpha / lora_r) x A' B'``.

    W is frozen; A (`lora_weight_1`) and B are trained.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        source: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        source = source or nn.Linear(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
        lora = self.lora_config = lora_config or LoRAConfig()
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.base = _Base(
            source.weight, quantization_config, lora.base_weight_sharding, lora.offload
        )
        self.bias = source.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_scaling_factor = lora.lora_alpha / lora.lora_r
        self.lora_weight_1: nn.Linear | None = None
        self.lora_weight_2: nn.Linear | None = None
        self._made_of = {"dtype": source.weight.dtype, "device": source.weight.device}
        if not lora.delay_lora_init:
            self.init_lora()

    def init_lora(self) -> None:
        """Make A, of random numbers, and B, of zeros: the layer is its base at first."""
        if self.lora_weight_1 is not None:
            return
        rank = self.lora_config.lora_r
        self.lora_weight_1 = nn.Linear(self.input_dim, rank, bias=False, **self._made_of)
        self.lora_weight_2 = nn.Linear(rank, self.output_dim, bias=False, **self._made_of)
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)

    def full_weight(self) -> Tensor:
        """The base, whole. Collective where ranks have parts."""
        return self.base.whole(self.base._device(), self.base.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The base's product and that of the two matrices."""
        if self.lora_weight_1 is None or self.lora_weight_2 is None:
            raise RuntimeError(
                "this layer waits for init_lora (delay_lora_init); call ds_inference's "
                "init_lora(model)"
            )
        out: Tensor = self.base(x)
        if self.bias is not None:
            out = out + self.bias
        added: Tensor = self.lora_weight_2(self.lora_weight_1(x))
        return out + self.lora_scaling_factor * added


def init_lora(model: nn.Module) -> None:
    """Freeze `model`, and make the trained matrices of its LoRA layers."""
    model.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, LoRAOptimizedLinear):
            layer.init_lora()
            for trained in (layer.lora_weight_1, layer.lora_weight_2):
                assert trained is not None
                trained.requires_grad_(True)


class Init:
    """Inside, models are built or loaded as usual; their linear layers become `OptimizedLinear`.

    The layers are replaced at the end.

    With a LoRA config only those of its `target_mods`, and all that was built is frozen but the two
    matrices of each.
    """

    def __init__(
        self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None
    ) -> None:
        self._lora = lora_config
        self._quantization = quant_config
        self._found: list[tuple[nn.Module, str, nn.Module]] = []
        self._hook: Any = None

    def __enter__(self) -> Init:
        self._hook = nn.modules.module.register_module_module_registration_hook(self._note)
        return self

    def _note(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._found.append((parent, name, child))

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        found, self._found = self._found, []
        # The model was not built: nothing to change.
        if error[0] is not None:
            return
        made: dict[nn.Module, nn.Module] = {}  # a layer that has two names is changed once
        for parent, name, child in found:
            if self._lora is not None:
                parent.requires_grad_(False)
            if (
                type(child) is nn.Linear
                and parent._modules.get(name) is child
                and self._wants(name)
            ):
                made[child] = made.get(child) or self._replacement(child)
                parent._modules[name] = made[child]
        for layer in made.values():
            if self._lora is not None:
                init_lora(layer)

    def _wants(self, name: str) -> bool:
        return self._lora is None or any(target in name for target in self._lora.target_mods)

    def _replacement(self, child: nn.Linear) -> nn.Module:
        sizes = (child.in_features, child.out_features)
        if self._lora is not None:
            return LoRAOptimizedLinear(
                *sizes, lora_config=self._lora, quantization_config=self._quantization, source=child
            )
        return QuantizedLinear(*sizes, quantization_config=self._quantization, source=child)
