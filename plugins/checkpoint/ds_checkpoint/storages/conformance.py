"""The conformance kit for storages: the hook `ds_checkpoint_storages`.

Subclass `StorageConformance` and give it your storage. It needs pytest and torch. That one job at a
time saves, that a process may die anywhere, and that an unreliable network is survived, depends on
what the storage is made of: a package has its own tests of them.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ds_checkpoint.folder.format import (
    Chunk,
    Manifest,
    Mark,
    SavedState,
    local_file,
    rank_file,
    render_manifest,
)
from ds_checkpoint.folder.tensorfile import Item, TensorFile
from ds_checkpoint.source import SavedStates
from ds_checkpoint.storages.contract import Draft, Storage
from ds_core.errors import CheckpointError

SIZES = (0, 1, 7, 1024, 700_001)


class StorageConformance:
    """Inherit, and implement `make_storage`. The class's name must start with Test."""

    def make_storage(self, tmp_path: Path, below: str = "") -> Storage:
        """Another `Storage` of one and the same place for each test.

        tmp_path: of the test; files go below it.
        below: what has that name in the place.
        """
        raise NotImplementedError

    def storage(self, tmp_path: Path, below: str = "") -> Storage:
        """As `make_storage`, and known to be one."""
        made = self.make_storage(tmp_path, below)
        assert isinstance(made, Storage), f"{type(made).__name__} is no Storage"
        return made

    def test_nothing_is_there(self, tmp_path: Path) -> None:
        """A place that nobody has saved into is no error."""
        storage = self.storage(tmp_path)
        assert storage.tags() == []
        assert storage.latest() is None
        assert storage.next_serial() == 1
        assert storage.itself() is None
        _refuses(lambda: storage.find("a"), "a")

    def test_a_checkpoint_comes_back(self, tmp_path: Path) -> None:
        """Manifest, files and every range of them, also through another object."""
        tensors = _tensors(3)
        draft = _write(self.storage(tmp_path), "a", tensors)
        draft.put_in_place()
        storage = self.storage(tmp_path)
        assert storage.tags() == ["a"]
        assert storage.next_serial() == 2
        _check(storage, "a", tensors)

    def test_a_checkpoint_is_a_place_too(self, tmp_path: Path) -> None:
        """What a user names may be the checkpoint itself."""
        _write(self.storage(tmp_path), "a", _tensors(3)).put_in_place()
        stored = self.storage(tmp_path, "a").itself()
        assert stored is not None
        assert stored.manifest().tag == "a"
        assert self.storage(tmp_path).itself() is None

    def test_nobody_sees_a_draft(self, tmp_path: Path) -> None:
        """Until it is put in place there is no checkpoint, and the one it replaces can be read."""
        old, new = _tensors(1), _tensors(2)
        other = self.storage(tmp_path)
        draft = _write(self.storage(tmp_path), "a", old)
        assert other.tags() == []
        _refuses(lambda: other.find("a"), "a")
        draft.put_in_place()
        draft = _write(self.storage(tmp_path), "a", new)
        _check(other, "a", old)
        draft.put_in_place()
        _check(self.storage(tmp_path), "a", new)
        assert self.storage(tmp_path).tags() == ["a"]

    def test_a_draft_is_discarded(self, tmp_path: Path) -> None:
        """With what it would have replaced untouched."""
        old = _tensors(1)
        _write(self.storage(tmp_path), "a", old).put_in_place()
        for tag in ("a", "b"):
            _write(self.storage(tmp_path), tag, _tensors(2)).discard()
            assert self.storage(tmp_path).tags() == ["a"]
            _check(self.storage(tmp_path), "a", old)

    def test_a_save_that_ended_half_way(self, tmp_path: Path) -> None:
        """Another one begins after it, and clears what it has left, but nothing whole."""
        kept = _tensors(1)
        _write(self.storage(tmp_path), "a", kept).put_in_place()
        for tag in ("a", "b"):
            crashed = self.storage(tmp_path)
            _write(crashed, tag, _tensors(2))
            crashed.close()  # of a process that has died, the system does it, or time
            _write(self.storage(tmp_path), "c", _tensors(3)).put_in_place()
            _check(self.storage(tmp_path), "a", kept)
            assert sorted(self.storage(tmp_path).tags()) == ["a", "c"]

    def test_an_error_while_writing(self, tmp_path: Path) -> None:
        """It is raised; there is no checkpoint, and another save works."""

        def fail() -> Tensor:
            raise ArithmeticError("the tensor cannot be had")

        storage = self.storage(tmp_path)
        storage.hold()
        draft = storage.draft("a", "5a", storage.begin("a", "5a"))
        large = torch.zeros(3_000_000)
        items: list[Item] = [
            ("x", (3_000_000,), torch.float32, lambda: large),
            ("y", (9,), torch.float32, fail),
        ]
        try:
            draft.write_tensors(rank_file(0), items, {"save_id": "5a", "file": rank_file(0)})
        except ArithmeticError:
            pass
        else:
            raise AssertionError("an error of a tensor that is written was lost")
        draft.discard()
        assert storage.tags() == []
        _write(storage, "a", _tensors(1)).put_in_place()
        assert storage.tags() == ["a"]

    def test_one_tensor_at_a_time_is_held(self, tmp_path: Path) -> None:
        """A tensor is made when its turn comes, and not held much longer."""
        alive: list[weakref.ref[Tensor]] = []
        most = 0

        def give() -> Tensor:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in alive))
            made = torch.ones(1 << 20)
            alive.append(weakref.ref(made))
            return made

        storage = self.storage(tmp_path)
        storage.hold()
        draft = storage.draft("a", "5a", storage.begin("a", "5a"))
        items: list[Item] = [(f"x{i}", (1 << 20,), torch.float32, give) for i in range(24)]
        draft.write_tensors(rank_file(0), items, {"save_id": "5a", "file": rank_file(0)})
        draft.discard()
        assert len(alive) == 24
        assert most <= 2, f"{most} tensors were held while the next one was made"

    def test_the_newest_comes_first(self, tmp_path: Path) -> None:
        """By serial, whatever the names are and in whatever order they were put in place."""
        for tag in ("b", "c", "a"):
            _write(self.storage(tmp_path), tag, _tensors(1)).put_in_place()
        _write(self.storage(tmp_path), "c", _tensors(1)).put_in_place()
        storage = self.storage(tmp_path)
        assert storage.tags() == ["c", "a", "b"]
        assert storage.next_serial() == 5

    def test_latest(self, tmp_path: Path) -> None:
        """It names the tag that was written last."""
        for tag in ("a", "b"):
            storage = self.storage(tmp_path)
            storage.hold()
            storage.write_latest(tag)
            storage.close()
            assert self.storage(tmp_path).latest() == tag

    def test_pruning(self, tmp_path: Path) -> None:
        """The newest stay, and the one that was just saved, and what ``latest`` names; nothing of a
        checkpoint that is removed is listed.
        """
        storage = self.storage(tmp_path)
        for tag in "abcdef":
            _write(storage, tag, _tensors(1)).put_in_place()
        storage.write_latest("a")
        assert sorted(storage.prune(2, "c")) == ["b", "d"]
        assert self.storage(tmp_path).tags() == ["f", "e", "c", "a"]
        assert storage.prune(2, "c") == []
        for tag in ("f", "e", "c", "a"):
            _check(self.storage(tmp_path), tag, _tensors(1))

    def test_files_that_are_wrong(self, tmp_path: Path) -> None:
        """A file that is missing, or of another size, is named."""
        _write(self.storage(tmp_path), "a", _tensors(3)).put_in_place()
        stored = self.storage(tmp_path).open("a")
        size = stored.manifest().files[rank_file(0)].size
        stored.check_file(rank_file(0), size)
        _refuses(lambda: stored.check_file(rank_file(0), size + 1), rank_file(0))
        _refuses(lambda: stored.check_file("rank00007.safetensors", 5), "rank00007.safetensors")
        _refuses(lambda: TensorFile(stored.open("rank00007.safetensors")), "rank00007.safetensors")
        _refuses(self.storage(tmp_path).open("b").manifest, "b")

    def test_reports_of_ranks(self, tmp_path: Path) -> None:
        """Rank 0 gets each once, whole."""
        storage = self.storage(tmp_path)
        storage.hold()
        begun = storage.begin("a", "5a")
        first = storage.draft("a", "5a", begun)
        third = self.storage(tmp_path).draft("a", "5a", begun)
        third.check()
        assert first.take_reports({0, 1, 2}) == {}
        third.leave_report(2, b"done")
        assert not first.gone
        assert first.take_reports({0, 1, 2}) == {2: b"done"}
        assert first.take_reports({0, 1}) == {}
        third.leave_report(0, b"x" * 100_000)
        assert first.take_reports({0, 1}) == {0: b"x" * 100_000}
        first.discard()

    def test_a_tag_of_something_else(self, tmp_path: Path) -> None:
        """A file of a checkpoint cannot be reached by a tag that is a path."""
        storage = self.storage(tmp_path)
        _write(storage, "a", _tensors(1)).put_in_place()
        for tag in ("../a", "a/manifest.json", "", "latest", "."):
            _refuses(lambda tag=tag: storage.find(tag), "tag")


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"module/w{n}": torch.randn(n, generator=generator) for n in SIZES}


