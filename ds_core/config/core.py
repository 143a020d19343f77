"""The core's own keys, the rules between them, and the sizes that the three batch keys set.

Every key has an effect in the core; one that is documented but not offered is refused when switched
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ds_core.config.section import Clash, Section, option
from ds_core.errors import ConfigError, Problem


def _text(change: Callable[[str], str]) -> BeforeValidator:
    """Change a text before it is checked; other values are left for their own error."""
    return BeforeValidator(lambda value: change(value) if isinstance(value, str) else value)


def _spelling(**names: str) -> BeforeValidator:
    return _text(
        lambda value: names.get(value.removeprefix("torch."), value.removeprefix("torch."))
    )


Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    _spelling(float32="fp32", float="fp32", float16="fp16", half="fp16", bfloat16="bf16"),
]
LowDtype = Annotated[
    Literal["bfloat16", "float16"], _spelling(bf16="bfloat16", fp16="float16", half="float16")
]
_LOWER = _text(str.lower)


class FP16(Section):
    """Mixed precision in float16 with loss scaling."""

    enabled: bool = option(False, "Train in float16 with fp32 master weights.")
    auto_cast: bool = option(False, "Cast floating-point inputs of the model to float16.")
    loss_scale: float = option(0.0, "Loss scale; 0 means dynamic.", ge=0)
    initial_scale_power: int = option(
        16, "The dynamic scale starts at 2 to this power; 2**128 is infinity in fp32.", ge=0, le=127
    )
    loss_scale_window: int = option(1000, "Clean steps before the dynamic scale doubles.", gt=0)
    hysteresis: int = option(2, "Overflows before the dynamic scale halves.", gt=0)
    consecutive_hysteresis: bool = option(False, "Refill the hysteresis on every clean step.")
    min_loss_scale: float = option(
        1, "Floor of the dynamic scale; an overflow there stops the run.", gt=0
    )
    fp16_master_weights_and_grads: bool = option(
        False, "Update the float16 weights; no fp32 masters are kept."
    )
    clip: float | None = option(None, "Deprecated: use gradient_clipping (L2 norm).", ge=0)

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys of the dynamic scale next to a fixed one."""
        fixed = self.enabled and self.loss_scale
        dynamic = (
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
        for key in dynamic if fixed else ():
            if (
                key in self.model_fields_set
                and getattr(self, key) != type(self).model_fields[key].default
            ):
                yield key, f"has no effect: loss_scale {self.loss_scale:g} is fixed"


class BF16(Section):
    """Mixed precision in bfloat16; needs no loss scaling."""

    enabled: bool = option(False, "Train in bfloat16 with fp32 master weights.")
    immediate_grad_update: bool = option(
        False, "Add each gradient to an fp32 buffer as it is produced."
    )
    check_grad_overflow: bool = option(True, "Skip a step whose gradients hold inf or NaN.")
    bf16_master_weights_and_grads: bool = option(
        False, "Update the bfloat16 weights; no fp32 masters are kept."
    )
    bf16_optimizer_states: bool = option(
        False, "Optimizer states in bfloat16; needs bf16_master_weights_and_grads."
    )


class TorchAutocast(Section):
    """torch.autocast around the forward; weights stay in full precision."""

    enabled: bool = option(False, "Run the forward under torch.autocast.")
    dtype: LowDtype | None = option(
        None, "Compute dtype: bfloat16 or float16; null means bfloat16."
    )
    lower_precision_safe_modules: list[str] | None = option(
        None,
        "Module classes whose gradients travel in dtype; null means torch.nn.Linear, Conv1d, "
        "Conv2d, Conv3d.",
    )


class DataTypes(Section):
    """Dtypes of gradients, parameters and buffers."""

    grad_accum_dtype: Dtype | None = option(
        None, "Gradients between micro-batches: fp32, fp16, bf16; null: as the model."
    )
    param_dtype: Dtype | None = option(
        None, "Parameters: fp32, fp16, bf16; must match the mode that is enabled."
    )
    buffer_dtype: Dtype | None = option(
        None, "Floating-point buffers: fp32, fp16, bf16; null keeps their own."
    )


class OptimizerConfig(Section):
    """The optimizer, by name."""

    type: str = option(
        ...,
        "Name of the optimizer, in any case: Adam, AdamW, ... or a torch.optim class.",
        min_length=1,
    )
    params: dict[str, Any] = option({}, "Keyword arguments of the optimizer.")
    legacy_fusion: bool = option(
        False,
        "An old fusion of LAMB and fp16.",
        without_effect="LAMB has one implementation, for every dtype",
    )


class SchedulerConfig(Section):
    """The learning-rate schedule, by name."""

    type: str = option(
        ...,
        "Name of the schedule: WarmupLR, ... or a torch.optim.lr_scheduler class.",
        min_length=1,
    )
    params: dict[str, Any] = option({}, "Keyword arguments of the schedule.")


class PluginsConfig(Section):
    """Which plugins take part. A bare list means `load`."""

    require: list[str] = option(
        [], 'Requirements that must be installed, such as "acme-monitor>=0.1".'
    )
    disable: list[str] = option([], "Sections or distributions to leave alone.")
    load: list[str] = option(
        [], 'Modules to load that are not installed: "my_pkg.plugin" or "section=my_pkg.plugin".'
    )
    prefer: dict[str, str] = option(
        {}, "Section (or kind/name) -> distribution, where two claim one name."
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_list(cls, data: Any) -> Any:
        return {"load": data} if isinstance(data, list) else data


class CoreConfig(Section):
    """The top-level keys that the core reads."""

    # -- batch
    train_batch_size: int | None = option(
        None, "Samples per optimizer update over all ranks.", gt=0
    )
    train_micro_batch_size_per_gpu: int | None = option(None, "Samples per rank and forward.", gt=0)
    gradient_accumulation_steps: int | None = option(
        None, "Micro-batches per optimizer update.", gt=0
    )
    managed_gradient_accumulation: bool = option(
        True, "The engine counts micro-batches; false: the caller calls step() at boundaries."
    )
    data_parallel_size: int | None = option(
        None, "Number of data-parallel ranks; null: what the world leaves.", gt=0
    )
    dataloader_drop_last: bool = option(
        False, "Drop the last incomplete batch of the engine's loader."
    )
    # -- precision
    fp16: FP16 = option(FP16(), "Mixed precision in float16 with loss scaling.")
    bf16: BF16 = option(BF16(), "Mixed precision in bfloat16.", old=("bfloat16",))
    torch_autocast: TorchAutocast = option(TorchAutocast(), "torch.autocast around the forward.")
    data_types: DataTypes = option(DataTypes(), "Dtypes of gradients, parameters and buffers.")
    # -- clipping and reduction
    gradient_clipping: float = option(
        1.0, "Limit of the global L2 gradient norm; 0 turns clipping off.", ge=0
    )
    communication_data_type: Dtype | None = option(
        None, "Dtype in which gradients travel; null: the model's."
    )
    prescale_gradients: bool = option(
        False, "Divide gradients by the number of ranks before the sum."
    )
    gradient_predivide_factor: float = option(
        1.0, "Divide gradients by this before the sum, the rest after it.", gt=0
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], _LOWER] = option(
        "mean", "Average gradients over the data-parallel ranks, or sum them."
    )
    disable_allgather: bool = option(
        False, "A legacy switch.", without_effect="the partitioner chooses the collective"
    )
    use_data_before_expert_parallelism: bool = option(
        False,
        "Which ranks share experts.",
        without_effect="ranks that divide experts are neighbours; results are the same",
    )
    # -- logging and diagnostics
    log_level: (
        Annotated[Literal["debug", "info", "warning", "error", "critical"], _LOWER] | None
    ) = option(None, "Level of the ds_core loggers; null leaves it.")
    vocabulary_size: int | None = option(None, "Warn when this is not a multiple of 8.", gt=0)
    # -- what is built by name
    optimizer: OptimizerConfig | None = option(None, "The optimizer, by name.")
    scheduler: SchedulerConfig | None = option(None, "The learning-rate schedule, by name.")
    kernels: dict[str, Annotated[str, Field(min_length=1)]] = option(
        {}, 'Operation -> provider, such as {"adam": "reference"}.'
    )
    collectives: str | None = option(
        None,
        'The provider of collectives: its name, or "torch" for torch.distributed alone.',
    )
    plugins: PluginsConfig = option(PluginsConfig(), "Which plugins take part.")

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """The old place of gradient_clipping, and a size for which tensor cores are slow."""
        if isinstance(given.get("fp16"), dict) and given["fp16"].get("clip") is not None:
            yield "fp16.clip", "is deprecated and was read as 'gradient_clipping'; rename it"
        if (size := self.vocabulary_size) is not None and size % 8:
            why = (
                f"is not a multiple of 8; padding it to {-(-size // 8) * 8} uses tensor cores "
                "better"
            )
            yield "vocabulary_size", why

    @model_validator(mode="before")
    @classmethod
    def _move_clip(cls, data: Any) -> Any:
        """Take ``fp16.clip`` as ``gradient_clipping``; a value that is not a number is left for its
        own error.
        """
        inner: Any = data.get("fp16") if isinstance(data, dict) else None
        clip: Any = inner.get("clip") if isinstance(inner, dict) else None
        if type(clip) not in (int, float) or clip < 0:
            return data
        both = "gradient_clipping" in data
        fp16 = {key: value for key, value in inner.items() if key != "clip"}
        return {
            **data,
            "fp16": fp16,
            "gradient_clipping": Clash("fp16.clip", "gradient_clipping") if both else clip,
        }


CORE_KEYS: frozenset[str] = frozenset(CoreConfig.model_fields) | {"bfloat16"}
"""Every top-level key that the core owns, deprecated spellings included."""


def cross_problems(core: CoreConfig, raw: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong between keys of the core.

    raw: tells by which of its names a key was given.
    """
    mode = "fp16" if core.fp16.enabled else "bf16" if core.bf16.enabled else "fp32"
    if core.fp16.enabled and core.bf16.enabled:
        bf16 = "bfloat16" if "bfloat16" in raw else "bf16"
        why = f"fp16 and {bf16} are switched on together, and exclude each other"
        yield Problem(f"{bf16}.enabled", why, "keep one of them")
    elif (given := core.data_types.param_dtype) not in (None, mode):
        fix = f"set it to {mode!r} or leave it out"
        fix += "" if given == "fp32" else f', or set "{given}": {{"enabled": true}}'
        yield Problem(
            "data_types.param_dtype",
            f"{given!r} does not match the mode of the run, which is {mode}",
            fix,
        )
    if core.prescale_gradients and core.gradient_predivide_factor != 1:
        why = "has no effect when prescale_gradients divides by all ranks beforehand"
        yield Problem("gradient_predivide_factor", why, "leave one of the two out")
    if core.bf16.bf16_optimizer_states and not core.bf16.bf16_master_weights_and_grads:
        yield Problem(
            "bf16.bf16_optimizer_states",
            "needs bf16_master_weights_and_grads",
            "set both, or neither",
        )


# -- the batch triple: train = micro x accumulation x data-parallel ranks --------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Sizes in samples.

    train: per optimizer update over all ranks.
    micro: per rank and forward.
    gas: micro-batches.
    """

    train: int
    micro: int
    gas: int


def complete(
    train: int | None, micro: int | None, gas: int | None, dp_world: int
) -> tuple[int, int, int]:
    """Fill in what was not given, by floor division; the result may still be inconsistent.

    Raises ConfigError when neither the train nor the micro-batch size is given.
    """
    if train is not None and micro is not None:
        return train, micro, (train // micro) // dp_world if gas is None else gas
    steps = gas or 1
    if train is not None:
        return train, (train // dp_world) // steps, steps
    if micro is not None:
        return micro * steps * dp_world, micro, steps
    had = "nothing" if gas is None else f"only gradient_accumulation_steps {gas}"
    fix = (
        "set train_batch_size (samples per update over all ranks) or train_micro_batch_size_per_gpu"
    )
    raise ConfigError(
        [Problem("train_batch_size", f"a batch size is needed, and {had} is given", fix)]
    )


def resolve_batch(core: CoreConfig, dp_world: int) -> Batch:
    """The three sizes of a run on `dp_world` data-parallel ranks.

    Raises ConfigError naming all four numbers when they do not multiply out.
    """
    given = (
        core.train_batch_size,
        core.train_micro_batch_size_per_gpu,
        core.gradient_accumulation_steps,
    )
    train, micro, gas = complete(*given, dp_world)
    if min(train, micro, gas) > 0 and train == micro * gas * dp_world:
        return Batch(train, micro, gas)
    why = (
        f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x "
        f"gradient_accumulation_steps {gas}"
    )
    why += f" x {dp_world} data-parallel ranks (= {micro * gas * dp_world})"
    raise ConfigError([Problem("train_batch_size", why, _fix(*given, dp_world))])


def _fix(train: int | None, micro: int | None, gas: int | None, dp_world: int) -> str:
    if train is None:  # cannot be wrong: it is computed
        return ""
    unit = (micro or 1) * (gas or 1) * dp_world
    if micro is not None and gas is not None:
        return f"set train_batch_size to {unit}, or leave it out"
    below = train // unit * unit
    above = (train // unit + 1) * unit
    near = f"{below} or {above}" if below else str(above)
    return f"train_batch_size must be a multiple of {unit}: use {near}"


def with_train_batch_size(batch: Batch, train: int, dp_world: int) -> Batch:
    """The batch with another train size: micro stays, accumulation follows.

    Raises ValueError unless `train` is a positive multiple of micro x `dp_world`.
    """
    unit = batch.micro * dp_world
    if isinstance(train, bool) or not isinstance(train, int) or train <= 0 or train % unit:
        raise ValueError(
            f"train batch size {train!r} must be a positive multiple of micro-batch size "
            f"{batch.micro} x {dp_world} data-parallel ranks = {unit}"
        )
    return Batch(train, batch.micro, train // unit)


def with_micro_batch_size(batch: Batch, micro: int, dp_world: int) -> Batch:
    """The batch with another micro size: accumulation stays, train follows.

    Raises ValueError unless `micro` > 0.
    """
    if isinstance(micro, bool) or not isinstance(micro, int) or micro <= 0:
        raise ValueError(f"micro-batch size {micro!r} must be a whole number > 0")
    return Batch(micro * batch.gas * dp_world, micro, batch.gas)
