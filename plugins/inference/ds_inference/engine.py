"""`InferenceEngine`: a model that answers, on one device or divided over ranks.

[Note: program or module] With kernel injection a model of a known family is lowered to a program, which forward and
generate run; the module stays whole beside it, with the same weights, and serves what a program cannot (asked for
attentions, masks of four dimensions). Without injection the module does everything.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from ds_run_state.slices import SLICES, Slice
from torch import Tensor, nn

from ds_core.context import Context
from ds_core.errors import ConfigError, UsageError
from ds_core.process import log_once
from ds_inference import parallel
from ds_inference.config import DeepSpeedInferenceConfig
from ds_inference.injection import row_names
from ds_inference.loading import cast, fill, is_empty, save_parts
from ds_inference.sources import open_weights

__all__ = ["InferenceEngine"]

log = logging.getLogger("ds_inference")


class InferenceEngine(nn.Module):
    """Answers with a model as a config says; attributes that it lacks are the module's.

    module: the model, cut to this rank's part. ctx: the run. Collective where several ranks divide the model: all of
    them make the engine, and call it with the same inputs.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig | None = None) -> None:
        super().__init__()
        config = config if config is not None else DeepSpeedInferenceConfig()
        if not isinstance(model, nn.Module):
            raise UsageError(f"init_inference needs a model, a torch.nn.Module, not {type(model).__name__}")
        _check(config)
        self._config = config
        self.ctx: Context = parallel.make_context(config, model, row_names(config, model), "init_inference")
        self.device = self.ctx.accelerator.current_device()
        self.dtype = getattr(torch, config.floats)
        self.module = _prepared(model, config, self.ctx, self.device, self.dtype)
        self._times: list[float] | None = None
        self._hooks: list[Any] = []
        self._signature = inspect.signature(self.module.forward)
        self.is_compiled = False
        self.eval()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            module: Any = super().__getattr__("module")
            return getattr(module, name)

    # -- answering ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model says of the inputs, which are those of the module."""
        with torch.no_grad():
            return self.module(*inputs, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module's generate returns."""
        self._check_length(inputs, kwargs)
        with torch.no_grad(), self._alike():
            return self.module.generate(*inputs, **kwargs)

    def _check_length(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = inputs[0] if inputs else kwargs.get("input_ids", kwargs.get("inputs", kwargs.get("inputs_embeds")))
        most = self._config.max_out_tokens
        if isinstance(given, Tensor) and given.dim() > 1 and given.shape[1] > most:
            raise UsageError(
                f"an input of {given.shape[1]} tokens is longer than max_out_tokens {most}; raise it in init_inference"
            )

    @contextlib.contextmanager
    def _alike(self) -> Iterator[None]:
        """Ranks that divide the model draw the same random numbers inside."""
        if self.ctx.mesh.world_size == 1:
            yield
            return
        seed = parallel.one_seed(self.ctx)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    # -- the rest ----------------------------------------------------------------------------------------------------

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Let torch.compile work on the module; arguments go to it."""
        self.module.compile(backend=backend, **dict(compile_kwargs or {}), **kwargs)
        self.is_compiled = True

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure each call of the model from now on; `model_times` has the result. use_cuda_events: on the device."""
        if self._times is not None:
            return
        self._times = []
        clock = _clock(self.device, use_cuda_events)
        begun: list[Callable[[], float]] = []

        def begin(*_: Any) -> None:
            begun.append(clock())

        def end(*_: Any) -> None:
            assert self._times is not None
            self._times.append(begun.pop()())

        self._hooks = [self.module.register_forward_pre_hook(begin), self.module.register_forward_hook(end)]

    def model_times(self) -> list[float]:
        """Milliseconds of each call since the last time that this was asked."""
        if self._times is None:
            raise UsageError("model_times: nothing is measured; call profile_model_time() first")
        times, self._times = self._times, []
        return times

    def destroy(self) -> None:
        """Let go of what is not the module."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._times = [], None


def _clock(device: torch.device, events: bool) -> Callable[[], Callable[[], float]]:
    """Begins to measure; what that gives ends it, and says how many milliseconds went by."""

    def on_device() -> Callable[[], float]:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()

        def elapsed() -> float:
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last))

        return elapsed

    def on_host() -> Callable[[], float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first = time.perf_counter()

        def elapsed() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return (time.perf_counter() - first) * 1e3

        return elapsed

    return on_device if events and device.type == "cuda" else on_host


def _check(config: DeepSpeedInferenceConfig) -> None:
    """ConfigError for what cannot be here."""
    if config.use_triton:
        import importlib.util

        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "use_triton: Triton is not installed; leave it out, or pip install triton", "init_inference"
            )
        log_once(log, logging.WARNING, "use_triton has no effect: no installed package has inference kernels in Triton")
    if config.enable_cuda_graph and config.tp_size > 1:
        raise ConfigError("enable_cuda_graph: not with tp_size > 1, as collectives are not recorded", "init_inference")


def _prepared(
    model: nn.Module, config: DeepSpeedInferenceConfig, ctx: Context, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The model in its dtype, divided, with its weights, on its device."""
    model.eval()
    if is_empty(model) and config.weights is None:
        raise ConfigError("the model has no values (device meta); name its weights with checkpoint", "init_inference")
    cast(model, dtype)
    model = parallel.divide(model, ctx)
    slices: Mapping[str, Slice] = ctx.stash.get(SLICES) or {}
    if config.weights is not None:
        with open_weights(config.weights, config.root) as source:
            fill(model, source, slices, device)
    model.to(device)
    if config.save_to is not None:
        save_parts(model, ctx, slices, config.save_to)
    return model
