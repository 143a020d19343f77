"""From a model and a config to what an `InferenceEngine` has: the model in its dtype, divided, with
its weights.

In this order: divided over ranks as it is (a model without values costs nothing yet), then its
weights are read, then linear layers are quantised, then it is lowered to a program.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from ds_inference_kit.program import Runnable
from ds_kernel_kit import references
from ds_run_state.slices import SLICES, Slice
from torch import nn

import ds_core
from ds_core.config import ConfigSource, Trait
from ds_core.context import Context
from ds_core.errors import ConfigError
from ds_core.process import log_once
from ds_inference.families import Kind, Lowered, lower, why_not
from ds_inference.injection import row_names
from ds_inference.run import parallel
from ds_inference.run.graphs import Graphs
from ds_inference.weights.loading import cast, fill, is_empty, save_parts
from ds_inference.weights.quantised import QuantizedLinear, quantise_model
from ds_inference.weights.sources import open_weights

if TYPE_CHECKING:
    from ds_core.engine import RunningEngine
    from ds_inference.config import DeepSpeedInferenceConfig, WeightQuantConfig, WeightQuantization

log = logging.getLogger("ds_inference")

ORIGIN = "init_inference"
QKV = (
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "query",
        "key",
        "value",
        "query_key_value",
        "c_attn",
    ),
    *("q_lin", "k_lin", "v_lin", "Wqkv"),
)
"""Names of layers of queries, keys and values."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What answers."""

    # The model, cut to this rank's part.
    module: nn.Module
    ctx: Context
    device: torch.device
    # Its program, before it is loaded; None: the module runs by itself.
    lowered: Lowered | None = None
    # The loaded program.
    runnable: Runnable | None = None
    # CUDA graphs of the module's forward.
    graphs: Graphs | None = None
    # The engine of stage 3 that keeps the weights elsewhere.
    holder: RunningEngine | None = None


def prepare(model: nn.Module, config: DeepSpeedInferenceConfig) -> Prepared:
    """Make `model` ready as `config` says. Collective where several ranks divide it."""
    _check(config)
    if is_empty(model) and config.weights is None:
        raise ConfigError(
            "the model has no values (device meta); name its weights with checkpoint", ORIGIN
        )
    model.eval()
    cast(model, getattr(torch, config.floats))
    # The partitioner takes the weights over from the model, and divides them by itself.
    if config.zero.get("stage") == 3:
        return _prepare_offloaded(model, config)
    if config.zero:
        log_once(log, logging.WARNING, "zero has no effect: only stage 3 keeps weights elsewhere")
    ctx = parallel.make_context(config, model, row_names(config, model), ORIGIN)
    device = torch.device(ctx.accelerator.current_device())
    # Before weights are read: of a divided layer only this rank's part is.
    model = parallel.divide(model, ctx)
    slices: Mapping[str, Slice] = ctx.stash.get(SLICES) or {}
    if config.weights is not None:
        with open_weights(config.weights, config.root) as source:
            fill(model, source, slices, device)
    # What `fill` has not placed: a model that came with its values.
    model.to(device)
    # Before quantisation: what is saved can be loaded for any dtype.
    if config.save_to is not None:
        save_parts(model, ctx, slices, config.save_to)
    quantise(
        model,
        config.quant.weight,
        config.bits if config.quant.enabled else 0,
        config.quant.qkv.enabled,
        ctx,
    )
    # Last, since the program reads the layers as they are by now.
    lowered = _lower(model, config) if config.replace_with_kernel_inject else None
    if (
        lowered is None
        and config.tp_size > 1
        and any(isinstance(m, QuantizedLinear) for m in model.modules())
    ):
        raise ConfigError(
            f"dtype: weights in {config.bits} bits on several ranks need "
            "replace_with_kernel_inject",
            ORIGIN,
        )
    runnable = parallel.load(lowered, model, ctx, device) if lowered is not None else None
    graphs = None
    if config.enable_cuda_graph and runnable is not None:
        parallel.record(runnable, f"{type(model).__name__} on {device.type}")
    elif config.enable_cuda_graph:
        if device.type != "cuda":
            raise ConfigError(
                f"enable_cuda_graph: the model is on {device.type}; leave the key out", ORIGIN
            )
        # Without a program the module's own forward is recorded.
        graphs = Graphs(model, device)
    return Prepared(model, ctx, device, lowered, runnable, graphs)


