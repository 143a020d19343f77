"""``checkpoint`` by hand, and the settings that it goes by, with the names and the meaning of
DeepSpeed's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ds_state_stores.host_copies import HostCopies
from pydantic import ValidationError

from ds_activation_checkpointing.arena import Arena
from ds_activation_checkpointing.config import ActivationCheckpointingConfig
from ds_activation_checkpointing.inputs import Keeper
from ds_activation_checkpointing.recompute import Options, recompute
from ds_activation_checkpointing.timing import Watch
from ds_core.accelerator import get_accelerator
from ds_core.errors import ConfigError, UsageError
from ds_core.process import log_once

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_core.accelerator import Accelerator

log = logging.getLogger("ds_activation_checkpointing")


@dataclass(frozen=True, slots=True)
class Settings:
    """How functions are recomputed."""

    keeper: Keeper = field(default_factory=Keeper)
    """Where their inputs are kept."""
    watch: Watch | None = None
    """Times them; None: nobody reads times."""

    @classmethod
    def of(
        cls,
        section: ActivationCheckpointingConfig,
        group: ProcessGroup | None,
        accelerator: Accelerator,
    ) -> Settings:
        """What the section says.

        group: the ranks that keep a part each of every activation; None: none.
        """
        timed = section.profile or section.synchronize_checkpoint_boundary
        arena = (
            Arena(section.number_checkpoints or 1)
            if section.contiguous_memory_optimization
            else None
        )
        if arena is not None and section.cpu_checkpointing:
            log_once(
                log,
                logging.INFO,
                "contiguous_memory_optimization has no effect: host memory is used again anyway",
            )
            arena = None
        return cls(
            Keeper(
                group=group,
                copies=HostCopies(accelerator) if section.cpu_checkpointing else None,
                arena=arena,
            ),
            Watch(
                accelerator,
                logs=section.profile,
                synchronize=section.synchronize_checkpoint_boundary,
            )
            if timed
            else None,
        )

    def options(self, name: str = "", policy: str = "all") -> Options:
        """For one function."""
        return Options(name, keeper=self.keeper, policy=policy, watch=self.watch)


class _By(Enum):
    """Who has chosen the settings."""

    NOBODY = 0
    RUN = 1
    PROGRAM = 2


class _Present:
    """The settings of this process."""

    settings = Settings()
    by = _By.NOBODY
    # The arguments of `configure`: its mpu, and the others as keys of the section.
    mpu: Any = None
    values: Mapping[str, Any] = {}


def use_settings(settings: Settings) -> None:
    """Those of a run, unless the program has called `configure`."""
    if _Present.by is not _By.PROGRAM:
        _Present.settings = settings
        _Present.by = _By.RUN


def forget_settings(settings: Settings) -> None:
    """The run of these settings has ended."""
    if _Present.settings is settings:
        _Present.settings = Settings()
        _Present.by = _By.NOBODY


def present_mpu() -> Any:
    """What `configure` was given as `mpu_`."""
    return _Present.mpu


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose how `checkpoint` keeps inputs.

    Arguments win over the section ``activation_checkpointing``.

    ``mpu_``: has ``get_tensor_model_parallel_group`` or ``get_model_parallel_group``, the ranks
    over which activations are partitioned.

    deepspeed_config: a dict, or the path of a JSON file.

    Raises ConfigError where they do not fit.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    values = {**_section_of(deepspeed_config), **{k: v for k, v in given.items() if v is not None}}
    section = _parse(values)
    group = None
    if section.partition_activations:
        getters = (
            getattr(mpu_, f"get_{kind}_parallel_group", None) for kind in ("tensor_model", "model")
        )
        group = next((getter() for getter in getters if getter is not None), None)
        if group is None:
            log_once(
                log,
                logging.INFO,
                "partition_activations has no effect: mpu_ has no model-parallel group",
            )
    _Present.settings = Settings.of(section, group, get_accelerator())
    _Present.mpu = mpu_
    _Present.by = _By.PROGRAM
    _Present.values = values


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Change `configure`'s partition_activations."""
    _change(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Change `configure`'s num_checkpoints."""
    _change(number_checkpoints=nlayers)


def _change(**changes: Any) -> None:
    if _Present.by is _By.RUN:
        raise UsageError(
            f"{', '.join(changes)}: the section activation_checkpointing of the run says it; "
            "change it there, or call configure first"
        )
    values = _Present.values if _Present.by is _By.PROGRAM else {}
    configure(_Present.mpu, {"activation_checkpointing": {**values, **changes}})


def _parse(values: Mapping[str, Any]) -> ActivationCheckpointingConfig:
    try:
        return ActivationCheckpointingConfig.model_validate(values)
    except ValidationError as error:
        from ds_core.config.translate import translate_errors

        path = "activation_checkpointing"
        owner = "dscore-activation-checkpointing"
        raise ConfigError(
            translate_errors(error, ActivationCheckpointingConfig, path, owner=owner, data=values)
        ) from None


def _section_of(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str):
        with open(config, encoding="utf-8") as stream:
            config = json.load(stream)
    if isinstance(config, Mapping):
        return config.get("activation_checkpointing") or {}
    found = getattr(config, "activation_checkpointing_config", None)  # a DeepSpeedConfig
    return dict(vars(found)) if found is not None else {}


def is_configured() -> bool:
    """Whether `configure` was called, or a run with the section ``activation_checkpointing``
    lives."""
    return _Present.by is not _By.NOBODY


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose activations are recomputed in backward.

    The second run has the same random numbers.
    """
    return checkpoint_with(_Present.settings, function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint


def checkpoint_with(
    settings: Settings, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`checkpoint` with settings of one's own."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return recompute(function, args, kwargs, settings.options(name))


class CheckpointFunction:
    """`checkpoint` under the name and with the call of DeepSpeed's autograd function."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """``checkpoint(run_function, *args)``; the outputs, tensors or not, are appended to
        `all_outputs` too.
        """
        out = checkpoint(run_function, *args)
        all_outputs += out if isinstance(out, tuple) else [out]
        return out


def reset() -> None:
    """Give back memory of forwards that had no backward, as in evaluation."""
    _Present.settings.keeper.reset()
