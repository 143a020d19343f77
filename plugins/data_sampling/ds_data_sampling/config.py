"""The section ``data_efficiency``, and what it says of batches (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from ds_core.config import Section, option
from ds_data_sampling.curricula.config import Curriculum
from ds_data_sampling.random_ltd_config import DataRouting, RandomLTD

Count = Annotated[int, Field(gt=0)]


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
    """Several datasets in given proportions."""

    weights: dict[str, Annotated[float, Field(gt=0)]] | None = option(
        None,
        "Dataset -> its share of the samples, in any unit. training_data is then a mapping of "
        'these names to datasets, or a list of datasets, named "0", "1" and so on.',
        min_length=1,
    )
    samples_per_epoch: Count | None = option(
        None, "Samples of an epoch of all datasets together; null: as many as they have."
    )


class DataSampling(Section):
    """The order of the samples, and how they form batches."""

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
    mixing: Mixing = option(Mixing(), "Several datasets in given proportions.")
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


class DataEfficiency(Section):
    """Fewer samples and tokens for the same result."""

    enabled: bool = option(False, "Use this section.")
    seed: int = option(1234, "Seed of the order of samples and of dropped tokens.", ge=0)
    data_sampling: DataSampling = option(
        DataSampling(), "The order of the samples, and how they form batches."
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
