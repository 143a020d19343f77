"""Compiling kernels: when one is first used or by ``dscore ops build``; never at import, never
silently (torch-free).

[Note: sources without torch's headers] A file that includes torch/extension.h took 97 s to compile
where the same kernel took 5 s without. So kernels take addresses and sizes through pybind11, and
one build serves every torch.

[Note: which library is loaded] A library's name holds the key of its build: a digest of sources,
flags, compiler and Python's ABI (and torch, where its headers are used). The same key is linked
into it and looked for in the file's bytes before anything of it runs, and a library in the cache
ends with a checksum of its own. So a file that was put under another key's name, or was cut off or
changed, is not loaded, and is built anew. Who could have written it is checked too: see
`ds_kernel_kit.cache`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ds_core.errors import KernelError
from ds_kernel_kit.cache import cache_folder as cache_folder
from ds_kernel_kit.cache import open_own, read_own

log = logging.getLogger("ds_kernel_kit")

MARK = "ds-build-key:"
RECORD = "prebuilt.json"
_SEAL_SIZE = 64
# What a missing tool asks of the user.
_MENDS = {
    "g++": "install g++ (Debian: apt install g++), or name a compiler in CXX",
    "ninja": "pip install ninja",
    "nvcc": "install the CUDA toolkit of torch's CUDA version, or set CUDA_HOME",
    "pybind11": "pip install pybind11",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """A source file, relative to its extension's folder, with flags of its own; ``.cu`` goes to
    nvcc.
    """

    path: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extension:
    """A compiled module: what it is made of and how."""

    # The distribution's, for messages.
    name: str
    # What the library defines (``PYBIND11_MODULE``).
    module: str
    # Where the units are; every header in it counts as a source.
    folder: Path
    units: tuple[Unit, ...]
    # Flags for each C++ unit; link: for the linker.
    flags: tuple[str, ...] = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden")
    link: tuple[str, ...] = ("-shared",)
    # Flags for each ``.cu`` unit.
    cuda_flags: tuple[str, ...] = ()
    # Adds torch's include folders, and torch's version to the key.
    torch_headers: bool = False
    # A folder in which a wheel may carry the finished library.
    prebuilt: Path | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        """The programs that building takes."""
        cuda = ("nvcc",) if any(u.path.endswith(".cu") for u in self.units) else ()
        return ("g++", "ninja", *cuda)


# -- asking ----------------------------------------------------------------------------------------


def why_not(extension: Extension) -> str | None:
    """None when `extension` is built or can be, else what is missing.

    Looks at files only; starts no program.
    """
    if (module_name(extension)) in _LOADED or _find_prebuilt(extension) is not None:
        return None
    missing = [tool for tool in extension.tools if _tool(tool) is None]
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if not missing:
        return None
    return f"not built, and cannot be: {' and '.join(missing)} not found; " + "; ".join(
        _MENDS[m] for m in missing
    )


def find(extension: Extension) -> Path | None:
    """The finished library, from the wheel or the cache; None when it must be built first."""
    return _find_prebuilt(extension) or (
        _find_cached(extension) if not _missing(extension) else None
    )


# -- loading and building --------------------------------------------------------------------------

_LOADED: dict[str, ModuleType] = {}


def load(extension: Extension) -> ModuleType:
    """The module, built now if need be (one log line before, one after); the same object in the
    whole process.

    Raises KernelError with what is missing, or with the compiler's own words.
    """
    name = module_name(extension)
    if name not in _LOADED:
        path = build(extension)
        try:
            _LOADED[name] = _import(extension, path)
        except KernelError as error:
            if path != _target(extension):  # a wheel's, which is not ours to replace
                raise
            log.warning("%s", error)
            _LOADED[name] = _import(extension, build(extension, again=True))
    return _LOADED[name]


def _import(extension: Extension, path: Path) -> ModuleType:
    """Run the library at `path`; KernelError when it cannot be loaded."""
    spec = importlib.util.spec_from_file_location(extension.module, path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # ImportError from the linker, anything from the module's own start
        raise KernelError(f"{extension.name}: {path} cannot be loaded: {error}") from error
    return module


def module_name(extension: Extension) -> str:
    """What tells extensions of one process apart."""
    return f"{extension.folder}:{extension.module}"


def build(extension: Extension, *, again: bool = False) -> Path:
    """The finished library; compiles it when neither the wheel nor the cache has it, or always with
    `again`.

    Several processes that come at once make one build. The lock is the operating system's: it ends
    with its process, so that a build that was killed blocks no later one.
    """
    if not again and (found := find(extension)) is not None:
        return found
    if missing := _missing(extension):
        raise KernelError(
            f"{extension.name} cannot be built: {' and '.join(missing)} not found; "
            + "; ".join(_MENDS[m] for m in missing)
        )
    # The key is in the name: another version of sources or compiler has another file.
    target = _target(extension)
    with _lock(target.with_suffix(".lock"), extension.name):
        if not again and (found := _find_cached(extension)) is not None:
            return found  # another process has built it meanwhile
        if target.is_dir() and not target.is_symlink():  # a file or link is replaced
            raise KernelError(
                f"{extension.name}: {target} is a folder, where the library that is built is to "
                "be; remove it"
            )
        for left in target.parent.glob(f"{target.stem}.tmp.*"):  # by a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        # In the same folder, so that the finished file can be renamed into place in one step.
        room = Path(tempfile.mkdtemp(prefix=f"{target.stem}.tmp.", dir=target.parent))
        try:
            made = _compile(extension, _key(extension), room)
            _seal(made)
            os.replace(made, target)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    return target


def prebuild(extension: Extension, folder: Path) -> list[Path]:
    """Build into `folder`, for a wheel; returns the library and its record.

    The wheel serves this Python's ABI only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if missing := _missing(extension):
        raise KernelError(f"{extension.name} cannot be built: {' and '.join(missing)} not found")
    key = _source_key(extension)
    with tempfile.TemporaryDirectory() as room:
        made = _compile(extension, key, Path(room))
        library = folder / f"{extension.module}{_suffix()}"
        shutil.copyfile(made, library)
    record = folder / RECORD
    said = {"key": key, "file": library.name, "compiler": _compilers(extension)}
    record.write_text(json.dumps(said, indent=1) + "\n")
    return [library, record]


