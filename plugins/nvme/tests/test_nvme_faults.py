"""What happens to files below a store: each fault is an error that names the file, and no value is
ever wrong.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ds_kernel_kit.build import load
from ds_nvme import DiskError, NvmeStore
from ds_nvme.files import RunFolder
from ds_nvme.native import EXTENSION

from ds_core.errors import UsageError
from plugins.nvme.tests.test_nvme_store import open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    made = open_store(tmp_path)
    yield made
    made.close()


def rest(store: NvmeStore) -> tuple[torch.Tensor, Path]:
    """A tensor that rests in a file of ten pages, and its file."""
    tensor = store.copy_in(torch.arange(10_000.0))
    store.evict([tensor])
    store.flush()
    (file,) = store.folder.path.glob("*.bin")
    return tensor, file


def test_a_changed_byte_is_seen(store: NvmeStore) -> None:
    tensor, file = rest(store)
    with file.open("rb+") as changed:
        changed.seek(20_000)
        byte = changed.read(1)[0]
        changed.seek(20_000)
        changed.write(bytes([byte ^ 1]))
    store.fetch([tensor])
    for _ in range(2):
        with pytest.raises(DiskError, match=f"{file} has other contents at 0 than were written"):
            store.wait([tensor])


def test_a_flipped_bit_changes_the_checksum() -> None:
    checksum = load(EXTENSION).checksum
    # two rows of the widest sum, one of the other, and bytes
    data = torch.randint(0, 256, (600,), dtype=torch.uint8)
    before = checksum(data.data_ptr(), data.numel())
    for index in range(data.numel()):
        for bit in range(8):
            data[index] ^= 1 << bit
            assert checksum(data.data_ptr(), data.numel()) != before
            data[index] ^= 1 << bit
    assert checksum(data.data_ptr(), data.numel()) == before


def test_a_cut_file_a_removed_one_and_a_vanished_folder(store: NvmeStore) -> None:
    tensor, file = rest(store)
    os.truncate(file, 8192)
    store.fetch([tensor])
    with pytest.raises(DiskError, match=f"cannot read {file} at 8192: the file ends there"):
        store.wait([tensor])
    store.discard([tensor])
    tensor, file = rest(store)
    file.unlink()
    with pytest.raises(
        DiskError, match=f"cannot open {file}: No such file .*was removed while the run used it"
    ):
        store.fetch([tensor])
    shutil.rmtree(store.folder.path)
    with pytest.raises(
        DiskError, match=r"cannot create .*: No such file .*was removed while the run used it"
    ):
        store.evict([torch.zeros(5)])


def test_a_full_disk_is_an_error_before_anything_is_lost(tmp_path: Path) -> None:
    """A small tmpfs, for root; else a limit on the size of files."""
    if os.geteuid() == 0:
        folder = tmp_path / "small"
        folder.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)], check=True
        )
        told = r"cannot create .*000002.bin \(81,920 .*No space left.*the disk is full"
    else:
        import resource

        folder = tmp_path
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        told = r"cannot create .*000002.bin \(81,920 .*`ulimit -f` does not allow"
    try:
        store = open_store(folder)
        kept = store.copy_in(torch.arange(10_000.0))
        tensor = store.copy_in(torch.arange(20_000.0))
        store.evict([kept])
        with pytest.raises(DiskError, match=told):
            store.evict([tensor])
        store.fetch([kept])
        store.wait([kept])
        assert torch.equal(kept, torch.arange(10_000.0))
        assert torch.equal(tensor, torch.arange(20_000.0)), "what could not be written is lost"
        store.close()
        assert not list(folder.rglob("*"))
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(folder)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


KILLED = """
import sys
from ds_nvme.files import RunFolder
folder = RunFolder(sys.argv[1], 3)
(folder.path / "000001.bin").write_bytes(bytes(10))
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_leftovers_of_a_killed_run_are_removed_and_another_job_is_left_alone(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        first = RunFolder(tmp_path)
        assert theirs.joinpath("000001.bin").exists() and not first.swept
        other.send_signal(signal.SIGKILL)
    second = RunFolder(tmp_path)
    assert second.swept == [theirs] and not theirs.exists() and first.path.exists()
    begun = first.root / f"rank0-{socket.gethostname()}-1-0123abcd"
    begun.mkdir()  # killed before it had a lock
    third = RunFolder(tmp_path)
    assert third.swept == [begun] and not begun.exists()
    for folder in (first, second, third):
        folder.close()
    assert not list(tmp_path.iterdir())


def test_nothing_that_is_not_ours_is_removed(tmp_path: Path) -> None:
    """Folders with other names, of other hosts, with files but no lock, and what links lead to."""
    root = tmp_path / f"ds_nvme-{os.geteuid()}"
    host = socket.gethostname()
    kept = [
        tmp_path / "ds_nvme" / "src",  # a clone of this plugin
        root / "src",
        root / "rank0-begun",
        root / "rank0-another-1-0123abcd",
        root / f"rank0-{host}-1-0123abcd",
        root / f"rank0-{host}-1-0123abcd-more",
        tmp_path / "home" / "rank0-x",
    ]
    for folder in kept:
        folder.mkdir(parents=True)
        (folder / "mine").touch()
    (root / f"rank1-{host}-1-0123abcd").symlink_to(tmp_path / "home" / "rank0-x")
    linked = root / f"rank2-{host}-1-0123abcd"
    linked.mkdir()  # its lock is a link, and it holds one
    (linked / "lock").symlink_to(kept[0] / "mine")
    made = RunFolder(tmp_path)
    (made.path / "link").symlink_to(kept[0])
    (made.path / "folder").mkdir()
    (made.path / "folder" / "file").touch()
    made.close()
    assert not made.swept and not made.path.exists() and linked.is_dir()
    assert all((folder / "mine").exists() for folder in kept)


def test_a_root_that_is_a_link_or_another_users_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home" / "sub").mkdir(parents=True)
    root = tmp_path / f"ds_nvme-{os.geteuid()}"
    root.symlink_to(tmp_path / "home")
    with pytest.raises(DiskError, match=f"{root} is a link; remove it"):
        RunFolder(tmp_path)
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["sub"]
    if os.geteuid() == 0:
        root.unlink()
        root.mkdir()
        os.chown(root, 4711, 4711)
        with pytest.raises(DiskError, match=f"{root} belongs to user 4711"):
            RunFolder(tmp_path)


def test_users_share_a_disk(tmp_path: Path) -> None:
    """As each has a root; another process of nobody's, where this one may make one."""
    if os.geteuid() != 0:
        pytest.skip("needs root to be two users")
    first = RunFolder(tmp_path)
    os.chmod(tmp_path, 0o1777)
    for parent in tmp_path.parents:
        if parent.name.startswith("pytest-"):
            os.chmod(parent, 0o755)
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            RunFolder(tmp_path).close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    first.close()


def test_who_holds_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_nvme.files.LOCK_LIMIT", 0.2)
    root = tmp_path / f"ds_nvme-{os.geteuid()}"
    root.mkdir(0o700)
    held = os.open(root, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(
        DiskError, match=rf"{root} has been locked for \d+ s by process {os.getpid()} \("
    ):
        RunFolder(tmp_path)
    os.close(held)
    RunFolder(tmp_path).close()


@pytest.mark.parametrize("damage", ["flip", "zero", "swap", "cut", "fifo"])
def test_without_a_compiler_damage_is_seen_too(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path, aio={"engine": "python threads", "block_size": 8192})
    tensors = [store.copy_in(torch.arange(10_000.0) + n) for n in range(2)]
    store.evict(tensors)
    store.flush()
    file, other = sorted(store.folder.path.glob("*.bin"))
    store.fetch(tensors)
    store.wait(tensors)
    store.evict(tensors, changed=False)
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[20_000] ^= 1
        file.write_bytes(data)
    elif damage == "zero":
        file.write_bytes(bytes(len(data)))
    elif damage == "swap":
        file.write_bytes(other.read_bytes())
    elif damage == "cut":
        os.truncate(file, 8192)
    else:
        file.unlink()
        os.mkfifo(file)
    told = {"cut": "the file ends there", "fifo": "is a FIFO"}
    with pytest.raises(DiskError, match=rf"{file}.*{told.get(damage, 'has other contents at')}"):
        store.fetch([tensors[0]])
        store.wait([tensors[0]])
    store.close()


def test_folders_and_tensors_that_cannot_be_used(tmp_path: Path, store: NvmeStore) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=rf"{tmp_path}/file.*nvme_path must be a folder"):
        open_store(tmp_path / "file")
    with pytest.raises(UsageError, match="nvme_path is missing"):
        open_store("")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="was not fetched from this store"):
        tensor, _ = rest(store)
        store.wait([tensor])
    for shared in (torch.zeros(100), store.copy_in(torch.zeros(100))):
        shared.numpy()
        with pytest.raises(UsageError, match="cannot be freed"):
            store.evict([shared])
        assert shared.tolist() == [0] * 100


def test_what_stays_in_memory_is_never_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_in_cpu=1500)
    tensors = [store.copy_in(torch.full((1000,), float(i))) for i in range(3)]
    store.evict(tensors)
    store.fetch(tensors)
    store.wait(tensors)
    assert store.moved.written == 2 * 4096 and [t.mean() for t in tensors] == [0, 1, 2]
    store.evict(tensors)
    store.allocate(tensors)
    for t in tensors:
        t.fill_(7)
    # the files hold older values: they are written all the same
    store.evict(tensors, changed=False)
    store.fetch(tensors)
    store.wait(tensors)
    assert all(t.tolist() == [7] * 1000 for t in tensors)
    store.close()
