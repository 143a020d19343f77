"""From a URL to a storage: ``s3://bucket/run``, ``gs://bucket/run``, ``az://container/run``."""

from __future__ import annotations

import functools
import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_checkpoint.storages.finding import shown
from obstore import exceptions as failed
from obstore.store import MemoryStore, from_url

from ds_checkpoint_object.bucket import Bucket, cause_of
from ds_checkpoint_object.config import ObjectConfig
from ds_checkpoint_object.storage import ObjectStorage
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from ds_core.context import Context

_URL = re.compile(
    r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9._-]+)(?P<path>(?:/.*)?)", re.ASCII
)
# A part that is "." or "..", or empty, means different keys to different programs.
_PART = re.compile(r"[A-Za-z0-9!_.*'() @&$=;:+,-]+", re.ASCII)


def open_storage(url: str, ctx: Context | None) -> ObjectStorage:
    """The storage that `url` names, with the run's section ``checkpoint_object``.

    Credentials, region and endpoint come from the environment. Nothing is asked of the store yet.
    """
    config = (None if ctx is None else ctx.config.section(ObjectConfig)) or ObjectConfig()
    scheme, _, rest = url.partition("://")
    found = _URL.fullmatch(f"{scheme.lower()}://{rest}")
    if found is None:
        raise CheckpointError(
            f"{shown(url)} has no bucket that a store can have; write s3://bucket/folder"
        )
    parts = [part for part in found["path"].strip("/").split("/") if part]
    if bad := next((p for p in parts if p in (".", "..") or not _PART.fullmatch(p)), None):
        raise CheckpointError(
            f"{shown(url)}: {bad!r} cannot be a part of a key; use letters, digits, . _ -"
        )
    if "//" in found["path"]:
        raise CheckpointError(
            f"{shown(url)} has // in its path, which would be a part without name"
        )
    place = f"{found['scheme']}://{found['bucket']}"
    try:
        store, patient = _stores(found["scheme"], place, config)
    except (failed.BaseError, ValueError, TypeError) as error:
        raise CheckpointError(f"{place} cannot be opened: {cause_of(error)}") from None
    return ObjectStorage(Bucket(store, patient, place, config), "/".join(parts))


def _stores(scheme: str, place: str, config: ObjectConfig) -> tuple[ObjectStore, ObjectStore]:
    """(one whose failures are ours to repeat, one that repeats them itself)."""
    if scheme == "memory":
        return _memory(place), _memory(place)
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=config.timeout),
            "connect_timeout": timedelta(seconds=min(config.timeout, 10.0)),
        }
    }
    if scheme in ("s3", "s3a"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        if endpoint:
            # An endpoint of one's own is asked by path unless the environment says otherwise.
            options["endpoint"] = endpoint
            # Plain HTTP is taken where the environment has asked for it, as other tools do.
            options["client_options"]["allow_http"] = endpoint.startswith("http://")
    repeated: Any = {
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=config.give_up_after),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
    once = from_url(place, **options, retry_config={"max_retries": 0})
    return once, from_url(place, **options, retry_config=repeated)


@functools.cache
def _memory(place: str) -> ObjectStore:
    """One bucket in the memory of this process, for tests and for trying things out."""
    return MemoryStore()
