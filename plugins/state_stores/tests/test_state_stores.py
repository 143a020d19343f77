"""State stores: the host's memory, a store of somebody else's, and what is said when there is
none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_state_stores import HostStore, StateStore, check_store, is_evicted, open_store, owns_storage
from torch import Tensor

from ds_core.errors import PluginError, UsageError
from ds_core.plugins import Plugins
from ds_core.plugins.registry import PluginSettings

THEIRS = """
from ds_core.entries import StateStoreEntry
from ds_state_stores import HostStore

class Attic(HostStore):
    def __init__(self, ctx, options):
        super().__init__(ctx, options)
        self.told = options

def ds_state_stores():
    return {"Attic": StateStoreEntry("attic:Attic"), "cellar": StateStoreEntry("attic:THEIRS")}

def THEIRS(ctx, options):
    return 7
"""


class Cellar(StateStore):
    """Keeps copies elsewhere, and counts."""

    resident = False

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(accelerator=None), {})  # type: ignore[arg-type]
        self.kept: dict[int, Tensor] = {}
        self.written = 0

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        for storage in (t.untyped_storage() for t in tensors if is_evicted(t)):
            kept = self.kept[storage._cdata]
            storage.resize_(kept.untyped_storage().nbytes())
            storage.copy_(kept.untyped_storage())

    def wait(self, tensors: Sequence[Tensor]) -> None:
        pass

    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        for storage in (t.untyped_storage() for t in tensors):
            if changed:
                self.kept[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage.clone())
                self.written += 1
            storage.resize_(0)

    def discard(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.kept.pop(tensor.untyped_storage()._cdata, None)


def plugins(folder: Path, monkeypatch: pytest.MonkeyPatch, *load: str) -> Plugins:
    (folder / "attic.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(folder))
    return Plugins(PluginSettings(load=load))


def test_the_hosts_memory_is_a_copy_in_the_wanted_dtype() -> None:
    ctx: Any = SimpleNamespace(accelerator=SimpleNamespace(pin=lambda t: t))
    store = HostStore(ctx, {"pin_memory": True})
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16))
    host = store.copy_in(weight, torch.float32)
    assert (host.shape, host.dtype, host.requires_grad) == ((12,), torch.float32, False)
    assert torch.equal(host, weight.detach().float().view(-1))
    same = store.copy_in(weight)
    assert same.dtype == torch.bfloat16
    assert same.data_ptr() != weight.data_ptr()
    assert store.resident
    store.evict([host])
    assert store.read(host[2:5]) is not None
    assert not is_evicted(host)
    store.write(host[2:5], torch.zeros(3))
    assert host[2:5].tolist() == [0, 0, 0]


def test_reading_and_writing_leave_a_tensor_where_it_is() -> None:
    store = Cellar()
    tensor = store.copy_in(torch.arange(6.0))
    piece = tensor[2:4]
    assert owns_storage(tensor)
    assert not owns_storage(piece)
    store.evict([tensor])
    assert is_evicted(piece)
    assert store.read(piece).tolist() == [2, 3]
    assert store.written == 1  # reading writes nothing
    store.write(piece, torch.tensor([7.0, 8.0]))
    assert is_evicted(tensor)
    store.fetch([tensor])
    assert tensor.tolist() == [0, 1, 7, 8, 4, 5]
    assert store.read(piece).data_ptr() == piece.data_ptr()
    store.write(piece, torch.zeros(2))
    assert tensor.tolist() == [0, 1, 0, 0, 4, 5]


def test_a_plugin_offers_a_store_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers = plugins(tmp_path, monkeypatch, "attic")
    assert check_store(offers, "ATTIC", "x.device") is None
    ctx: Any = SimpleNamespace(plugins=offers, accelerator=None)
    assert open_store(ctx, "attic", {"pin_memory": False, "shelf": 3}).told["shelf"] == 3  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"attic.*'cellar' must be a ds_state_stores.StateStore"):
        open_store(ctx, "cellar", {})


def test_a_store_that_nobody_offers_is_named() -> None:
    offers = Plugins(PluginSettings())
    assert check_store(offers, "cpu", "a.device") is None
    nvme = check_store(offers, "nvme", "a.device")
    assert nvme is None or str(nvme).startswith(
        "a.device: state store 'nvme' is served by dscore-nvme, which is not inst"
    )
    assert "did you mean 'cpu'?" in str(check_store(offers, "cpuu", "a.device"))
    assert "installed: cpu, none" in str(check_store(offers, "zzz", "a.device"))
    with pytest.raises(UsageError, match="no state store is called 'zzz'"):
        open_store(SimpleNamespace(plugins=offers), "zzz", {})  # type: ignore[arg-type]
