"""The kernel table: named operations, competing providers, resolved once to a plain function.

A kernel's pure-torch *reference* defines its meaning. Providers (C++, CUDA, Triton) announce themselves through
`ds_kernels`; the highest available priority serves, or the one that ``"kernels": {"op": "provider"}`` forces.

[Note: portions] A function that updates many tensors in place may have an attribute ``together``: a function of one
argument, a function that it calls. Calls of the kernel in there may return before their work is done (what they were
given must stay as it is); it is done when ``together`` returns. So one portion is worked on while the next is prepared.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ds_core.entries import KernelEntry, ask, resolve
from ds_core.errors import KernelError, PluginError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core.plugins import Found, Plugins

__all__ = ["Candidate", "Kernels", "portion_sizes"]

log = logging.getLogger("ds_core.kernels")

MANY = 1 << 14
"""From so many elements on a call of a kernel takes less than torch's own sum of two dtypes."""


def portion_sizes() -> Iterator[int]:
    """How many tensors to hand out at a time: few at first, so that work begins soon. See [Note: portions]."""
    return itertools.chain((32, 64, 128), itertools.repeat(256))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A provider of an operation and, when it cannot serve here, the reason."""

    entry: KernelEntry
    plugin: Found
    reason: str | None

    @property
    def dist(self) -> str:
        """The distribution that offers it."""
        return self.plugin.dist


class Kernels:
    """Resolves (op, device, dtype) to a function; each answer is found once and then kept."""

    def __init__(self, plugins: Plugins, forced: Mapping[str, str] | None = None) -> None:
        self._plugins = plugins
        self._forced = dict(forced or {})
        self._table: dict[str, list[tuple[KernelEntry, Found]]] | None = None
        self._broken: dict[KernelEntry, str] = {}
        self._served: dict[tuple[str, str, str], Callable[..., Any]] = {}
        self._names: dict[str, str] = {}

    def ops(self) -> list[str]:
        """Every operation that somebody offers."""
        return sorted(self._entries())

    def candidates(self, op: str, device: str, dtype: str) -> list[Candidate]:
        """Who could serve `op`, best first, each with the reason why not."""
        rows = self._entries().get(op)
        if rows is None:
            hint = nearest(op, self._entries())
            raise KernelError(
                f"no kernel is called {op!r}; " + (f"did you mean {hint!r}?" if hint else f"known: {self.ops()}")
            )
        ranked = sorted(rows, key=lambda r: (-r[0].priority, r[0].provider))
        return [Candidate(e, found, self._broken.get(e) or _reason(e, device, dtype)) for e, found in ranked]

    def settle(self, device: str, dtype: str) -> None:
        """Resolve every operation for such tensors; one that nobody serves here is an error only when it is used."""
        for op in self.ops():
            try:
                self.get(op, device, dtype)
            except KernelError as error:
                if op in self._forced:
                    raise
                log.debug("%s", error)
                self._names[f"{op}/{device}/{dtype}"] = "nobody"

    def get(self, op: str, device: str = "cpu", dtype: str = "float32") -> Callable[..., Any]:
        """The function that serves `op` for tensors of `dtype` on `device` (names as torch prints them).

        Raises KernelError, with every provider's reason, when none can serve or the forced one cannot.
        """
        key = (op, device, dtype)
        if key not in self._served:
            self._served[key] = self._resolve(op, device, dtype)
        return self._served[key]

    def serving(self, op: str, like: Tensor) -> Callable[..., Any]:
        """`get` for tensors of the device and dtype of `like`."""
        return self.get(op, like.device.type, str(like.dtype).removeprefix("torch."))

    def accumulate(self, into: Tensor, added: Tensor) -> None:
        """``into += added``: by kernel ``accumulate`` where fp32 takes in many 16-bit elements, else by torch."""
        widens = into.dtype.itemsize == 4 and added.dtype.itemsize == 2 and added.is_floating_point()
        if widens and into.is_floating_point() and added.numel() >= MANY and added.layout == into.layout:
            self.serving("accumulate", into)([into], [added])
        else:
            into.add_(added)

    def resolved(self) -> dict[str, str]:
        """``op/device/dtype`` -> provider for what was resolved so far: part of the cross-rank fingerprint."""
        return dict(self._names)

    def told(self) -> tuple[str, list[str]]:
        """Who serves what was resolved so far, and why something better that is installed does not: for the log."""
        served: dict[str, list[str]] = {}
        for key, name in sorted(self._names.items()):
            served.setdefault(name, []).append(key.partition("/")[0])
        missed: dict[str, list[str]] = {}
        for op, device, dtype in sorted(self._served):
            if op not in self._forced:
                for c in self.candidates(op, device, dtype):
                    if c.reason is None:
                        break
                    if not _elsewhere(c.entry, device, dtype):
                        missed.setdefault(f"{c.entry.provider} ({c.dist}): {c.reason}", []).append(op)
        return (
            "; ".join(f"{', '.join(dict.fromkeys(ops))} by {name}" for name, ops in served.items()),
            [f"{', '.join(dict.fromkeys(ops))} not by {why}" for why, ops in missed.items()],
        )

    def check_forced(self) -> None:
        """Raise KernelError now for a ``kernels`` entry of an unknown op or provider; a known one takes part."""
        for op, provider in self._forced.items():
            offered = {c.entry.provider: c.plugin for c in self.candidates(op, "", "")}
            if provider not in offered:
                names = ", ".join(sorted(offered))
                broken = self._plugins.quarantined()
                raise KernelError(f"kernels.{op}: no provider {provider!r}; installed: {names}{broken}")
            self._plugins.join(offered[provider])

    def _resolve(self, op: str, device: str, dtype: str) -> Callable[..., Any]:
        rows = self.candidates(op, device, dtype)
        forced = self._forced.get(op)
        usable = [c for c in rows if c.reason is None and forced in (None, c.entry.provider)]
        if not usable:
            why = "; ".join(
                f"{c.entry.provider} ({c.dist}): {c.reason}" for c in rows if forced in (None, c.entry.provider)
            )
            head = f"kernels.{op} forces {forced!r}, but" if forced else f"no provider can serve {op!r}:"
            raise KernelError(f"{head} {why or 'nobody offers it'} on {device} {dtype}")
        best = usable[0]
        twins = [c for c in usable if c is not best and _twins(c.entry, best.entry)]
        if twins:
            raise KernelError(
                f"kernel {op!r} provider {best.entry.provider!r} is offered by {best.dist} and {twins[0].dist}; "
                "disable one with plugins.disable"
            )
        try:
            function: Any = resolve(best.entry.load)
            if not callable(function):
                raise PluginError(f"{best.entry.load!r} is not a function")
        except PluginError as error:
            why = f"plugin {best.plugin} failed in ds_kernels: {error}"
            if forced is not None:
                raise KernelError(f"kernels.{op} forces {forced!r}, but {why}") from error
            self._broken[best.entry] = why  # the next one serves; ranks compare who does
            return self._resolve(op, device, dtype)
        self._names[f"{op}/{device}/{dtype}"] = f"{best.entry.provider} ({best.dist})"
        log.debug("kernel %s on %s %s is served by %s of %s", op, device, dtype, best.entry.provider, best.dist)
        return cast(Callable[..., Any], function)

    def _entries(self) -> dict[str, list[tuple[KernelEntry, Found]]]:
        if self._table is None:
            table: dict[str, list[tuple[KernelEntry, Found]]] = {}
            for answer in self._plugins.offers("ds_kernels"):
                for entry in answer.value:
                    table.setdefault(entry.op, []).append((entry, answer.plugin))
            self._table = table
        return self._table


def _twins(one: KernelEntry, other: KernelEntry) -> bool:
    """Whether nothing tells two entries of one operation apart."""
    return (one.provider, one.devices, one.dtypes) == (other.provider, other.devices, other.dtypes)


def _reason(entry: KernelEntry, device: str, dtype: str) -> str | None:
    return _elsewhere(entry, device, dtype) or ask(entry.available)


def _elsewhere(entry: KernelEntry, device: str, dtype: str) -> str | None:
    """Why the entry is not even meant for such tensors."""
    if entry.devices and device not in entry.devices:
        return f"serves {', '.join(entry.devices)} only"
    if entry.dtypes and dtype not in entry.dtypes:
        return f"serves {', '.join(entry.dtypes)} only"
    return None
