"""The declaration of a storage of somebody else's; the storage is shelf_storage.py.

``{"plugins": {"load": ["shelf=shelf"]}}``, and then ``engine.save_checkpoint("shelf://mine")``.
"""

from __future__ import annotations

from collections.abc import Mapping


def ds_checkpoint_storages() -> Mapping[str, str]:
    return {"shelf": "shelf_storage:open_shelf"}
