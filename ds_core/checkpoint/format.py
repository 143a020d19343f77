"""What a checkpoint directory holds: names, tags and the manifest, as frozen values (torch-free).

docs/checkpoint-format.md says the same in words. A change of meaning raises VERSION and keeps a reader for the old.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import xxhash

from ds_core.boxes import Box, form_grid
from ds_core.errors import CheckpointError

__all__ = [
    "COMMON",
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "README",
    "VERSION",
    "Chunk",
    "Manifest",
    "Mark",
    "State",
    "check_coverage",
    "check_tag",
    "checksum",
    "local_file",
    "parse_latest",
    "parse_manifest",
    "rank_file",
    "render_latest",
    "render_manifest",
]

FORMAT = "ds_core.checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
LATEST = "latest"
COMMON = "common.safetensors"
README = "README.md"

_TAG = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_FILE = re.compile(r"(rank\d{5,}(-local)?|common)\.safetensors", re.ASCII)
DAMAGED = "the checkpoint is damaged or was changed by hand; load another tag"


_SEAL = b',\n "checksum": "'


def checksum(data: bytes) -> str:
    """XXH3-128 in hex: against accidents, at the speed of memory; it is no protection from an attacker."""
    return xxhash.xxh3_128_hexdigest(data)


def rank_file(rank: int) -> str:
    """The file of the states that `rank` stores."""
    return f"rank{rank:05d}.safetensors"


def local_file(rank: int) -> str:
    """The file of what belongs to `rank` alone: random states and the like."""
    return f"rank{rank:05d}-local.safetensors"


def check_tag(tag: object) -> str:
    """`tag` itself; CheckpointError when it could not be a directory name of its own below any directory."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag in (".", ".."):
        raise CheckpointError(f"tag {tag!r}: use 1 to 128 of the characters A-Z a-z 0-9 . _ - (and not '.' or '..')")
    if tag == LATEST or tag.startswith((".tmp-", ".old-")):
        raise CheckpointError(f"tag {tag!r} is a name that checkpoints use themselves; choose another")
    return tag


@dataclass(frozen=True, slots=True)
class Chunk:
    """The range [start, stop) of a row-major flattened state, or of a box of it: a 1-d tensor `key` in `file`."""

    file: str
    key: str
    start: int
    stop: int
    box: Box | None = None

    def within(self, shape: tuple[int, ...]) -> Box:
        """The box of a state of that shape."""
        return Box.whole(shape) if self.box is None else self.box


