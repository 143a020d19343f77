"""What a checkpoint directory holds: names, tags and the manifest, as frozen values (torch-free).

docs/checkpoint-format.md says the same in words. A change of meaning raises VERSION and keeps a
reader for the old.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import xxhash
from ds_run_state.opening import parse_json, read_small, read_start
from ds_run_state.slices import Box

from ds_checkpoint.folder.boxes import form_grid
from ds_core.errors import CheckpointError

FORMAT = "ds_core.checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
LATEST = "latest"
COMMON = "common.safetensors"
README = "README.md"

_TAG = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_FILE = re.compile(r"(rank(?P<rank>\d{5}|[1-9]\d{5,8})(-local)?|common)\.safetensors", re.ASCII)
MAX_MANIFEST = 1 << 28
_MAX_VALUES = 1 << 24
MAX_LATEST = 1 << 10
_MAX_DIMS = 64
_MAX_COUNT = 1 << 63
DAMAGED = "the checkpoint is damaged or was edited; load another tag"


_SEAL = b',\n "checksum": "'


def checksum(data: bytes) -> str:
    """XXH3-128 in hex: against accidents, at the speed of memory; it is no protection from an
    attacker.
    """
    return xxhash.xxh3_128_hexdigest(data)


def rank_file(rank: int) -> str:
    """The file of the states that `rank` stores."""
    return f"rank{rank:05d}.safetensors"


def local_file(rank: int) -> str:
    """The file of what belongs to `rank` alone: random states and the like."""
    return f"rank{rank:05d}-local.safetensors"


def check_tag(tag: object) -> str:
    """`tag` itself; CheckpointError when it could not be a directory name of its own below any
    directory.
    """
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag in (".", ".."):
        raise CheckpointError(
            f"tag {tag!r}: use 1 to 128 of the characters A-Z a-z 0-9 . _ - (and not '.' or '..')"
        )
    if tag == LATEST or tag.startswith((".tmp-", ".old-")):
        raise CheckpointError(
            f"tag {tag!r} is a name that checkpoints use themselves; choose another"
        )
    return tag


def check_name(name: str) -> str:
    """`name` itself; CheckpointError unless it stays below any folder, as exports make a file of
    each state.
    """
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CheckpointError(
            f"{name!r:.200} is the path of a file, and no name of a state or weight"
        )
    return name


@dataclass(frozen=True, slots=True)
class Chunk:
    """The range [start, stop) of a row-major flattened state, or of a box of it: a 1-d tensor `key`
    in `file`.
    """

    file: str
    key: str
    start: int
    stop: int
    box: Box | None = None

    def within(self, shape: tuple[int, ...]) -> Box:
        """The box of a state of that shape."""
        return Box.whole(shape) if self.box is None else self.box


@dataclass(frozen=True, slots=True)
class SavedState:
    """One model state.

    at: coordinates on the mesh axes along which other states bear the same name.

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
    """All of a checkpoint but its tensors."""

    # A new random id for each save, which is also in every file's metadata.
    save_id: str
    tag: str
    step: int
    # Counts the saves into one folder, so that they are ordered whatever the clocks say; 0 in
    # checkpoints older than this field.
    serial: int
    # -- the run that saved it
    world_size: int
    mesh: dict[str, int]
    versions: dict[str, str]
    plugins: dict[str, str]
    config: Any
    optimizer: str | None
    # -- what it holds
    # All files but the manifest.
    files: dict[str, Mark]
    states: tuple[SavedState, ...]
    # Further name -> first name, of module tensors that several modules share.
    shared: dict[str, str]
    # Weights that were left out on purpose, and parameters that were not trained.
    excluded: tuple[str, ...]
    frozen: tuple[str, ...]
    # Module name -> the rank whose local file has its extra state.
    module_extra: dict[str, int]
    # Values of the run and of the program, as `ds_checkpoint.folder.values` encodes them.
    run: Any
    client: Any


def render_manifest(manifest: Manifest) -> bytes:
    """The JSON text, with one line per state so that it can be read and compared; it ends with its
    own checksum.
    """
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


HEAD_BYTES = 1024
"""As many bytes of a manifest have its serial and its step in them."""

_BEGIN = re.compile(
    rb'\s*\{\s*"format":\s*"ds_core\.checkpoint",(?:\s*"version":\s*(\d{1,9})\b)?', re.ASCII
)
_HEAD = re.compile(
    rb'\{\n "format": "ds_core\.checkpoint",'
    rb'(?:\n "version": \d+,\n "save_id": "[^"\n]*",\n "tag": "[\w.-]*",\n "step": (\d{1,18}),'
    rb'(?:\n "serial": (\d{1,18}),)?)?',
    re.ASCII,
)