def quantise(
    model: nn.Module, weight: WeightQuantConfig, bits: int, qkv: bool, ctx: Context
) -> None:
    """Quantise linear layers as the config says.

    bits: that dtype asks for.
    qkv: also queries, keys, values.
    """
    wanted = weight.layers(bits)
    if not wanted:
        return
    kernel = ctx.kernels.serving("quantize", next(model.parameters()), references.quantize)
    names = [name for name, _ in model.named_modules()]
    # Layers that count as done are left as they are.
    done = set() if qkv else {name for name in names if name.rpartition(".")[2] in QKV}
    for pattern, how in wanted.items():
        # The first name that fits counts, as `WeightQuantConfig.layers` orders them.
        mine = {n for n in names if pattern in n or fnmatch.fnmatch(n, pattern)} - done
        if not mine:
            raise ConfigError(
                f"quant: no layer of {type(model).__name__} is called {pattern!r}",
                ctx.config.origin,
            )
        others = [name for name in names if name not in mine]
        quantise_model(
            model,
            bits=how.num_bits,
            group=how.group,
            symmetric=how.symmetric,
            skip=others,
            kernel=kernel,
        )
        done |= mine


def quantise_for_run(model: nn.Module, section: WeightQuantization, ctx: Context) -> nn.Module:
    """The model of a run with layers quantised as section ``weight_quantization`` says.

    Under stage 3 the numbers are frozen parameters, which are sharded and offloaded as others are;
    scales stay whole.
    """
    # num_bits is for all layers where no key says which.
    named = section.post_init_quant or section.quantized_initialization
    quantise(model, section, 0 if named else section.num_bits, True, ctx)
    if ctx.config.has(Trait.RELEASES_WEIGHTS):
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                # Stage 3 shards parameters alone; a buffer would stay whole on each rank.
                numbers = module._buffers.pop("q")
                assert numbers is not None
                module.register_parameter("q", nn.Parameter(numbers, requires_grad=False))
    return model


def _check(config: DeepSpeedInferenceConfig) -> None:
    """ConfigError for what cannot be here."""
    if config.use_triton:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "use_triton: Triton is not installed; pip install triton, or leave the key out",
                ORIGIN,
            )
        log_once(
            log,
            logging.WARNING,
            "use_triton has no effect: no installed package has inference kernels in Triton",
        )
    if config.enable_cuda_graph and (
        config.zero or (config.tp_size > 1 and not config.replace_with_kernel_inject)
    ):
        why = "not with zero, and with tp_size > 1 only with replace_with_kernel_inject"
        raise ConfigError(
            f"enable_cuda_graph: {why}, as waiting for others is not recorded", ORIGIN
        )


def _lower(model: nn.Module, config: DeepSpeedInferenceConfig) -> Lowered | None:
    """The program of the model; None, with a warning, where its family is not known."""
    lowered = lower(model)
    if lowered is None:
        why = f"{type(model).__name__} runs by itself: {why_not(model)}"
        log_once(
            log,
            logging.WARNING,
            f"replace_with_kernel_inject has no effect: {why}".replace("%", "%%"),
        )
        return None
    if lowered.kind is Kind.CAUSAL:
        if not config.triangular_masking:
            why = "generates token by token, so that none can see later ones"
            raise ConfigError(
                f"triangular_masking: {type(model).__name__} {why}; leave the key out", ORIGIN
            )
        most = lowered.max_positions
        if most is not None and most < config.min_out_tokens:
            raise ConfigError(
                f"min_out_tokens is {config.min_out_tokens}, and the model has {most} positions",
                ORIGIN,
            )
    return lowered


def _prepare_offloaded(model: nn.Module, config: DeepSpeedInferenceConfig) -> Prepared:
    """ZeRO inference: the partitioner of stage 3 keeps the weights, and brings them layer by
    layer."""
    if config.weights is not None:
        with open_weights(config.weights, config.root) as source:
            # On the host: the whole model need not fit on the device.
            fill(model, source, {}, torch.device("cpu"))
    if config.replace_with_kernel_inject:
        log_once(
            log,
            logging.WARNING,
            "replace_with_kernel_inject has no effect with zero: weights come and go",
        )
    raw: dict[str, Any] = parallel.sections(config, model, row_names(config, model))
    raw["zero_optimization"] = dict(config.zero)
    if "aio" in raw["zero_optimization"]:
        raw["aio"] = raw["zero_optimization"].pop("aio")
    if (mode := {"fp16": "fp16", "bf16": "bf16"}.get(config.dtype)) is not None:
        raw[mode] = {"enabled": True}
    holder, *_ = ds_core.initialize(model=model, config=ConfigSource(raw, ORIGIN))
    holder.module.eval()
    device = torch.device(holder.ctx.accelerator.current_device())
    return Prepared(holder.module, holder.ctx, device, holder=holder)
