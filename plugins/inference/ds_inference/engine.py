"""`InferenceEngine`: a model that answers, on one device or divided over ranks.

[Note: program or module] With kernel injection a model of a known family is lowered to a program,
which forward and generate run; the module stays whole beside it, with the same weights, and serves
what a program cannot (asked for attentions, masks of four dimensions). Without injection the module
does everything.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_inference.config import DeepSpeedInferenceConfig
from ds_inference.families import Kind
from ds_inference.generate.generator import Generator
from ds_inference.generate.hf import hf_generate
from ds_inference.generate.requests import Output, Request
from ds_inference.preparing import Prepared, prepare
from ds_inference.run import forward as run
from ds_inference.run import parallel
from ds_inference.run.eager import Eager
from ds_inference.run.times import Stopwatch, Timed
from ds_inference.weights.tracking import WeightTracker

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ds_inference")


class InferenceEngine(nn.Module):
    """Answers with a model as a config says; attributes that it lacks are the module's.

    module: the model, cut to this rank's part.
    ctx: the run.

    Collective where several ranks divide the model: all of them make the engine, and call it with
    the same inputs.
    """

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig | None = None) -> None:
        super().__init__()
        config = config if config is not None else DeepSpeedInferenceConfig()
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"init_inference needs a model, a torch.nn.Module, not {type(model).__name__}"
            )
        made = prepare(model, config)
        self._config = config
        self._made = made
        self.ctx = made.ctx
        self.module = made.module
        self.device = made.device
        self.dtype = getattr(torch, config.floats)
        # Made at first use: a cache for a model that only runs forward would be memory for nothing.
        self._generator: Generator | None = None
        # Where the module itself generates: it must run along with other ranks (`Eager.drain`).
        self._eager: Eager | None = None
        self._watch = Stopwatch(self.device)
        self._track_weights = _make_tracker(made)
        self._signature = inspect.signature(self.module.forward)
        self.is_compiled = False
        self.eval()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before the module is set, looking for it there would not end.
            if name == "module":
                raise
            module: Any = super().__getattr__("module")
            return getattr(module, name)

    # -- answering ---------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model says of the inputs, which are those of the module."""
        lowered = self._made.lowered
        runnable = self._made.runnable
        with torch.no_grad(), self._watch.call():
            if lowered is None or runnable is None:
                return (self._made.graphs or self.module)(*inputs, **kwargs)
            # By names, so that what a program serves can be picked out of any way of calling.
            given = _by_name(self._signature, inputs, kwargs)
            if (why := run.refusal(lowered, given)) is not None:
                log_once(
                    log, logging.INFO, f"the module itself answers a call: {why}".replace("%", "%%")
                )
                return self.module(**given)
            self._track_weights()
            # The other inputs are for `finish`: labels, the form of the output.
            served = {name: given[name] for name in run.SERVED if given.get(name) is not None}
            return lowered.finish(run.forward(lowered, runnable, **served), **given)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module's generate returns; by the program where there is one, or where weights
        are elsewhere.
        """
        self._check_length(inputs, kwargs)
        made = self._made
        answer: Any = self.module
        if not callable(getattr(answer, "generate", None)):
            raise UsageError(f"{type(answer).__name__} has no generate; call the engine instead")
        with torch.no_grad(), self._equal_draws():
            # Neither a program nor weights elsewhere: the module's own loop serves.
            if made.lowered is None and made.holder is None:
                return answer.generate(*inputs, **kwargs)
            # A program without logits (an encoder) cannot generate; the module may still have a
            # way.
            if made.lowered is not None and made.lowered.vocab is None:
                return answer.generate(*inputs, **kwargs)
            self._track_weights()
            try:
                return hf_generate(self.generator, answer, *inputs, **kwargs)
            finally:
                # After an error too: the other ranks wait in their next forward.
                if self._eager is not None:
                    self._eager.drain()

    def _check_length(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = (
            inputs[0]
            if inputs
            else kwargs.get("input_ids", kwargs.get("inputs", kwargs.get("inputs_embeds")))
        )
        most = self._config.max_out_tokens
        # It may be given in the call or in its generation config.
        configured = getattr(kwargs.get("generation_config"), "max_time", None)
        if self.ctx.mesh.world_size > 1 and (kwargs.get("max_time") or configured):
            raise UsageError(
                "max_time: ranks would end at different tokens, each by its own clock; leave it out"
            )
        if isinstance(given, Tensor) and given.dim() > 1 and given.shape[1] > most:
            raise UsageError(
                f"an input of {given.shape[1]} tokens is longer than max_out_tokens {most}; raise "
                "it in init_inference"
            )

    @contextlib.contextmanager
    def _equal_draws(self) -> Iterator[None]:
        """Ranks that divide the model draw the same random numbers inside."""
        if self.ctx.mesh.world_size == 1:
            yield
            return
        # The seed is drawn outside, so that the caller's generator advances as without ranks.
        seed = parallel.one_seed(self.ctx)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def serve(self, requests: Iterable[Request], tokens: bool = False) -> Iterator[Output]:
        """Answer many requests, which share the steps of the model; outputs as they come.

        See `Generator.serve`.

        tokens: every output, else only the one that ends a request. With several ranks all give the
        same requests.
        """
        self._track_weights()
        try:
            yield from self.generator.serve(requests, tokens)
        finally:
            if self._eager is not None:
                self._eager.drain()

    @property
    def generator(self) -> Generator:
        """What answers requests, many at a time.

        Made at first use; UsageError where the model does not generate.
        """
        if self._generator is None:
            self._generator = self._make_generator()
        return self._generator

    def _make_generator(self) -> Generator:
        made = self._made
        config = self._config
        if (
            made.lowered is not None
            and made.lowered.kind is Kind.CAUSAL
            and made.lowered.vocab is not None
        ):
            assert made.runnable is not None
            runnable: Any = Timed(made.runnable, self._watch)
            told: Any = made.lowered
        else:
            if not callable(getattr(self.module, "generate", None)):
                raise UsageError(
                    f"{type(self.module).__name__} does not generate: it gives no logits of tokens"
                )
            # Ranks that gather weights for each forward must run equally often, also with unequal
            # requests.
            group = (
                self.ctx.mesh.group("dp")
                if made.holder is not None and self.ctx.mesh.size("dp") > 1
                else None
            )
            runnable = told = self._eager = Eager(
                self.module, together=made.holder is not None, group=group
            )
        return Generator(
            runnable,
            program=told.program,
            vocab=told.vocab,
            max_positions=min(told.max_positions or config.max_out_tokens, config.max_out_tokens),
            # Sixteen of the longest sequences, or more of shorter ones.
            cache_tokens=config.cache_tokens or 16 * config.max_out_tokens,
            eos=told.eos,
            device=self.device,
            max_rows=config.max_rows,
            max_sequences=config.max_sequences,
            seeds=lambda: parallel.one_seed(self.ctx),
        )

    def train(self, mode: bool = True) -> Self:
        """Nothing but `eval` has an effect: an engine answers, without dropout."""
        if mode:
            text = (
                "train() of an inference engine has no effect; to alternate between training and generating, use "
                "hybrid_engine"
            )
            log_once(log, logging.WARNING, text)
        return super().train(False)

    # -- the rest ----------------------------------------------------------------------------------

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Let torch.compile work on the module; arguments go to it."""
        self.module.compile(backend=backend, **dict(compile_kwargs or {}), **kwargs)
        self.is_compiled = True

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure each call of the model from now on; `model_times` has the result.

        use_cuda_events: on the device.

        A call is a forward, or a step of a generation: one for each token, and those that read
        prompts.
        """
        self._watch.start(self.module, use_cuda_events)

    def model_times(self) -> list[float]:
        """Milliseconds of each call since the last time that this was asked."""
        times = self._watch.take()
        if times is None:
            raise UsageError("model_times: nothing is measured; call profile_model_time() first")
        return times

    def destroy(self) -> None:
        """Let go of all but the module, which answers by itself from now on.

        Calling it again does nothing.

        Where `zero` keeps the weights elsewhere, it is left as the training engine's `destroy`
        leaves a module.
        """
        if self._made.holder is not None:
            self._made.holder.destroy()
        # A program holds the addresses of weights, and graphs hold memory: both go.
        self._made = replace(self._made, lowered=None, runnable=None, graphs=None, holder=None)
        self._generator = self._eager = None
        self._track_weights = _make_tracker(self._made)
        self._watch.stop()


def _make_tracker(made: Prepared) -> Callable[[], None]:
    """What is called before a program answers."""
    if made.lowered is None or made.runnable is None:
        return lambda: None
    return WeightTracker(made.module, made.lowered, made.runnable)


def _by_name(
    signature: inspect.Signature, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names."""
    bound = dict(signature.bind_partial(*inputs, **kwargs).arguments)
    # Keywords that are caught by ``**kwargs`` are as good as named ones.
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound
