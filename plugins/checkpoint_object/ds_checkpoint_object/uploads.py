"""Uploads that were begun in parts and never finished: S3 keeps and charges for their parts.

The library has no request for them, so they are asked for here, with a signature of Amazon's
version 4. That needs keys in the environment. Where credentials come from elsewhere, and on other
stores than S3, the bucket's lifecycle rule for incomplete uploads is what removes them.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_checkpoint_object.bucket import Bucket

log = logging.getLogger("ds_checkpoint")

_MOST = 1 << 24  # bytes of an answer that are read
_NAMESPACE = re.compile(r"\{[^}]*\}")


def abort_uploads(bucket: Bucket, prefix: str, ours: Callable[[str], bool]) -> int:
    """End the unfinished uploads of keys below `prefix` that are `ours`; how many there were.

    Nothing that is there depends on it, so what fails is logged.
    """
    scheme, _, name = bucket.place.partition("://")
    signer = _Signer.from_environment(name) if scheme in ("s3", "s3a") else None
    if signer is None:
        return 0
    count = 0
    try:
        listed = signer.request("GET", "", {"uploads": "", "prefix": prefix}, bucket.config.timeout)
        for key, upload in _uploads(listed):
            if ours(key.removeprefix(prefix)):
                signer.request("DELETE", key, {"uploadId": upload}, bucket.config.timeout)
                count += 1
    except (OSError, ValueError, ElementTree.ParseError) as error:
        log_once(
            log,
            logging.INFO,
            f"{bucket.place}: unfinished uploads cannot be listed or removed "
            f"({type(error).__name__}); a lifecycle rule of the bucket removes them",
        )
    return count


def _uploads(text: bytes) -> list[tuple[str, str]]:
    """(key, upload) of each in an answer."""
    # No entity of a document type is expanded: a text with one is refused.
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise ValueError("the answer has a document type")
    found = []
    for row in ElementTree.fromstring(text):
        if _NAMESPACE.sub("", row.tag) == "Upload":
            fields = {_NAMESPACE.sub("", field.tag): field.text or "" for field in row}
            found.append((fields["Key"], fields["UploadId"]))
    return found


class _Signer:
    """Requests to one bucket of S3, signed with keys that stand in the environment."""

    def __init__(self, bucket: str, key: str, secret: str, token: str) -> None:
        environment = os.environ
        self._region = (
            environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        )
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        self._base = (endpoint or f"https://s3.{self._region}.amazonaws.com").rstrip("/")
        self._bucket = bucket
        self._key = key
        self._secret = secret
        self._token = token

    def __repr__(self) -> str:
        return f"_Signer({self._bucket!r})"

    @classmethod
    def from_environment(cls, bucket: str) -> _Signer | None:
        """None where the environment has no keys."""
        key = os.environ.get("AWS_ACCESS_KEY_ID", "")
        secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
        if not key or not secret:
            return None
        return cls(bucket, key, secret, os.environ.get("AWS_SESSION_TOKEN", ""))

    def request(self, method: str, key: str, query: dict[str, str], timeout: float) -> bytes:
        """The answer's body. OSError where there is none, or it is no success."""
        now = datetime.datetime.now(datetime.timezone.utc)
        address = urlsplit(self._base)
        path = quote(f"{address.path}/{self._bucket}" + (f"/{key}" if key else ""), safe="/-_.~")
        asked = "&".join(f"{k}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))
        headers = {
            "host": address.netloc,
            "x-amz-content-sha256": hashlib.sha256(b"").hexdigest(),
            "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
        }
        if self._token:
            headers["x-amz-security-token"] = self._token
        headers["authorization"] = self._authorization(method, path, asked, headers)
        url = f"{address.scheme}://{address.netloc}{path}?{asked}"
        if address.scheme not in ("http", "https"):
            raise ValueError("the endpoint is no address of the web")
        sent = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(sent, timeout=timeout) as answer:
            body: bytes = answer.read(_MOST)
        return body

    def _authorization(self, method: str, path: str, asked: str, headers: dict[str, str]) -> str:
        """The header of Amazon's signature, version 4."""
        date = headers["x-amz-date"][:8]
        scope = f"{date}/{self._region}/s3/aws4_request"
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = "\n".join((method, path, asked, lines, names, headers["x-amz-content-sha256"]))
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = "\n".join(("AWS4-HMAC-SHA256", headers["x-amz-date"], scope, digest))
        key = f"AWS4{self._secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        return (
            f"AWS4-HMAC-SHA256 Credential={self._key}/{scope}, SignedHeaders={names}, "
            f"Signature={signature}"
        )