def _compile(extension: Extension, key: str, room: Path) -> Path:
    """Run ninja in `room`; the library it made."""
    units = len(extension.units)
    log.warning("building %s (%d files, once for this compiler and Python)", extension.name, units)
    start = time.perf_counter()
    library = room / f"{extension.module}{_suffix()}"
    (room / "build.ninja").write_text(_ninja_file(extension, library.name))
    # A symbol that the linker keeps: the key can then be found in the file's bytes.
    (room / "key.cpp").write_text(
        f'__attribute__((used)) extern const char ds_build_key[] = "{MARK}{key}";\n'
    )
    ninja = _tool("ninja")
    assert ninja is not None
    done = subprocess.run(
        [ninja, "-C", str(room)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode or not library.exists():
        # The end of the output has the errors; templates fill pages before it.
        said = "\n".join(done.stdout.strip().splitlines()[-60:])
        raise KernelError(
            f"{extension.name} does not compile here "
            f"({'; '.join(_compilers(extension))}):\n{said}\n"
            f"fix the compiler, or do without: uninstall {extension.name}, or disable it "
            f'("plugins": {{"disable": ["{extension.name}"]}})'
        )
    log.warning("built %s in %.1f s", extension.name, time.perf_counter() - start)
    return library


def _ninja_file(extension: Extension, library: str) -> str:
    """Ninja's description of the build; ``$`` and spaces in paths are escaped its way."""
    include = " ".join(f"-isystem {_quote(path)}" for path in _includes(extension))
    compiler = _quote(str(_tool("g++")))
    nvcc = _quote(str(_tool("nvcc")))
    lines = [
        "rule cxx",
        f"  command = {compiler} -MMD -MF $out.d {' '.join(extension.flags)} {include} $flags -c "
        "$in -o $out",
        "rule cuda",
        f"  command = {nvcc} {' '.join(extension.cuda_flags)} {include} $flags -c $in -o $out",
        "rule link",
        f"  command = {compiler} $in {' '.join(extension.link)} -o $out",
    ]
    objects = ["key.o"]
    lines.append("build key.o: cxx key.cpp")
    # Numbered objects: units of two folders may have one name.
    for i, unit in enumerate(extension.units):
        objects.append(f"{i}_{Path(unit.path).stem}.o")
        rule = "cuda" if unit.path.endswith(".cu") else "cxx"
        source = (
            str(extension.folder / unit.path)
            .replace("$", "$$")
            .replace(" ", "$ ")
            .replace(":", "$:")
        )
        lines += [f"build {objects[-1]}: {rule} {source}", f"  flags = {' '.join(unit.flags)}"]
    return "\n".join([*lines, f"build {library}: link {' '.join(objects)}", ""])


def _quote(path: str) -> str:
    """One word for the shell that ninja starts, and for ninja."""
    return "'" + path.replace("'", "'\\''").replace("$", "$$") + "'"


def _includes(extension: Extension) -> list[str]:
    import pybind11

    found = [sysconfig.get_path("include"), pybind11.get_include()]
    if extension.torch_headers:
        from torch.utils.cpp_extension import include_paths

        found += include_paths()
    return found


# -- keys ------------------------------------------------------------------------------------------


def _source_key(extension: Extension) -> str:
    """What a build is made from, but for the tools: the key of a library inside a wheel."""
    digest = hashlib.sha256()
    names = {u.path for u in extension.units} | {
        str(p.relative_to(extension.folder)) for p in extension.folder.rglob("*.h*") if p.is_file()
    }
    # Name and length before the contents, so that two files cannot be taken for one.
    for name in sorted(names):
        data = (extension.folder / name).read_bytes()
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
    parts: list[object] = [extension.module, extension.flags, extension.link, extension.cuda_flags]
    parts += [[u.path, u.flags] for u in extension.units]
    parts += [_suffix(), sys.platform, platform.machine()]
    if extension.torch_headers:
        import torch

        parts.append(torch.__version__)
    digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


def _key(extension: Extension) -> str:
    import pybind11

    parts = [_source_key(extension), _compilers(extension), pybind11.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _target(extension: Extension) -> Path:
    return cache_folder() / f"{extension.name}-{_key(extension)[:24]}.so"


def _find_cached(extension: Extension) -> Path | None:
    """The library in the cache, if it is this build's, complete, and of no other user."""
    target = _target(extension)
    try:
        data = read_own(target)
    except FileNotFoundError:
        return None
    except (OSError, KernelError) as error:
        log.warning("%s is not loaded, and will be built again: %s", target.name, error)
        return None
    library = data[:-_SEAL_SIZE]
    seal = data[-_SEAL_SIZE:]
    if _carries(library, _key(extension)) and hashlib.sha256(library).hexdigest().encode() == seal:
        return target
    log.warning("%s is not as it was built, so it is built again", target)
    return None


def _seal(library: Path) -> None:
    """Add a checksum to a library that was just built, close it to others, and bring it to the
    disk.

    The linker leaves alone what follows the parts that a library's header tells of.
    """
    with library.open("rb+") as file:
        file.write(hashlib.sha256(file.read()).hexdigest().encode())
        file.flush()
        os.fchmod(file.fileno(), 0o700)
        os.fsync(file.fileno())


def _find_prebuilt(extension: Extension) -> Path | None:
    """The library that the wheel brought, when it was built from these very sources for this
    Python.

    A user who may write there may change the Python code next to it as well, so no owner is asked
    for.
    """
    if extension.prebuilt is None or not (extension.prebuilt / RECORD).exists():
        return None
    library = extension.prebuilt / f"{extension.module}{_suffix()}"
    try:
        return library if _carries(library.read_bytes(), _source_key(extension)) else None
    except OSError:
        return None


def _carries(library: bytes, key: str) -> bool:
    """Whether `key` is linked into it. Nothing of it is run to find out."""
    return f"{MARK}{key}".encode() in library


def _suffix() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


# -- tools -----------------------------------------------------------------------------------------


def _missing(extension: Extension) -> list[str]:
    missing = [tool for tool in extension.tools if _tool(tool) is None]
    return missing + (["pybind11"] if importlib.util.find_spec("pybind11") is None else [])


def _tool(name: str) -> str | None:
    """Where a program is.

    The C++ compiler may be named in CXX; ninja may be the Python package's.
    """
    if name == "g++":
        chosen = os.environ.get("CXX")
        return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("c++")
    if name == "ninja":
        return shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    # The toolkit that the user names goes before one on the PATH.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (shutil.which(name, path=os.path.join(home, "bin")) if home else None) or shutil.which(
        name
    )


def _compilers(extension: Extension) -> list[str]:
    """Path and version of each compiler that takes part."""
    return [
        _version(path)
        for tool in extension.tools
        if tool != "ninja" and (path := _tool(tool)) is not None
    ]


@functools.cache
def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"the compiler {path} does not run: {done.stderr.strip()[-200:]}")
    lines = done.stdout.strip().splitlines()
    return f"{path}: {lines[-1] if 'nvcc' in path else lines[0]}"


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Hold the lock; says so once when another process holds it."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process that builds %s", name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
