"""The offload keys of ``zero_optimization``: where states are kept, and ZenFlow (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ds_core.config import Section, option

_DISK_KEYS = (
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
)
"""Keys of stores that free memory; they are passed to the store as options."""


class _Place(Section):
    """The keys of both offload sections: a store, and whether its memory is page-locked."""

    device: str = option(
        "none", '"none", "cpu", or the name of a state store that a plugin offers.', min_length=1
    )
    pin_memory: bool = option(
        False,
        "Page-lock the host memory, so that copies overlap with the device's work; such memory is "
        "never swapped.",
    )

    @property
    def on(self) -> bool:
        """Whether anything is offloaded."""
        return self.device.lower() != "none"

    @property
    def options(self) -> dict[str, Any]:
        """The store's options: every key except `device`."""
        return {k: v for k, v in dict(self).items() if k != "device"}

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys without effect on this device."""
        fields = type(self).model_fields
        changed = [
            k
            for k in fields
            if k in self.model_fields_set and getattr(self, k) != fields[k].get_default()
        ]
        if not self.on:
            unused = [k for k in changed if k != "device"]
        elif self.device.lower() == "cpu":
            unused = [k for k in changed if k in _DISK_KEYS]
        else:
            return
        for key in unused:
            yield key, f"has no effect with device {self.device!r}"


class OffloadParam(_Place):
    """Where the parameters of stage 3 are kept between uses."""

    nvme_path: str | None = option(
        None, 'Folder on the NVMe device, for device "nvme".', min_length=1
    )
    buffer_count: int = option(5, "NVMe: buffers in the pool.", ge=1)
    buffer_size: int = option(100_000_000, "NVMe: elements per buffer.", ge=1)
    max_in_cpu: int = option(1_000_000_000, "NVMe: elements that stay in memory.", ge=0)


class OffloadOptimizer(_Place):
    """Where master weights and optimizer states are kept; the optimizer then runs on the host."""

    ratio: float = option(
        1.0,
        "Stage 3: the share of elements that is offloaded; the others stay on the device.",
        ge=0,
        le=1,
    )
    nvme_path: str | None = option(
        None, 'Folder on the NVMe device, for device "nvme".', min_length=1
    )
    buffer_count: int = option(4, "NVMe: buffers in the pool.", ge=1)
    pipeline_read: bool = option(False, "NVMe: read the next tile while this one is computed.")
    pipeline_write: bool = option(False, "NVMe: write the last tile while this one is computed.")
    fast_init: bool = option(False, "NVMe: faster initialisation.")
    super_offload: bool = option(
        False,
        "Update each bucket on the host during backward, as soon as its gradients are reduced; "
        "exact.",
    )
    cpuadam_cores_perc: float = option(
        0.8,
        "super_offload: the share of this rank's threads that updates use during backward.",
        ge=0,
        le=1,
    )

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Also a share without `super_offload`."""
        yield from super().remarks(given)
        if self.on and not self.super_offload and "cpuadam_cores_perc" in self.model_fields_set:
            yield "cpuadam_cores_perc", "has no effect without super_offload"


class ZenFlowConfig(Section):
    """Which columns are updated on the device in every step; the host updates the others later."""

    topk_ratio: float = option(
        0.1, "The share of a weight's columns that are updated in every step.", ge=0, le=1
    )
    select_strategy: Literal["auto", "step", "epoch"] = option(
        "auto",
        "The unit of select_interval; auto: each epoch, or 100 steps where the length of one is "
        "not known.",
    )
    select_interval: Annotated[int, Field(ge=1)] | Literal["auto"] = option(
        "auto",
        "Steps or epochs until columns are chosen again; needed unless select_strategy is auto.",
    )
    update_interval: Annotated[int, Field(ge=1)] | Literal["auto"] = option(
        "auto",
        "Steps after which the other columns are updated with the mean gradient; auto: see "
        "auto_ratio.",
    )
    overlap_step: bool = option(
        False,
        "The host updates while training continues; its weights are used one update_interval later.",
    )
    offload: bool = option(
        False, "Keep the states of chosen columns on the host between steps, too."
    )
    auto_ratio: float = option(
        0.99,
        "update_interval auto: the share of weights whose other columns have added up to the "
        "chosen.",
        ge=0,
        le=1,
    )
    full_warm_up_rounds: int = option(
        0, "The first steps, which update everything on the host.", ge=0
    )
    pt_reserved_cores_perc: float = option(
        0.5,
        "overlap_step: the share of this rank's cores that the host's updates leave to torch.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _intervals(self) -> ZenFlowConfig:
        select = self.select_interval
        update = self.update_interval
        if self.select_strategy != "auto" and select == "auto":
            raise ValueError(
                "select_interval must be a number where select_strategy is "
                f"{self.select_strategy!r}"
            )
        if (
            self.select_strategy == "step"
            and isinstance(select, int)
            and isinstance(update, int)
            and select < update
        ):
            raise ValueError(
                f"select_interval is {select}, less than update_interval, {update}; columns can be "
                f"chosen at the beginning of an interval only, so use at least {update}"
            )
        return self

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys without effect beside others."""
        if self.select_strategy == "auto" and self.select_interval != "auto":
            yield "select_interval", "has no effect with select_strategy 'auto'"
        if self.update_interval != "auto" and "auto_ratio" in given:
            yield "auto_ratio", "has no effect with a number for update_interval"
        if not self.overlap_step and "pt_reserved_cores_perc" in given:
            yield "pt_reserved_cores_perc", "has no effect without overlap_step"
