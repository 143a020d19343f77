"""The sections ``data_efficiency`` and ``curriculum_learning`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from ds_core.config import Section, option

Count = Annotated[int, Field(gt=0)]
NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
"""Type of a schedule -> the keys of ``schedule_config`` that it needs; others are an error."""


class ScheduleConfig(Section):
    """The numbers of a schedule; which of them, depends on its type."""

    total_curriculum_step: int | None = option(
        None, "Steps until the highest difficulty; fixed_linear and fixed_root.", gt=0
    )
    difficulty_step: int | None = option(
        None,
        "Difficulties are rounded down to a multiple of this; fixed_linear and fixed_root.",
        gt=0,
    )
    root_degree: int | None = option(
        None,
        "Degree of the root: 2 is the square root, which grows fast at first; fixed_root.",
        gt=0,
    )
    difficulty: list[int] | None = option(
        None, "The difficulties, one after the other; fixed_discrete.", min_length=1
    )
    max_step: list[Count] | None = option(
        None, "Last step of each difficulty but the last; fixed_discrete.", min_length=1
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.difficulty is not None and self.max_step is not None:
            if len(self.max_step) != len(self.difficulty) - 1:
                raise ValueError(
                    f"max_step has {len(self.max_step)} entries and difficulty has "
                    f"{len(self.difficulty)}; "
                    "max_step needs one fewer"
                )
            if any(b <= a for a, b in zip(self.max_step, self.max_step[1:], strict=False)):
                raise ValueError("max_step must increase")
        return self


class Schedule(Section):
    """A difficulty that grows with the steps."""

    min_difficulty: int | None = option(None, "Difficulty at the first step.", ge=0)
    max_difficulty: int | None = option(None, "Highest difficulty.", gt=0)
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = (
        option(
            None,
            "How the difficulty grows: fixed_linear, fixed_root, fixed_discrete, or custom (a "
            "function of your own).",
        )
    )
    schedule_config: ScheduleConfig = option(ScheduleConfig(), "The numbers of the schedule.")

    def check_schedule(self) -> None:
        """Raise ValueError unless the schedule is complete."""
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, key) is None:
                raise ValueError(f"{key} must be given")
        assert (
            self.min_difficulty is not None
            and self.max_difficulty is not None
            and self.schedule_type is not None
        )
        if self.min_difficulty > self.max_difficulty:
            raise ValueError(
                f"min_difficulty {self.min_difficulty} is more than max_difficulty "
                f"{self.max_difficulty}"
            )
        numbers = self.schedule_config
        needed = NEEDS[self.schedule_type]
        given = {key for key in ScheduleConfig.model_fields if getattr(numbers, key) is not None}
        if missing := [key for key in needed if key not in given]:
            raise ValueError(
                f"schedule_type {self.schedule_type} needs schedule_config.{missing[0]}"
            )
        if (
            numbers.difficulty is not None
            and "difficulty" in needed
            and max(numbers.difficulty) > self.max_difficulty
        ):
            raise ValueError(
                f"schedule_config.difficulty goes up to {max(numbers.difficulty)}, "
                f"more than max_difficulty {self.max_difficulty}"
            )

    def schedule_remarks(self) -> Iterable[tuple[str, str]]:
        """Keys of another schedule, and a step that is bad for tensor cores."""
        if self.schedule_type is None:
            return
        numbers = self.schedule_config
        needed = NEEDS[self.schedule_type]
        for key in ScheduleConfig.model_fields:
            if getattr(numbers, key) is not None and key not in needed:
                yield (
                    f"schedule_config.{key}",
                    f"has no effect with schedule_type {self.schedule_type}",
                )


class Metric(Schedule):
    """A metric of samples, and the schedule of its difficulty."""

    index_to_sample_path: str | None = option(
        None,
        "File of the samples in order of the metric, written by `dscore curriculum analyze`.",
        min_length=1,
    )
    index_to_metric_path: str | None = option(
        None, "File of the metric's values, written by `dscore curriculum analyze`.", min_length=1
    )
    difficulty_type: Literal["value", "percentile"] | None = option(
        None,
        "What a difficulty means: a value of the metric, or the easiest so many percent of the "
        "samples.",
    )
    clustering_type: Literal["schedule_based", "single_cluster"] | None = option(
        None,
        "schedule_based: samples above the difficulty wait; single_cluster: all samples come at "
        "any time, and the "
        "difficulty is for a function that changes batches.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_schedule()
        if self.clustering_type is None:
            raise ValueError("clustering_type must be given: schedule_based or single_cluster")
        if self.clustering_type == "single_cluster":
            return self
        for key in ("difficulty_type", "index_to_sample_path", "index_to_metric_path"):
            if getattr(self, key) is None and (
                key != "index_to_metric_path" or self.difficulty_type == "value"
            ):
                raise ValueError(f"clustering_type schedule_based needs {key}")
        if self.difficulty_type == "percentile" and (self.max_difficulty or 0) > 100:
            raise ValueError(
                f"max_difficulty {self.max_difficulty} is no percentile; the highest is 100"
            )
        return self


class Curriculum(Section):
    """Samples by difficulty: easy ones first."""

    enabled: bool = option(False, "Choose samples by difficulty.")
    data_cluster_path: str | None = option(
        None,
        "Folder for the samples of each difficulty, memory-mapped from there; null: they are kept "
        "in memory. It is "
        "used with two and more schedule_based metrics; every rank must be able to write into it.",
        min_length=1,
    )
    curriculum_metrics: dict[str, Metric] = option(
        {}, "Metric, by a name of your choice -> its files and schedule."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and not self.curriculum_metrics:
            raise ValueError("curriculum_metrics must be given when curriculum_learning is enabled")
        return self


class DynamicBatching(Section):
    """Batches by tokens: few long samples, or many short ones."""

    enabled: bool = option(
        False, "Fill micro-batches up to a number of tokens instead of a number of samples."
    )
    max_tokens: int | None = option(
        None, "Most tokens of a micro-batch, padding included; required.", gt=0
    )
    min_batch_size: int = option(
        1,
        "Fewest samples of a micro-batch; samples longer than max_tokens / min_batch_size are left "
        "out.",
        gt=0,
    )
    max_batch_size: int | None = option(
        None, "Most samples of a micro-batch; null: any number.", gt=0
    )
    lr_scaling_method: Literal["linear", "sqrt", "none"] = option(
        "linear",
        "How the learning rate of a step follows its batch size: in proportion, by its square "
        "root, or not.",
    )
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = option(
        "dataloader",
        "How samples come into micro-batches: in the loader's order, which is shuffled (dataloader "
        "and random), or "
        "samples of similar length together (seqlen), in steps that come in random order.",
    )
    sequence_picking_window: Count | None = option(
        None, "Steps that are planned together with seqlen; null: 8, and 1 with a curriculum."
    )
    metrics_path: str | None = option(
        None,
        "Folder of the analysis that has the samples' lengths; null: they are measured at the "
        "start.",
        min_length=1,
    )
    verbose: bool = option(False, "Log samples, tokens and padding of each epoch.", per_rank=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and self.max_tokens is None:
            raise ValueError("max_tokens must be given when dynamic_batching is enabled")
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise ValueError(
                f"max_batch_size {self.max_batch_size} is less than min_batch_size "
                f"{self.min_batch_size}"
            )
        return self


class Packing(Section):
    """Several samples in a row: no padding between them, and rows of one length."""

    enabled: bool = option(
        False,
        "Put several samples into each row of a micro-batch, which has "
        "train_micro_batch_size_per_gpu rows.",
    )
    row_tokens: int = option(0, "Tokens of a row; required.", ge=0)
    long_samples: Literal["error", "truncate", "drop"] = option(
        "error",
        "What becomes of samples that are longer than a row: an error, cut to the row, or left "
        "out.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and not self.row_tokens:
            raise ValueError("row_tokens must be given when packing is enabled")
        return self


class Mixing(Section):
    """Several data sets in given proportions."""

    weights: dict[str, Annotated[float, Field(gt=0)]] | None = option(
        None,
        "Data set -> its part of the samples, in any unit. training_data is then a mapping of "
        "these names to data "
        'sets, or a list of data sets, named "0", "1" and so on.',
        min_length=1,
    )
    samples_per_epoch: Count | None = option(
        None, "Samples of an epoch of all data sets together; null: as many as they have."
    )


class DataSampling(Section):
    """Which samples come when, and in which batches."""

    enabled: bool = option(False, "Use this section's loader for the training data.")
    num_epochs: int = option(
        1000, "Passes over the training data that there are; later ones are empty.", gt=0
    )
    num_workers: int = option(
        0, "Processes that load samples, on each rank; 0: the rank itself.", ge=0
    )
    pin_memory: bool = option(
        False, "Put batches into page-locked memory, from where copies to a device are faster."
    )
    curriculum_learning: Curriculum = option(Curriculum(), "Samples by difficulty.")
    dynamic_batching: DynamicBatching = option(DynamicBatching(), "Batches by tokens.")
    packing: Packing = option(Packing(), "Several samples in a row.")
    mixing: Mixing = option(Mixing(), "Several data sets in given proportions.")
    loss_weights: Literal["none", "samples", "tokens", "targets"] = option(
        "none",
        "Whose mean the loss of a step is: of micro-batches, or of samples, tokens, or tokens but "
        "the first of each "
        "sample, which a causal language model does not predict. Else than none, the model's loss "
        "is multiplied by the "
        "micro-batch's share of them, which batches, that must be mappings, have as loss_weight.",
    )
    pad_token_id: int = option(
        0,
        "Token that fills up input_ids, where batches are padded without a collate_fn, and packed "
        "rows.",
        ge=0,
    )

    def batch_remarks(self) -> Iterable[tuple[str, str]]:
        """Keys without effect, for want of another, and means that micro-batches distort."""
        dynamic = self.dynamic_batching
        unequal = self.dynamic_batching.enabled or self.packing.enabled
        if dynamic.sequence_picking_window and dynamic.sequence_picking_order != "seqlen":
            yield (
                "dynamic_batching.sequence_picking_window",
                "has no effect: sequence_picking_order is not seqlen",
            )
        if self.mixing.samples_per_epoch and not self.mixing.weights:
            yield "mixing.samples_per_epoch", "has no effect: mixing.weights is not given"
        if self.pad_token_id and not unequal:
            yield "pad_token_id", "has no effect: neither dynamic_batching nor packing is enabled"
        if self.enabled and unequal and self.loss_weights == "none":
            yield (
                "loss_weights",
                "is none: losses of unequal micro-batches are averaged with equal weights",
            )

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.packing.enabled and self.dynamic_batching.enabled:
            raise ValueError(
                "packing and dynamic_batching are both enabled; packed rows have a fixed number of "
                "tokens: disable one"
            )
        if self.mixing.weights and self.curriculum_learning.enabled:
            raise ValueError(
                "mixing.weights and curriculum_learning are both given; both decide which sample "
                "is next: use one"
            )
        return self


class RandomLTDSteps(Section):
    """How fast the kept length grows."""

    require_steps: int = option(..., "Steps until max_value is reached.", gt=0)
    seq_per_step: int = option(..., "The kept length is a multiple of this many tokens.", gt=0)


class RandomLTDSchedule(Section):
    """How many tokens a layer keeps, by step."""

    min_value: int = option(..., "Tokens kept at the first step.", gt=0)
    max_value: int = option(..., "Tokens kept at the end: the whole sequence.", gt=0)
    schedule_type: Literal["fixed_linear"] = option("fixed_linear", "How it grows: fixed_linear.")
    schedule_config: RandomLTDSteps = option(..., "The numbers of the schedule.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_value > self.max_value:
            raise ValueError(f"min_value {self.min_value} is more than max_value {self.max_value}")
        return self


class LayerTokenLR(Section):
    """A learning rate by the tokens that layers have seen."""

    enabled: bool = option(
        False, "Scale the learning rate by the tokens that layers have seen: not offered."
    )

    @field_validator("enabled")
    @classmethod
    def _off(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "is documented but unfinished in DeepSpeed, too; set it to false and use a "
                "scheduler"
            )
        return value


class RandomLTD(Section):
    """Random layer token drop: middle layers work on some of the tokens."""

    enabled: bool = option(False, "Let layers drop tokens.")
    total_layer_num: int | None = option(None, "Layers of the model.", gt=0)
    random_ltd_layer_num: int | None = option(None, "How many of them drop tokens.", gt=0)
    random_ltd_layer_id: list[Annotated[int, Field(ge=0)]] | None = option(
        None, "Which of them drop tokens, counted from 0.", min_length=1
    )
    model_mask_name: str | None = option(
        None, "Argument of a layer's forward that is the attention mask; null: none."
    )
    model_type: Literal["decoder", "encoder"] | None = option(
        None,
        "Kind of model.",
        without_effect="kept tokens stay in order, and masks are cut to them, in both kinds",
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = option(
        None, "Order of the dimensions of hidden states."
    )
    random_ltd_schedule: RandomLTDSchedule | None = option(
        None, "How many tokens a layer keeps, by step."
    )
    layer_token_lr_schedule: LayerTokenLR = option(LayerTokenLR(), "Not offered.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.enabled:
            return self
        needed = (
            "total_layer_num",
            "random_ltd_layer_num",
            "random_ltd_layer_id",
            "hidden_state_order",
        )
        for key in (*needed, "random_ltd_schedule"):
            if getattr(self, key) is None:
                raise ValueError(f"{key} must be given when random_ltd is enabled")
        ids = self.random_ltd_layer_id or []
        count = self.random_ltd_layer_num
        total = self.total_layer_num or 0
        if len(set(ids)) != len(ids):
            raise ValueError("random_ltd_layer_id names a layer twice")
        if len(ids) != count:
            raise ValueError(
                f"random_ltd_layer_id names {len(ids)} layers, and random_ltd_layer_num is {count}"
            )
        if max(ids) >= total:
            raise ValueError(
                f"random_ltd_layer_id names layer {max(ids)}, and total_layer_num is {total}"
            )
        return self


class DataRouting(Section):
    """Which tokens pass which layers."""

    enabled: bool = option(False, "Use this section.")
    random_ltd: RandomLTD = option(RandomLTD(), "Random layer token drop.")


class DataEfficiency(Section):
    """Fewer samples and tokens for the same result."""

    enabled: bool = option(False, "Use this section.")
    seed: int = option(1234, "Seed of the order of samples and of dropped tokens.", ge=0)
    data_sampling: DataSampling = option(
        DataSampling(), "Which samples come when, and in which batches."
    )
    data_routing: DataRouting = option(DataRouting(), "Which tokens pass which layers.")

    @property
    def sampling(self) -> DataSampling | None:
        """The sub-section data_sampling where it is in use."""
        return self.data_sampling if self.enabled and self.data_sampling.enabled else None

    @property
    def curriculum(self) -> Curriculum | None:
        """The sub-section data_sampling.curriculum_learning where it is in use."""
        found = self.sampling.curriculum_learning if self.sampling is not None else None
        return found if found is not None and found.enabled else None

    @property
    def random_ltd(self) -> RandomLTD | None:
        """The sub-section data_routing.random_ltd where it is in use."""
        on = self.enabled and self.data_routing.enabled and self.data_routing.random_ltd.enabled
        return self.data_routing.random_ltd if on else None

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Parts that are switched on inside a part that is off, and keys of another schedule."""
        sampling = self.data_sampling
        routing = self.data_routing
        if not self.enabled and (sampling.enabled or routing.enabled):
            yield "", "has no effect: enabled is false"
        inner = sampling.curriculum_learning.enabled or sampling.dynamic_batching.enabled
        if self.enabled and inner and not sampling.enabled:
            yield "data_sampling", "has no effect: its enabled is false"
        if self.enabled and routing.random_ltd.enabled and not routing.enabled:
            yield "data_routing", "has no effect: its enabled is false"
        for key, why in sampling.batch_remarks():
            yield f"data_sampling.{key}", why
        for name, metric in (self.curriculum.curriculum_metrics if self.curriculum else {}).items():
            for key, why in metric.schedule_remarks():
                yield f"data_sampling.curriculum_learning.curriculum_metrics.{name}.{key}", why


class LegacyCurriculum(Schedule):
    """A curriculum of sequence lengths, which the model's forward is given."""

    enabled: bool = option(False, "Pass the length of this step to the model.")
    curriculum_type: Literal["seqlen"] = option(
        "seqlen", "What the difficulty is: seqlen, which is passed to forward as curriculum_seqlen."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled:
            self.check_schedule()
            if self.min_difficulty == 0:
                raise ValueError(
                    "min_difficulty is 0, and sequences need a position; give the shortest length"
                )
        return self

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys of another schedule, and lengths that are bad for tensor cores."""
        if not self.enabled:
            return
        yield from self.schedule_remarks()
        if (step := self.schedule_config.difficulty_step or 8) % 8:
            yield (
                "schedule_config.difficulty_step",
                f"is {step}: lengths that are no multiple of 8 are slow on GPUs",
            )