def read_head(path: Path) -> tuple[int, int] | None:
    """(serial, step) of the manifest at `path`, which order checkpoints; 0 for what it lacks.

    None when it does not begin as ours do. Only its first lines are read.
    """
    try:
        return parse_head(read_start(path, HEAD_BYTES))
    except (OSError, CheckpointError):
        return None


def parse_head(start: bytes) -> tuple[int, int] | None:
    """`read_head`, of the first `HEAD_BYTES` bytes of a manifest."""
    found = _HEAD.match(start)
    return None if found is None else (int(found[2] or 0), int(found[1] or 0))


def read_latest_file(path: Path) -> str:
    """The tag in the file ``latest``; CheckpointError when there is none in it, FileNotFoundError
    without the file.

    Files of before have a second line, with a checksum of the tag.
    """
    try:
        data = read_small(path, MAX_LATEST)
    except CheckpointError as error:
        raise _no_tag(path, error) from None
    return parse_latest(data, path)


def parse_latest(data: bytes, path: object) -> str:
    """The tag in `data`, the content of a file ``latest``; CheckpointError when there is none.

    path: where it was read, for messages.
    """
    try:
        tag, _, seal = data.decode().strip().partition("\n")
        if seal and seal != f"xxh3 {checksum(tag.encode())}":
            raise CheckpointError("the tag in it is not the one that was written")
        return check_tag(tag)
    except (CheckpointError, UnicodeDecodeError) as error:
        raise _no_tag(path, error) from None


def _no_tag(path: object, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} does not hold a tag: {error}; give the tag to load")


def parse_manifest(path: Path) -> Manifest:
    """Read and check ``manifest.json``; CheckpointError naming the file when anything about it is
    not as it must be.
    """
    try:
        text = read_small(path, MAX_MANIFEST)
    except FileNotFoundError:
        raise no_manifest(path) from None
    return check_manifest(text, path)


def no_manifest(path: object) -> CheckpointError:
    """What to raise where there is no file at `path`."""
    return CheckpointError(f"{path} is missing: this is not a whole checkpoint; load another tag")


def check_manifest(text: bytes, path: object) -> Manifest:
    """`parse_manifest`, of the text that was read at `path`."""
    if (said := _BEGIN.match(text)) is None:
        raise CheckpointError(
            f"{path} does not say it is a {FORMAT!r}; was it written by another program?"
        )
    if int(said[1] or 0) > VERSION:
        raise _other_version(path, int(said[1]))  # its checksum may be of another kind
    body, seal, rest = text.rpartition(_SEAL)
    sealed = bool(seal) and rest == checksum(body).encode() + b'"\n}\n'
    if seal and not sealed:
        raise CheckpointError(f"{path} is not as it was written: its checksum is wrong; {DAMAGED}")
    try:
        data = parse_json(text, _MAX_VALUES)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {DAMAGED}") from error
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{path} says twice what it is; {DAMAGED}")
    if data.get("version") not in range(1, VERSION + 1):
        raise _other_version(path, data.get("version"))
    if data["version"] > 1 and not sealed:
        raise CheckpointError(
            f"{path} is not as it was written: its checksum is missing; {DAMAGED}"
        )
    try:
        manifest = _manifest(_Fields(data, "manifest"), sealed=data["version"] > 1)
        check_coverage(manifest.states)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; {DAMAGED}") from None
    return manifest


def _other_version(path: object, version: object) -> CheckpointError:
    return CheckpointError(
        f"{path} has format version {version!r:.40}, this dscore-train reads versions 1 to {VERSION}; "
        "install a dscore-train that reads it"
    )


