"""The monitor for MLflow: `MLflowRun` behind the buffering of monitors that write files."""

from __future__ import annotations

import contextlib
import os
import re
import time
import urllib.parse
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_monitor_kit import BufferedMonitor, Buffering, flat, hiding

from ds_core.entries import Event
from ds_monitor_mlflow.config import MLflowConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

PER_CALL = 1000
"""Metrics that MLflow takes in one call; parameters: a tenth."""
FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
LONGEST_NAME = 250
LONGEST_VALUE = 500


def metric_name(name: str) -> str:
    """`name` as MLflow takes it: other characters than its own become ``_``, and it is a path that
    stays below.
    """
    parts = [
        part if part.strip(".") else part.replace(".", "_")
        for part in FORBIDDEN.sub("_", name).split("/")
    ]
    return "/".join(part for part in parts if part)[:LONGEST_NAME] or "_"


class MLflowMonitor(BufferedMonitor):
    """Logs to the active run where the program has started one, else to the run of the section,
    which it ends.

    config: recorded with a new run; it must hold no secrets.
    buffering: see `BufferedMonitor`.
    """

    def __init__(
        self, section: MLflowConfig, config: Mapping[str, Any], **buffering: Unpack[Buffering]
    ) -> None:
        self._run = MLflowRun(section, config)
        super().__init__("mlflow", self._run, **buffering)

    def close(self) -> None:
        """Write what is queued, and end the run, if it was started here."""
        super().close()
        self._run.end()


class MLflowRun:
    """Metrics waiting to be written, and the run that they go to."""

    def __init__(self, section: MLflowConfig, config: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.tracking import MlflowClient

        # A run that the program has started knows its server; the section's is for a new one.
        active = mlflow.active_run()
        uri = mlflow.get_tracking_uri() if active is not None else _tracking_uri(section)
        self.directory = Path(_path(uri) or ".")
        self._secrets = {p for p in (urllib.parse.urlsplit(uri).password,) if p}
        self._waiting: list[Any] = []
        self._names: dict[str, str] = {}
        with hiding("mlflow", self._secrets), _folders_allowed(uri):
            self._client: Any = MlflowClient(tracking_uri=uri)
            self._owned = active is None
            self.run_id: str = (
                active.info.run_id if active is not None else self._start(section, config)
            )

    def _start(self, section: MLflowConfig, config: Mapping[str, Any]) -> str:
        if section.run_id is not None:
            self._client.update_run(section.run_id, status="RUNNING")
            return section.run_id
        from mlflow.entities import Param

        name = section.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "deepspeed"
        experiment = self._client.get_experiment_by_name(name)
        number = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(name)
        )
        run_id: str = self._client.create_run(number, run_name=section.run_name).info.run_id
        params = [
            Param(metric_name(key), str(value)[:LONGEST_VALUE])
            for key, value in flat(config).items()
        ]
        # MLflow accepts only so many in one call.
        for start in range(0, len(params), PER_CALL // 10):
            self._client.log_batch(run_id, params=params[start : start + PER_CALL // 10])
        return run_id

    @property
    def waiting(self) -> int:
        """How many metrics wait."""
        return len(self._waiting)

    def add(self, events: Sequence[Event]) -> None:
        """Take events, all stamped with the time of this call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [
            Metric(self._name(name), value, now, step) for name, value, step in events
        ]

    def _name(self, name: str) -> str:
        """The name in MLflow.

        Two that would become one, or a file and a folder, keep apart by a suffix.
        """
        if (known := self._names.get(name)) is None:
            known = metric_name(name)
            # MLflow keeps metrics as files: `a` and `a/b` cannot both be there.
            taken = self._names.values()
            if any(
                known == other
                or f"{known}/".startswith(f"{other}/")
                or f"{other}/".startswith(f"{known}/")
                for other in taken
            ):
                digest = zlib.crc32(name.encode(errors="surrogatepass"))
                known = f"{known.replace('/', '_')}-{digest:08x}"
            self._names[name] = known
        return known

    def write(self) -> None:
        """Log what waits; after a failure the rest still waits.

        Raises OSError, whatever MLflow raises.
        """
        while self._waiting:
            # What MLflow has accepted is dropped at once, so that a failure repeats no metric.
            batch = self._waiting[:PER_CALL]
            try:
                with hiding("mlflow", self._secrets):
                    self._client.log_batch(self.run_id, metrics=batch)
            except Exception as error:
                raise OSError(f"{type(error).__name__}: {error}") from None
            del self._waiting[: len(batch)]

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def end(self) -> None:
        """End the run, if it was started here."""
        if self._owned:
            self._owned = False
            with hiding("mlflow", self._secrets):
                self._client.set_terminated(self.run_id)


def _tracking_uri(section: MLflowConfig) -> str:
    given = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
    return (
        given
        if "://" in given or given.startswith(("file:", "databricks"))
        else Path(given).expanduser().absolute().as_uri()
    )


def _path(uri: str) -> str | None:
    """The folder of a tracking URI that is one."""
    parts = urllib.parse.urlsplit(uri)
    return urllib.parse.unquote(parts.path) if parts.scheme in ("file", "") else None


@contextlib.contextmanager
def _folders_allowed(uri: str) -> Iterator[None]:
    """MLflow 3.13 and later open a folder only where this variable says that it is meant; the
    section says so.
    """
    name = "MLFLOW_ALLOW_FILE_STORE"
    if _path(uri) is None or name in os.environ:
        yield
        return
    os.environ[name] = "true"
    try:
        yield
    finally:
        del os.environ[name]
