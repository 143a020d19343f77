"""Random states: torch's, the accelerator's, Python's, numpy's and the named streams, as JSON plus
tensors.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ds_run_state.random_streams import STREAMS

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator

log = logging.getLogger("ds_run_state")


def capture(accelerator: Accelerator) -> dict[str, Any]:
    """The state of every global generator of this process, and the streams. numpy's only where
    numpy is imported.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if accelerator.device_type != "cpu":
        state["device"] = {
            "type": accelerator.device_type,
            "state": accelerator.get_rng_state().cpu(),
        }
    if STREAMS.states():
        state["streams"] = STREAMS.state_dict()
    if "numpy" in sys.modules:
        state["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
    return state


def restore(state: Mapping[str, Any], accelerator: Accelerator) -> None:
    """Put back what `capture` gave; the device's only on the same kind of device."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    device = state.get("device")
    if device is not None and device["type"] == accelerator.device_type:
        accelerator.set_rng_state(device["state"])
    elif accelerator.device_type != "cpu":
        log.warning(
            "the checkpoint has no random state for %s: what is drawn there will differ",
            accelerator.device_type,
        )
    if "streams" in state:
        STREAMS.load_state_dict(state["streams"])
    if "numpy" in state:
        import numpy as np

        numpy_state = dict(state["numpy"])
        inner = dict(numpy_state["state"])
        if isinstance(inner.get("key"), list):
            inner["key"] = np.asarray(inner["key"], dtype=np.uint32)
        np.random.set_state({**numpy_state, "state": inner})


def _plain(value: Any) -> Any:
    """numpy's state with arrays as lists of ints and numbers as Python's."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
