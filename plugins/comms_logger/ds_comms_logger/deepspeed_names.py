"""``deepspeed.comm.comms_logger`` and the functions around it: DeepSpeed's spelling of
dscore-comms-logger's log.

The log itself is the interceptor that the section ``comms_logger`` installs; what lives here reads
it and switches it. It adds up the calls of one operation and size instead of keeping each: where
DeepSpeed has a list with an entry per call, here each entry is the average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from ds_comms_logger import summary
from ds_comms_logger.comms_text import convert_size
from ds_comms_logger.config import CommsLogger as Section
from ds_comms_logger.log import CommsRow, installed_log
from ds_comms_logger.log import configure as put_into_effect
from ds_core import comm
from ds_core.errors import UsageError

Totals = dict[str, dict[int, list[Any]]]


class CommsLogger:
    """The log of this process, as ``deepspeed.comm.comms_logger`` shows it; each instance shows the
    same one.
    """

    def __init__(self) -> None:
        # What was chosen while the log is off; it holds when `enabled` is set.
        self._off = Section()

    @property
    def enabled(self) -> bool:
        """Whether collectives are logged."""
        return self._section().enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self._choose(enabled=on)

    @property
    def prof_all(self) -> bool:
        """Whether every operation is logged."""
        return self._section().prof_all

    @prof_all.setter
    def prof_all(self, every: bool) -> None:
        self._choose(prof_all=every)

    @property
    def prof_ops(self) -> list[str]:
        """The operations that are logged where `prof_all` is off."""
        return list(self._section().prof_ops)

    @prof_ops.setter
    def prof_ops(self, names: Iterable[str]) -> None:
        self._choose(prof_ops=sorted(names))

    @property
    def verbose(self) -> bool:
        """Whether each call is printed."""
        return self._section().verbose

    @verbose.setter
    def verbose(self, on: bool) -> None:
        self._choose(verbose=on)

    @property
    def debug(self) -> bool:
        """Whether call sites are kept apart."""
        return self._section().debug

    @debug.setter
    def debug(self, on: bool) -> None:
        self._choose(debug=on)

    @property
    def comms_dict(self) -> Totals:
        """Operation, bytes of a message -> count, times in ms, algbw and busbw in Gbit/s (a
        copy)."""
        totals: Totals = {}
        for row in _rows():
            figures = (
                [value] * row.count for value in (row.average_ms, row.algbw * 8, row.busbw * 8)
            )
            totals.setdefault(_name(row), {})[row.bytes] = [row.count, *figures]
        return totals

    @comms_dict.setter
    def comms_dict(self, totals: Totals) -> None:
        if totals:
            raise UsageError(
                "comms_dict can be emptied, by {}; what is in it comes from the collectives "
                "themselves"
            )
        self.reset_data()

    def configure(self, comms_config: Any) -> None:
        """Take over a parsed config: `comms_logger_enabled`, and `comms_logger` with the
        settings."""
        if comms_config.comms_logger_enabled:
            chosen = comms_config.comms_logger
            settings = {
                name: getattr(chosen, name) for name in ("verbose", "debug", "prof_ops", "prof_all")
            }
            self._choose(enabled=True, **settings)

    def start_profiling_comms(self) -> None:
        """Log every operation."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Log only the operations of `prof_ops`."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Log these operations too."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Log these operations no longer."""
        self.prof_ops = sorted({*self.prof_ops} - {*op_name_list})

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Add one call of `latency` ms; without effect while the log is off."""
        if (log := installed_log()) is not None:
            log.record(record_name, "", msg_size, comm.world_size(), latency / 1e3)

    def get_raw_data(self) -> Totals:
        """A copy of what was recorded on this rank."""
        return self.comms_dict

    def has_data(self) -> bool:
        """Whether anything was recorded."""
        return bool(_rows())

    def reset_data(self) -> None:
        """Forget what was recorded."""
        if (log := installed_log()) is not None:
            log.clear()

    def get_operation_names(self) -> list[str]:
        """What was recorded, by name."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """How many calls were recorded."""
        return sum(row.count for row in _rows())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Per message size, the figures of one operation; None for one that was not recorded."""
        return _by_operation(_rows(), _figures).get(operation_name)

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the table on rank 0 and, with `return_dict`, return it; with `show_straggler` every
        rank calls it.
        """
        rows = summary.log_summary(show_straggler, show=print_log)
        if not return_dict:
            return None
        return {
            "summary": _by_operation(rows, _figures),
            "straggler_analysis": _by_operation(rows, _behind) if show_straggler else None,
            "metadata": {
                "world_size": comm.world_size(),
                "rank": comm.rank(),
                "timestamp": datetime.now().isoformat(),
            },
        }

    def _section(self) -> Section:
        """The settings in effect; while the log is off, those that were chosen."""
        log = installed_log()
        if log is None:
            return self._off
        return Section(
            enabled=True,
            verbose=log.verbose,
            debug=log.debug,
            prof_all=log.ops is None,
            prof_ops=sorted(log.ops) if log.ops is not None else self._off.prof_ops,
        )

    def _choose(self, **settings: Any) -> None:
        """Put settings into effect; a name in ``prof_ops`` that is no operation raises
        ConfigError."""
        # A whole section, so that what is chosen is checked as in a config.
        chosen = Section(**{**self._section().model_dump(), **settings})
        put_into_effect(chosen)
        self._off = chosen.model_copy(update={"enabled": False})


comms_logger = CommsLogger()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """``deepspeed.comm.configure``: what is None stays as it is; the config comes first."""
    if deepspeed_config is not None:
        comms_logger.configure(getattr(deepspeed_config, "comms_config", deepspeed_config))
    given = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    if settings := {name: value for name, value in given.items() if value is not None}:
        comms_logger._choose(**settings)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """``deepspeed.comm.log_summary``: prints on rank 0; every rank calls it, since it ends with a
    barrier.
    """
    comm.barrier()
    return comms_logger.log_all(show_straggler=show_straggler, return_dict=return_dict)


def reset_log() -> None:
    """Forget what was recorded."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether anything was recorded."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many calls were recorded."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The operations that were recorded, by name."""
    return comms_logger.get_operation_names()


def _rows() -> list[CommsRow]:
    log = installed_log()
    return [] if log is None else log.rows()


def _name(row: CommsRow) -> str:
    return f"{row.op} | [Caller Func: {row.site}]" if row.site else row.op


def _by_operation(rows: Iterable[CommsRow], figures: Any) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        size = {"msg_size_bytes": row.bytes, "msg_size_str": convert_size(row.bytes)}
        found.setdefault(_name(row), {})[row.bytes] = {"count": row.count, **figures(row), **size}
    return found


def _figures(row: CommsRow) -> dict[str, float]:
    return {
        "total_latency_ms": row.total_ms,
        "avg_latency_ms": row.average_ms,
        "tput_avg_gbps": row.algbw * 8,
        "busbw_avg_gbps": row.busbw * 8,
    }


def _behind(row: CommsRow) -> dict[str, float]:
    """What the collectives themselves took, by the fastest rank, and how long this rank waited
    beyond that.
    """
    fastest = row.total_ms if row.fastest_ms is None else row.fastest_ms
    waited = row.total_ms - fastest
    return {
        "total_comm_lat_ms": fastest,
        "total_straggler_ms": waited,
        "avg_comm_lat_ms": fastest / row.count,
        "avg_straggler_ms": waited / row.count,
    }
