"""What dscore-checkpoint-object declares: storages for URLs, and the section ``checkpoint_object``
(torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_core.entries import Ref

if TYPE_CHECKING:
    from ds_checkpoint_object.config import ObjectConfig

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "memory")


def ds_config() -> type[ObjectConfig]:
    """The section's model."""
    from ds_checkpoint_object.config import ObjectConfig

    return ObjectConfig


def ds_checkpoint_storages() -> Mapping[str, Ref]:
    """Buckets of S3, Google Cloud Storage and Azure; ``memory`` is of one process, for tests."""
    return dict.fromkeys(SCHEMES, "ds_checkpoint_object.opening:open_storage")