def _write(storage: Storage, tag: str, tensors: dict[str, Tensor]) -> Draft:
    """A draft that lacks nothing but its place."""
    storage.hold()
    serial = storage.next_serial()
    save_id = f"{serial:032x}"
    draft = storage.draft(tag, save_id, storage.begin(tag, save_id))
    draft.check()
    marks: dict[str, Mark] = {}
    for name, held in ((rank_file(0), tensors), (local_file(0), {})):
        metadata = {"save_id": save_id, "file": name, "values": "{}"}
        items: list[Item] = [
            (key, tuple(t.shape), t.dtype, lambda t=t: t)  # type: ignore[misc]
            for key, t in held.items()
        ]
        marks[name] = draft.write_tensors(name, items, metadata)
    draft.finish()
    draft.seal(b"# a checkpoint\n", render_manifest(_manifest(tag, save_id, serial, marks)))
    return draft


def _manifest(tag: str, save_id: str, serial: int, marks: dict[str, Mark]) -> Manifest:
    states = tuple(
        SavedState(f"module/w{n}", {}, (n,), "F32", (Chunk(rank_file(0), f"module/w{n}", 0, n),))
        for n in SIZES
    )
    empty: Any = {}
    return Manifest(
        save_id=save_id,
        tag=tag,
        step=1,
        serial=serial,
        world_size=1,
        mesh={"dp": 1},
        versions={},
        plugins={},
        config=None,
        optimizer=None,
        files=marks,
        states=states,
        shared={},
        excluded=(),
        frozen=(),
        module_extra={},
        run=empty,
        client=empty,
    )


def _check(storage: Storage, tag: str, tensors: dict[str, Tensor]) -> None:
    """The checkpoint `tag` is whole and has these tensors."""
    stored = storage.open(storage.find(tag))
    manifest = stored.manifest()
    assert manifest.tag == tag
    source = SavedStates(stored, manifest, None)
    try:
        source.check_files()
        source.verify(0, 1)
        for name, wanted in tensors.items():
            count = wanted.numel()
            assert torch.equal(source.read(name), wanted), f"{name} has other values"
            for start, stop in ((0, count // 2), (count // 3, count), (count // 2, count // 2)):
                found = source.read(name, start, stop)
                assert torch.equal(found, wanted[start:stop]), f"{name}[{start}:{stop}]"
        digest = xxhash.xxh3_128()
        reader = stored.open(rank_file(0))
        for block in reader.blocks():
            digest.update(block)
        reader.close()
        assert digest.hexdigest() == manifest.files[rank_file(0)].checksum
    finally:
        source.close()


def _refuses(work: Any, word: str) -> None:
    try:
        work()
    except CheckpointError as error:
        assert word in str(error), f"{str(error)!r} does not name {word!r}"
    else:
        raise AssertionError(f"what is wrong with {word!r} is accepted")
