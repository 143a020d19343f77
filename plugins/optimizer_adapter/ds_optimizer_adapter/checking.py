"""Whether a grain that is stated, or that this package declares, can be right."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ds_core.entries import OptimizerEntry, resolve
from ds_core.errors import PluginError, Problem, did_you_mean
from ds_optimizer_adapter.names import KEY, UNNAMED

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins
    from ds_optimizer_adapter.config import OptimizerAdapter

log = logging.getLogger("ds_core.optimizer_adapter")

COARSENESS: Mapping[str, int] = {"element": 0, "tensor": 1, "matrix": 1, "model": 2}
"""A coarser grain than what is measured is safe, a finer one is not."""


def problems(
    config: RunConfig,
    plugins: Plugins,
    section: OptimizerAdapter | None,
    ours: Mapping[str, OptimizerEntry],
) -> Iterable[Problem]:
    """What is wrong with the grain of the config's optimizer.

    ours: what this package declares, by name.
    """
    chosen = config.core.optimizer
    # An optimizer that is given to `initialize` is made by the program: there is nothing to try.
    if chosen is None:
        return
    name = chosen.type
    offer = plugins.named("ds_optimizers", "optimizer").get(name.lower())
    declared: OptimizerEntry | None = offer.value if offer is not None else None
    if declared is not None and declared in ours.values():
        reference = declared.load
        yield from _unknown(name, resolve(reference), chosen.params)
    elif section is None:
        return
    elif "." not in name or _is_torch(name):
        why = f"optimizer {name!r} has declared what it needs whole"
        yield Problem(KEY, why, "remove the section optimizer_adapter")
        return
    else:
        reference = ":".join(name.rsplit(".", 1))
    grain = section.grain if section is not None else "element"
    # The core says what is wrong with the name or a parameter; there is nothing to measure then.
    with contextlib.suppress(PluginError):
        yield from _refuted(name, resolve(reference), chosen.params, grain, section is not None)


def _unknown(name: str, load: Callable[..., Any], params: Mapping[str, Any]) -> Iterable[Problem]:
    """Parameters that the constructor would take and never read."""
    known = {*inspect.signature(load).parameters, *UNNAMED} - {"params", "kwargs"}
    for key in sorted(params.keys() - known):
        fix = did_you_mean(key, sorted(known), f"it takes {', '.join(sorted(known))}")
        yield Problem(f"optimizer.params.{key}", f"{name} has no parameter {key!r}", fix)


def _is_torch(name: str) -> bool:
    return name.rpartition(".")[0] == "torch.optim"


def _refuted(
    name: str, load: Callable[..., Any], params: Mapping[str, Any], grain: str, stated: bool
) -> Iterable[Problem]:
    """The problem with `grain` of the optimizer `load`, if a measurement refutes it."""
    from ds_optimizer_adapter.measuring import measure_grain

    measured = measure_grain(partial(load, **params))
    if measured.grain is None:
        log.info("the grain of optimizer %r is not measured: %s", name, measured.why)
    elif COARSENESS[measured.grain] > COARSENESS[grain]:
        whose = "is stated" if stated else f"is that of {name} with its defaults"
        path = KEY if stated else "optimizer.params"
        yield Problem(
            path,
            f"grain {grain!r} {whose}, but with these optimizer.params {measured.why}",
            f'set {KEY} to "{measured.grain}", which not every layout can give, or use AdamW',
        )
