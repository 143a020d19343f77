"""The kernel table: named operations, the providers that offer them, and which one serves
(torch-free).

An operation is known by its name alone. Providers (compiled code, or the pure-torch reference that
defines what an operation means) announce themselves through `ds_kernels`. The highest priority that
is available serves, or the provider that ``"kernels": {"op": "provider"}`` forces. With no provider
installed, callers fall back on plain torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ds_core.entries import KernelEntry, ask, resolve
from ds_core.errors import KernelError, PluginError
from ds_core.moved import names_of

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core.plugins import Found, Plugins

__getattr__ = names_of(__name__)
__path__: list[str] = []  # for modules that were below it and have moved

log = logging.getLogger("ds_core.kernels")

Function = Callable[..., Any]

MANY = 1 << 14
"""From so many elements on, calling a kernel takes less time than torch's own sum of two dtypes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A provider of an operation and, when it cannot serve here, the reason.

    meant: whether it says that it serves tensors of this device and dtype.
    """

    entry: KernelEntry
    plugin: Found
    reason: str | None
    meant: bool = True

    @property
    def dist(self) -> str:
        """The distribution that offers it."""
        return self.plugin.dist

    @property
    def claim(self) -> tuple[object, ...]:
        """What tells entries of one operation apart."""
        return self.entry.provider, self.entry.devices, self.entry.dtypes

    def __str__(self) -> str:
        return f"{self.entry.provider} ({self.dist})" + (f": {self.reason}" if self.reason else "")


class _Served(NamedTuple):
    """What serves one (op, device, dtype).

    better: why providers of a higher priority do not.
    """

    by: str
    better: tuple[str, ...] = ()


_Key = tuple[str, str, str]  # operation, device type, dtype


@runtime_checkable
class UsesKernels(Protocol):
    """An optimizer whose updates are kernels, and which takes them from the run's table."""

    def use_kernels(self, kernels: Kernels) -> None:
        """Resolve kernels by this table from now on."""