def _manifest(data: _Fields, *, sealed: bool) -> Manifest:
    world_size = data.count("world_size")
    files = _marks(data, world_size, sealed)
    rows = data.get("states", list)
    states = tuple(_state(_Fields(s, "a state"), files) for s in rows)
    places = [(chunk.file, chunk.key) for state in states for chunk in state.chunks]
    if len(set(places)) < len(places):  # or a small file would represent states of any size
        [(place, _)] = Counter(places).most_common(1)
        raise CheckpointError(f"tensor {place[1]!r} in {place[0]!r} belongs to several states")
    extra = data.mapping("module_extra", int)
    if bad := sorted(m for m, rank in extra.items() if not 0 <= rank < world_size):
        raise CheckpointError(
            f"'module_extra' gives module {bad[0]!r} a rank outside of the world of {world_size}"
        )
    return Manifest(
        save_id=data.get("save_id", str),
        tag=data.get("tag", str),
        step=data.count("step"),
        serial=data.count("serial") if "serial" in data.data else 0,
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


def _marks(data: _Fields, world_size: int, sealed: bool) -> dict[str, Mark]:
    """The files, which are those of `world_size` ranks."""
    entries = data.get("files", dict)
    if not 1 <= world_size <= len(entries):  # before anything is counted up to it
        raise CheckpointError(f"'world_size' is {world_size}, and 'files' names {len(entries)}")
    for name in entries:
        found = _FILE.fullmatch(name)
        if found is None or int(found["rank"] or 0) >= world_size:
            raise CheckpointError(
                f"{name!r} is not a file name that a checkpoint of {world_size} ranks can have"
            )
    if missing := next((n for n in map(local_file, range(world_size)) if n not in entries), None):
        raise CheckpointError(f"'files' lacks {missing}")
    fields = {name: _Fields(entry, name) for name, entry in entries.items()}
    return {
        n: Mark(e.count("size"), e.get("checksum", str) if sealed else None)
        for n, e in fields.items()
    }


def _state(data: _Fields, files: dict[str, Mark]) -> SavedState:
    chunks = []
    for row in data.get("chunks", list):
        entry = _Fields(row, "a chunk")
        place = entry.count("start"), entry.count("stop")
        chunks.append(Chunk(entry.get("file", str), entry.get("key", str), *place, _box(entry)))
        if chunks[-1].file not in files:
            raise CheckpointError(
                f"state {data.get('name', str)!r} is in {chunks[-1].file!r}, which 'files' lacks"
            )
    shape = data.sizes("shape")
    return SavedState(
        data.get("name", str), data.mapping("at", int), shape, data.get("dtype", str), tuple(chunks)
    )


def _box(chunk: _Fields) -> Box | None:
    if "box" not in chunk.data:
        return None
    box = _Fields(chunk.data["box"], "a box")
    return Box(box.sizes("first"), box.sizes("size"))


def check_coverage(states: Iterable[SavedState]) -> None:
    """CheckpointError for a name that is a path, and unless the chunks of each state cover it once,
    in order.
    """
    for state in states:
        check_name(state.name)
        if not state.chunks:
            raise CheckpointError(f"state {state.name!r} has {state.numel} elements, 0 are stored")
        boxes = []
        for box, chunks in itertools.groupby(
            state.chunks, key=lambda chunk: chunk.within(state.shape)
        ):
            _check_box(state, box, chunks)
            boxes.append(box)
        filled = [box for box in boxes if box.numel]  # a rank may have nothing of it
        if not form_grid(filled or boxes, state.shape):
            raise CheckpointError(
                f"state {state.name!r} of shape {state.shape} is not what its boxes put together "
                "give"
            )


def _check_box(state: SavedState, box: Box, chunks: Iterable[Chunk]) -> None:
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
        self.data = data
        self.what = what

    def get(self, key: str, kind: Any) -> Any:
        """The field; `kind` is what isinstance takes."""
        value = self.data.get(key)
        if key not in self.data or not _is_a(value, kind):
            raise CheckpointError(f"field {key!r} of {self.what} is missing or of a wrong type")
        return value

    def count(self, key: str) -> int:
        """A field that counts: an int of at least 0 (and of at most 63 bits, so that sums and
        products cost little).
        """
        value: int = self.get(key, int)
        if not 0 <= value < _MAX_COUNT:
            raise CheckpointError(
                f"field {key!r} of {self.what} is {value if value < 0 else 'too large'}"
            )
        return value

    def sizes(self, key: str) -> tuple[int, ...]:
        """A field that is a list of counts, one for each dimension, whose product is one as
        well."""
        values = tuple(self.items(key, int))
        if (
            len(values) > _MAX_DIMS
            or not all(0 <= n < _MAX_COUNT for n in values)
            or math.prod(values) >= _MAX_COUNT
        ):
            shown = str(list(values)) if len(values) <= _MAX_DIMS else f"{len(values)} of them"
            raise CheckpointError(
                f"field {key!r} of {self.what} has impossible sizes: {shown[:200]}"
            )
        return values

    def items(self, key: str, kind: type) -> Sequence[Any]:
        """A field that is a list of `kind`."""
        values: list[Any] = self.get(key, list)
        if not all(_is_a(v, kind) for v in values):
            raise CheckpointError(f"an item of field {key!r} of {self.what} is of a wrong type")
        return values

    def mapping(self, key: str, kind: type) -> dict[str, Any]:
        """A field that is an object whose values are all `kind`."""
        values: dict[str, Any] = self.get(key, dict)
        if (wrong := next((k for k, v in values.items() if not _is_a(v, kind)), None)) is not None:
            raise CheckpointError(f"field {wrong!r} of {key!r} of {self.what} is of a wrong type")
        return values


def _is_a(value: object, kind: Any) -> bool:
    """Whether `value` is one; a bool is never an int."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
