"""Schedules and the sampler under DeepSpeed's names, with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ds_core.errors import UsageError
from ds_data_sampling.batching.order import make_order
from ds_data_sampling.config import DataEfficiency
from ds_data_sampling.curricula.config import Schedule
from ds_data_sampling.curricula.schedules import difficulty_at
from ds_data_sampling.random_ltd import kept_length
from ds_data_sampling.random_ltd_config import RandomLTD


class CurriculumScheduler:
    """The difficulty of a metric, step by step.

    config: ``min_difficulty``, ``max_difficulty``, ``schedule_type`` and ``schedule_config``; other
        keys, as those of a metric, are left to others.

    Raises ValueError for a schedule that is not complete.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._schedule = Schedule.model_validate(
            {k: v for k, v in config.items() if k in Schedule.model_fields}
        )
        self._schedule.check_schedule()
        self._function: Callable[[int], int] | None = None
        given = self._schedule.model_dump(exclude_none=True)
        self.state: dict[str, Any] = {**given, "current_difficulty": self._schedule.min_difficulty}

    def get_current_difficulty(self) -> int:
        """The difficulty of the last update."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Go on from `difficulty`."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """The function (step from 1) -> difficulty of a custom schedule."""
        self._function = schedule_function

    def get_state(self) -> dict[str, Any]:
        """The schedule and the difficulty."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with its schedule."""
        self._schedule = Schedule.model_validate(
            {k: v for k, v in state.items() if k in Schedule.model_fields}
        )
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of the step `global_steps`, which counts from 1."""
        return difficulty_at(self._schedule, global_steps, self._function)

    def update_difficulty(self, global_steps: int) -> int:
        """Be at the step `global_steps`; a difficulty that has come to its end stays there."""
        if self.get_current_difficulty() < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()


class DeepSpeedDataSampler:
    """Batches of indices for a torch DataLoader (``batch_sampler``): one micro-batch of this rank
    after the other.

    data_efficiency_config: the section. All ranks plan all steps, so no messages are sent and no
        file is written; data_parallel_group, an object with ``size()``, and global_rank are not
        needed. Where an epoch ends in the middle of a step, the next one fills it up.
    drop_last: whether the last step of all, where it is not whole, is left out.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise UsageError(
                f"data_parallel_rank is {data_parallel_rank} of {data_parallel_size} ranks"
            )
        if min(micro_batch_size, one_epoch_total_samples) < 1:
            raise UsageError(
                f"{one_epoch_total_samples} samples in batches of {micro_batch_size}: both must be "
                "positive"
            )
        section = DataEfficiency.model_validate(_switched_on(data_efficiency_config))
        self._schedules: dict[str, Callable[[int], int]] = {}
        self._order = make_order(section, one_epoch_total_samples, schedules=self._schedules)
        self._order.start(0)
        self._micro = micro_batch_size
        self._rank = data_parallel_rank
        self._ranks = data_parallel_size
        self._step_samples = micro_batch_size * data_parallel_size * gradient_accumulation_steps
        self._drop_last = drop_last
        self._epoch = 0
        self._whole = one_epoch_total_samples * section.data_sampling.num_epochs
        self.consumed_samples = 0
        self.curriculum_step = 0
        self._batch: list[int] = []

    def __len__(self) -> int:
        """Samples of all epochs."""
        return self._whole

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Functions (step from 1) -> difficulty, by metric, for those whose schedule_type is
        custom.
        """
        self._schedules.update(schedule_func_dict)

    def __iter__(self) -> Iterator[list[int]]:
        """From the position on: this rank's part of each round of micro-batches."""
        while self.consumed_samples < self._whole:
            if not self._batch:
                self._batch = self._next_step()
            size = self._micro * self._ranks
            current = self._batch[:size]
            self._batch = self._batch[size:]
            if len(current) < size and self._drop_last:
                return
            self.consumed_samples += len(current)
            start, end = (
                round(rank * len(current) / self._ranks) for rank in (self._rank, self._rank + 1)
            )
            yield current[start:end]

    def _next_step(self) -> list[int]:
        count = min(self._step_samples, self._whole - self.consumed_samples)
        found = self._order.take(count, self.curriculum_step)
        while len(found) < count:
            self._epoch += 1
            self._order.start(self._epoch)
            found += self._order.take(count - len(found), self.curriculum_step)
        self.curriculum_step += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position, equal on all ranks, with ``current_difficulties`` and
        ``curriculum_step``."""
        return {
            "batch": list(self._batch),
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(getattr(self._order, "difficulties", {})),
            "epoch": self._epoch,
            "order": self._order.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises UsageError for DeepSpeed's, whose order of samples cannot be continued.
        """
        if "order" not in state_dict:
            raise UsageError(
                "this state of a DeepSpeedDataSampler is DeepSpeed's; start a new order of samples "
                "instead"
            )
        self._batch = list(state_dict["batch"])
        self.consumed_samples = state_dict["consumed_samples"]
        self.curriculum_step = state_dict["curriculum_step"]
        self._epoch = state_dict["epoch"]
        self._order.load_state_dict(state_dict["order"])


def _switched_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section, where whoever makes a sampler has decided that it is in use."""
    return {
        **config,
        "enabled": True,
        "data_sampling": {**config.get("data_sampling", {}), "enabled": True},
    }


class RandomLTDScheduler:
    """How many tokens layers keep now: a view of a run whose config has ``random_ltd``, to read.

    The schedule follows the run's steps, so there is nothing to set or to save.
    """

    def __init__(self, engine: Any, section: RandomLTD) -> None:
        self._engine = engine
        self._section = section
        self.model_layer_num = section.total_layer_num
        self.random_ltd_layer_num = section.random_ltd_layer_num
        self.global_batch_size = engine.train_batch_size()

    def get_current_seq(self) -> int:
        """Tokens that a layer which drops some keeps."""
        return kept_length(self._section, self._engine.global_steps)

    def get_random_ltd_layer_num(self) -> int:
        """Layers that drop tokens."""
        return int(self.random_ltd_layer_num or 0)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Tokens that all layers work on in so many steps from the first one."""
        return sum(self._layer_tokens(step) for step in range(train_iters))

    def _layer_tokens(self, step: int) -> int:
        plan = self._section.random_ltd_schedule
        assert plan is not None
        whole = int(self.model_layer_num or 0) - self.get_random_ltd_layer_num()
        kept = self.get_random_ltd_layer_num() * kept_length(self._section, step)
        return int(self.global_batch_size) * (kept + whole * plan.max_value)

    @property
    def state(self) -> dict[str, Any]:
        """The schedule's numbers, under DeepSpeed's names."""
        plan = self._section.random_ltd_schedule
        assert plan is not None
        step = self._engine.global_steps
        return {
            "min_value": plan.min_value,
            "max_value": plan.max_value,
            "current_value": self.get_current_seq(),
            "schedule_config": plan.schedule_config.model_dump(),
            "schedule_type": plan.schedule_type,
            "consumed_layer_tokens": self.get_total_layer_tokens(step),
            "current_steps": step - 1,
        }

    def get_state(self) -> dict[str, Any]:
        """`state`."""
        return self.state

    state_dict = get_state


def random_ltd_schedule(engine: Any) -> RandomLTDScheduler | None:
    """The schedule of an engine's run; None where no tokens are dropped."""
    section = engine.ctx.config.section(DataEfficiency)
    routing = section.random_ltd if section is not None else None
    return None if routing is None else RandomLTDScheduler(engine, routing)