@dataclass(frozen=True, slots=True)
class State:
    """One model state. at: coordinates on the mesh axes along which other states bear the same name.

    dtype: as safetensors spells it ("F32").
    """

    name: str
    at: dict[str, int]
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole state."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Mark:
    """Of one file: its bytes, and their checksum; None in checkpoints of version 1."""

    size: int
    checksum: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint but its tensors.

    save_id: drawn anew for each save, and also in every file's metadata. files: all but the manifest. shared: further
    names of module tensors that several modules share. excluded: weights left out on purpose. frozen: parameters that
    were not trained. module_extra: module
    name -> the rank whose local file has its extra state. run, client: as `ds_core.checkpoint.values` encodes them.
    """

    save_id: str
    tag: str
    step: int
    world_size: int
    mesh: dict[str, int]
    versions: dict[str, str]
    plugins: dict[str, str]
    config: Any
    optimizer: str | None
    files: dict[str, Mark]
    states: tuple[State, ...]
    shared: dict[str, str]
    excluded: tuple[str, ...]
    frozen: tuple[str, ...]
    module_extra: dict[str, int]
    run: Any
    client: Any


def render_manifest(manifest: Manifest) -> bytes:
    """The JSON text, with one line per state so that it can be read and compared; it ends with its own checksum."""
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    fields |= {field.name: getattr(manifest, field.name) for field in dataclass_fields(manifest)}
    fields["files"] = {name: asdict(mark) for name, mark in manifest.files.items()}
    states = [asdict(state) for state in fields.pop("states")]
    for chunk in (chunk for state in states for chunk in state["chunks"] if chunk["box"] is None):
        del chunk["box"]
    head = json.dumps(fields, indent=1, allow_nan=False)
    rows = ",\n".join("  " + json.dumps(state, allow_nan=False) for state in states)
    body = (head[:-2] + f',\n "states": [\n{rows}\n ]').encode()
    return body + _SEAL + checksum(body).encode() + b'"\n}\n'


def render_latest(tag: str) -> bytes:
    """The content of ``latest``: the tag, and a line by which a changed one is noticed."""
    return f"{tag}\nxxh3 {checksum(tag.encode())}\n".encode()


def parse_latest(text: str) -> str:
    """The tag in ``latest``; a file written by hand needs no second line. CheckpointError for anything else."""
    tag, _, seal = text.strip().partition("\n")
    if seal and seal != f"xxh3 {checksum(tag.encode())}":
        raise CheckpointError("the tag in it is not the one that was written")
    return check_tag(tag)


def parse_manifest(path: Path) -> Manifest:
    """Read and check ``manifest.json``; CheckpointError naming the file when anything about it is not as it must be."""
    try:
        text = path.read_bytes()
        data = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is not a whole checkpoint; load another tag") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {DAMAGED}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not say it is a {FORMAT!r}; was it written by another program?")
    if data.get("version") not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{path} has format version {data.get('version')!r}, this ds-core reads versions 1 to {VERSION}; "
            "install a ds-core that reads it"
        )
    if data["version"] > 1:
        body, seal, _ = text.rpartition(_SEAL)
        if not seal or data.get("checksum") != checksum(body):
            raise CheckpointError(f"{path} is not as it was written: its checksum is wrong; {DAMAGED}")
    try:
        manifest = _manifest(_Fields(data, "manifest"), sealed=data["version"] > 1)
        check_coverage(manifest.states)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; {DAMAGED}") from None
    return manifest


def _manifest(data: _Fields, *, sealed: bool) -> Manifest:
    entries = {name: _Fields(entry, name) for name, entry in data.get("files", dict).items()}
    files = {n: Mark(e.count("size"), e.get("checksum", str) if sealed else None) for n, e in entries.items()}
    if bad := sorted(name for name in files if not _FILE.fullmatch(name)):
        raise CheckpointError(f"{bad[0]!r} is not a file name that a checkpoint can have")
    states = tuple(_state(_Fields(s, "a state"), files) for s in data.get("states", list))
    world_size = data.count("world_size")
    if missing := [local_file(r) for r in range(world_size) if local_file(r) not in files]:
        raise CheckpointError(f"'files' lacks {missing[0]}")
    extra = data.mapping("module_extra", int)
    if bad := sorted(m for m, rank in extra.items() if not 0 <= rank < world_size):
        raise CheckpointError(f"'module_extra' gives module {bad[0]!r} a rank outside of the world of {world_size}")
    return Manifest(
        save_id=data.get("save_id", str),
        tag=data.get("tag", str),
        step=data.count("step"),
        world_size=world_size,
        mesh=data.mapping("mesh", int),
        versions=data.mapping("versions", str),
        plugins=data.mapping("plugins", str),
        config=data.get("config", object),
        optimizer=data.get("optimizer", (str, type(None))),
        files=files,
        states=states,
        shared=data.mapping("shared", str),
        excluded=tuple(data.items("excluded", str)),
        frozen=tuple(data.items("frozen", str)) if sealed else (),
        module_extra=extra,
        run=data.get("run", object),
        client=data.get("client", object),
    )


def _state(data: _Fields, files: dict[str, Mark]) -> State:
    chunks = []
    for row in data.get("chunks", list):
        entry = _Fields(row, "a chunk")
        place = entry.count("start"), entry.count("stop")
        chunks.append(Chunk(entry.get("file", str), entry.get("key", str), *place, _box(entry)))
        if chunks[-1].file not in files:
            raise CheckpointError(f"state {data.get('name', str)!r} is in {chunks[-1].file!r}, which 'files' lacks")
    shape = tuple(data.items("shape", int))
    if any(n < 0 for n in shape):
        raise CheckpointError(f"state {data.get('name', str)!r} has shape {list(shape)}")
    return State(data.get("name", str), data.mapping("at", int), shape, data.get("dtype", str), tuple(chunks))


def _box(chunk: _Fields) -> Box | None:
    if "box" not in chunk.data:
        return None
    box = _Fields(chunk.data["box"], "a box")
    return Box(tuple(box.items("first", int)), tuple(box.items("size", int)))


def check_coverage(states: Iterable[State]) -> None:
    """CheckpointError unless the chunks of each state cover it once, in order, without gap or overlap."""
    for state in states:
        if not state.chunks:
            raise CheckpointError(f"state {state.name!r} has {state.numel} elements, 0 are stored")
        boxes = []
        for box, chunks in itertools.groupby(state.chunks, key=lambda chunk: chunk.within(state.shape)):
            _check_box(state, box, chunks)
            boxes.append(box)
        filled = [box for box in boxes if box.numel]  # a rank may have nothing of it
        if not form_grid(filled or boxes, state.shape):
            raise CheckpointError(
                f"state {state.name!r} of shape {state.shape} is not what its boxes put together give"
            )


def _check_box(state: State, box: Box, chunks: Iterable[Chunk]) -> None:
    place = 0
    for chunk in chunks:
        if chunk.start != place or chunk.stop < chunk.start:
            raise CheckpointError(
                f"state {state.name!r}: elements {place} to {chunk.start} are stored "
                f"{'nowhere' if chunk.start > place else 'twice'}"
            )
        place = chunk.stop
    if place != box.numel:
        raise CheckpointError(f"state {state.name!r} has {box.numel} elements, {place} are stored")


class _Fields:
    """A JSON object, with reads that say which field is wrong."""

    def __init__(self, data: Any, what: str) -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"{what} is not an object")
        self.data, self.what = data, what

    def get(self, key: str, kind: Any) -> Any:
        """The field; `kind` is what isinstance takes, and a bool is never an int."""
        value = self.data.get(key)
        if key not in self.data or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"field {key!r} of {self.what} is missing or of a wrong type")
        return value

    def count(self, key: str) -> int:
        """A field that counts: an int of at least 0."""
        value: int = self.get(key, int)
        if value < 0:
            raise CheckpointError(f"field {key!r} of {self.what} is {value}")
        return value

    def items(self, key: str, kind: type) -> Sequence[Any]:
        """A field that is a list of `kind`."""
        values: list[Any] = self.get(key, list)
        return [_Fields({key: v}, f"the items of {self.what}").get(key, kind) for v in values]

    def mapping(self, key: str, kind: type) -> dict[str, Any]:
        """A field that is an object whose values are all `kind`."""
        values: dict[str, Any] = self.get(key, dict)
        return {k: _Fields(values, f"{key!r} of {self.what}").get(k, kind) for k in values}
