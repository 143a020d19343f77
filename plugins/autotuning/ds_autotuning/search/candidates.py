"""From a setting to the config of its trial, or to the reason why it is not tried: refused, or too
large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_autotuning.records import Forecast, Result, Status
from ds_autotuning.search.space import MICRO, Setting, Space, merged
from ds_core.config import Section
from ds_core.errors import ConfigError, DSError, Problem

if TYPE_CHECKING:
    from ds_autotuning.config import Autotuning
    from ds_core.config import Batch
    from ds_core.setup.compose import Composition

TRAIN = "train_batch_size"
GAS = "gradient_accumulation_steps"
BATCH = (TRAIN, MICRO, GAS)


@dataclass(frozen=True)
class Candidate:
    """A setting and what is known of it before it is run.

    config: whole; None where it is refused.
    """

    setting: Setting
    config: Mapping[str, Any] | None
    chosen: Composition | None = None
    batch: Batch | None = None
    forecast: Forecast | None = None
    refused: Result | None = None


class Judge:
    """Gives the `Candidate` of a setting.

    base: the config as given, without the section ``autotuning``.
    world: ranks.
    forecast: bytes of a composed config; None: cannot tell.
    refuses: why a forecast does not fit; "" where it does.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        space: Space,
        world: int,
        section: Autotuning,
        forecast: Callable[[Composition], Forecast | None],
        refuses: Callable[[Forecast], str],
    ) -> None:
        self.base = base
        self.space = space
        self.world = world
        self.section = section
        self._forecast = forecast
        self._refuses = refuses

    def __call__(self, setting: Setting) -> Candidate:
        """Merge, check as training would, and foretell memory."""
        try:
            config = merged(self.base, setting, self.space)
            chosen, dp = replicas(config, self.world, self.section.mp_size)
            config |= self.batch_keys(config, setting, dp)
            chosen = checked(config)
            batch = chosen.batch(dp)
            forecast = self._forecast(chosen)
        except DSError as error:
            return Candidate(setting, None, refused=Result(Status.INVALID, _in_a_line(error)))
        found = Candidate(setting, config, chosen, batch, forecast)
        if forecast is not None and (why := self._refuses(forecast)):
            return dataclasses.replace(found, refused=Result(Status.DOES_NOT_FIT, why))
        return found

    def batch_keys(self, config: Mapping[str, Any], setting: Setting, dp: int) -> dict[str, int]:
        """The three batch sizes.

        A global batch that the config gives stays, unless bounds for it are given.

        Raises ConfigError where they do not multiply out, or leave the bounds.
        """
        low = self.section.min_train_batch_size
        high = self.section.max_train_batch_size
        train, micro, gas = (_number(config.get(key)) for key in BATCH)
        if micro is None:
            return {}
        # A global batch that is given decides the number of accumulation steps.
        unit = micro * dp
        if train is not None and high is None and low == 1 and TRAIN not in setting:
            if train % unit:
                why = (
                    f"micro-batches of {micro} on {dp} replicas do not divide train_batch_size "
                    f"{train}"
                )
                raise ConfigError([Problem(MICRO, why)])
            return {TRAIN: train, MICRO: micro, GAS: train // unit}
        # Else the config's accumulation steps, or as many more or fewer as the bounds ask for.
        steps = gas or 1
        steps = max(steps, -(-low // unit))
        if high is not None:
            steps = min(steps, high // unit)
        if steps < 1 or steps * unit < low:
            why = (
                f"micro-batches of {micro} on {dp} replicas make no global batch from {low} to "
                f"{high}"
            )
            raise ConfigError([Problem(MICRO, why)])
        return {TRAIN: steps * unit, MICRO: micro, GAS: steps}


def checked(config: Mapping[str, Any]) -> Composition:
    """The config as training would check it; "auto" may be left for the script.

    Raises ConfigError or PluginError.
    """
    from ds_core.setup.compose import compose

    return compose(dict(config), fill_later=True)


def replicas(config: Mapping[str, Any], world: int, mp_size: int) -> tuple[Composition, int]:
    """How many ranks get batches of their own, with the script's own model parallelism where
    nothing else divides.
    """
    # The batch is not known yet; one that fits everything stands for it.
    chosen = checked({**config, TRAIN: None, MICRO: 1, GAS: 1})
    dp = chosen.mesh(world).size("batch")
    # The script may divide the model by itself, which no section of the config says.
    if dp == world and world % mp_size == 0:
        dp //= mp_size
    return chosen, dp


def micro_batches(
    section: Autotuning, base: Mapping[str, Any], dp: int, most: int, own: Any = ()
) -> list[int]:
    """Sizes worth a trial, ascending: powers of two from the least; with a given global batch, what
    divides it.

    most: none is larger.
    own: the user's sizes, instead; the bounds hold for them too.
    """
    low = section.min_train_micro_batch_size_per_gpu
    high = section.max_train_micro_batch_size_per_gpu
    high = min(high, most)
    if section.max_train_batch_size is not None:
        high = min(high, section.max_train_batch_size // dp)
    if own:
        return sorted(int(size) for size in own if low <= int(size) <= most)
    train = _number(base.get(TRAIN))
    if (
        train is not None
        and section.max_train_batch_size is None
        and section.min_train_batch_size == 1
    ):
        # Of a given global batch, only sizes that divide a replica's share can be used.
        share = train // dp
        sizes = [n for n in range(low, min(high, share) + 1) if share % n == 0]
        thin: list[int] = []
        for size in sizes:  # 1, 2, 4, 8 of 1, 2, 3, 4, 6, 8: neighbours differ little
            if not thin or size >= 1.5 * thin[-1]:
                thin.append(size)
        return thin
    sizes = [low * 2**n for n in range(64) if low * 2**n <= high]
    return [*sizes, high] if sizes and high >= 1.5 * sizes[-1] else sizes


def without_output(config: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides that keep trials from writing into the folders, and accounts, of the user's
    runs."""
    sections = checked({**config, TRAIN: None, MICRO: 1, GAS: 1}).config.sections
    changed: dict[str, Any] = {}
    for name, section in sections.items():
        if isinstance(section, Section) and section.writes_outside:
            off = {key: type(getattr(section, key))() for key in section.writes_outside}
            changed[name] = {**config[name], **off}
    return changed


def documented_bytes(parameters: int, stage: int, replicas: int, half: bool, mp_size: int) -> float:
    """Model states of one rank by the documented estimate, for a model that was not measured.

    Weights and gradients 2 bytes each in 16 bits, 4 otherwise; optimizer states 16 and 8 bytes.
    Stage 1 divides the optimizer states by the replicas, stage 2 gradients too, stage 3 weights
    too.
    """
    weights, gradients, states = (2, 2, 16) if half else (4, 4, 8)
    parts = (states / (replicas if stage >= 1 else 1), gradients / (replicas if stage >= 2 else 1))
    return parameters * (sum(parts) + weights / (replicas if stage >= 3 else 1)) / mp_size


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