class Kernels:
    """Resolves (op, device, dtype) to a function; each answer is found once and then kept."""

    def __init__(self, plugins: Plugins, forced: Mapping[str, str] | None = None) -> None:
        self._plugins = plugins
        self._forced = dict(forced or {})
        self._broken: dict[KernelEntry, str] = {}
        self._functions: dict[_Key, Function] = {}
        self._served: dict[_Key, _Served] = {}

    @cached_property
    def _entries(self) -> dict[str, list[tuple[KernelEntry, Found]]]:
        """Those of each operation, best first."""
        offered = [
            (entry, a.plugin) for a in self._plugins.offers("ds_kernels") for entry in a.value
        ]
        table: dict[str, list[tuple[KernelEntry, Found]]] = {}
        for entry, plugin in sorted(offered, key=lambda r: (-r[0].priority, r[0].provider)):
            table.setdefault(entry.op, []).append((entry, plugin))
        return table

    def ops(self) -> list[str]:
        """Every operation that an installed plugin offers."""
        return sorted(self._entries)

    def candidates(self, op: str, device: str, dtype: str) -> list[Candidate]:
        """The providers of `op`, best first, each with the reason why it cannot serve, if it
        cannot.

        Raises KernelError when no provider offers `op`.
        """
        rows = self._entries.get(op)
        if rows is None:
            from ds_core.catalogue import missing

            raise KernelError(
                str(missing("kernels", op, self.ops(), more=self._plugins.quarantined()))
            )
        return [self._candidate(entry, plugin, device, dtype) for entry, plugin in rows]

    def _candidate(self, entry: KernelEntry, plugin: Found, device: str, dtype: str) -> Candidate:
        for served, wanted in ((entry.devices, device), (entry.dtypes, dtype)):
            if served and wanted not in served:
                return Candidate(entry, plugin, f"serves {', '.join(served)} only", meant=False)
        return Candidate(entry, plugin, self._broken.get(entry) or ask(entry.available))

    def get(
        self, op: str, device: str = "cpu", dtype: str = "float32", default: Function | None = None
    ) -> Function:
        """The function that serves `op` for tensors of `dtype` on `device` (names as torch prints
        them).

        default: what to use when no installed provider can serve. Without one, and when the config
        forces a provider that cannot serve, raises KernelError with the reason of each provider.
        """
        key = (op, device, dtype)
        if key not in self._functions:
            self._functions[key] = self._resolve(key, default)
        return self._functions[key]

    def serving(self, op: str, like: Tensor, default: Function | None = None) -> Function:
        """`get` for tensors of the device and dtype of `like`."""
        return self.get(op, like.device.type, str(like.dtype).removeprefix("torch."), default)

    def accumulate(self, into: Tensor, added: Tensor) -> None:
        """``into += added``: by kernel ``accumulate`` where fp32 takes in many 16-bit elements,
        else by torch.
        """
        widens = (
            into.dtype.itemsize == 4 and added.dtype.itemsize == 2 and added.is_floating_point()
        )
        if (
            widens
            and into.is_floating_point()
            and added.numel() >= MANY
            and added.layout == into.layout
        ):
            self.serving("accumulate", into, _accumulate)([into], [added])
        else:
            into.add_(added)

    def resolve_all(self, device: str, dtype: str) -> None:
        """Resolve every operation for such tensors; one without a provider is an error only when it
        is used.
        """
        # Now, so that ranks can compare who serves before they train.
        for op in self.ops():
            try:
                self.get(op, device, dtype)
            except KernelError as error:
                if op in self._forced:
                    raise
                log.debug("%s", error)
                self._served[op, device, dtype] = _Served("nobody")

    def resolved(self) -> dict[str, str]:
        """``op/device/dtype`` -> provider for what was resolved so far: part of the cross-rank
        fingerprint.
        """
        return {"/".join(key): served.by for key, served in self._served.items()}

    def summary(self) -> tuple[str, list[str]]:
        """For the log: which provider serves which operations, and why a better one that is
        installed does not.
        """
        rows = sorted(self._served.items())
        serving = _joined("by", ((served.by, op) for (op, *_), served in rows))
        return "; ".join(serving), _joined(
            "not by", ((why, op) for (op, *_), served in rows for why in served.better)
        )

    def check_forced(self) -> None:
        """Raise KernelError now for a ``kernels`` entry of an unknown op or provider; a known one
        takes part.
        """
        for op, provider in self._forced.items():
            offered = {c.entry.provider: c.plugin for c in self.candidates(op, "", "")}
            if provider not in offered:
                names = ", ".join(sorted(offered))
                broken = self._plugins.quarantined()
                raise KernelError(
                    f"kernels.{op}: no provider {provider!r}; installed: {names}{broken}"
                )
            self._plugins.join(offered[provider])

    def _resolve(self, key: _Key, default: Function | None) -> Function:
        op, device, dtype = key
        forced = self._forced.get(op)
        default = default if forced is None else None
        if default is not None and op not in self._entries:
            return default
        asked = [c for c in self.candidates(*key) if forced in (None, c.entry.provider)]
        best = next((c for c in asked if c.reason is None), None)
        if best is None:
            if default is not None:
                return default
            head = (
                f"kernels.{op} forces {forced!r}, but"
                if forced
                else f"no provider can serve {op!r}:"
            )
            why = "; ".join(map(str, asked)) or "no provider offers it"
            raise KernelError(f"{head} {why} on {device} {dtype}")
        better = asked[: asked.index(best)]
        # Two that claim the same with one name: which one serves would depend on file order.
        rest = asked[asked.index(best) + 1 :]
        if twin := next((c for c in rest if c.reason is None and c.claim == best.claim), None):
            raise KernelError(
                f"kernel {op!r} provider {best.entry.provider!r} is offered by {best.dist} and "
                f"{twin.dist}; disable one with plugins.disable"
            )
        try:
            function: Function = resolve(best.entry.load)
            if not callable(function):
                raise PluginError(f"{best.entry.load!r} is not a function")
        except PluginError as error:
            why = f"plugin {best.plugin} failed in ds_kernels: {error}"
            if forced is not None:
                raise KernelError(f"kernels.{op} forces {forced!r}, but {why}") from error
            self._broken[best.entry] = why  # the next one serves; ranks compare providers at start
            return self._resolve(key, default)
        self._served[key] = _Served(
            str(best), () if forced else tuple(str(c) for c in better if c.meant)
        )
        log.debug("kernel %s on %s %s is served by %s", *key, best)
        return function


def _accumulate(into: list[Tensor], added: list[Tensor]) -> None:
    """Kernel ``accumulate`` by plain torch."""
    for total, more in zip(into, added, strict=True):
        total.add_(more)


def _joined(word: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """(text, operation) pairs -> one "operation, operation WORD text" for each text."""
    found: dict[str, dict[str, None]] = {}
    for text, op in pairs:
        found.setdefault(text, {})[op] = None
    return [f"{', '.join(ops)} {word} {text}" for text, ops in found.items()]
