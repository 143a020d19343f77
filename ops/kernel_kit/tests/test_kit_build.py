"""The builder: what is compiled when, what is loaded, and what is said when it cannot be."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ds_cli.doctor import checks
from ds_kernel_kit import build
from ds_kernel_kit import cache as folder
from ds_kernel_kit.build import Extension, Unit

from ds_core.errors import KernelError

SOURCE = """
#include <Python.h>
#include "number.h"
static PyObject* number(PyObject*, PyObject*) { return PyLong_FromLong(NUMBER + EXTRA); }
static PyMethodDef methods[] = {{"number", number, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tiny", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__tiny() { return PyModule_Create(&definition); }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DS_CORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    yield tmp_path / "cache" / "ops"
    build._LOADED.clear()


@pytest.fixture
def tiny(tmp_path: Path) -> Extension:
    folder = tmp_path / "a folder with spaces, $ and 'quotes'"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    (folder / "number.h").write_text("#define NUMBER 40\n")
    flags = ("-std=c++17", "-fPIC", "-DEXTRA=2")
    return Extension("ds-tiny", "_tiny", folder, (Unit("tiny.cpp"),), flags=flags)


def test_builds_once_and_says_so(
    tiny: Extension, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.why_not(tiny) is None and not cache.exists()  # asking starts nothing
    with caplog.at_level(logging.WARNING, "ds_kernel_kit"):
        module = build.load(tiny)
    assert module.number() == 42
    assert [r.getMessage().split(" in ")[0].split(" (")[0] for r in caplog.records] == [
        "building ds-tiny",
        "built ds-tiny",
    ]
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]
    assert (cache.stat().st_mode & 0o777) == 0o700
    assert build.load(tiny) is module


def test_looking_at_the_folder_makes_nothing(cache: Path) -> None:
    assert folder.cache_folder(make=False) == cache and not cache.parent.exists()


def test_another_process_takes_it_from_the_cache(
    tiny: Extension, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.load(tiny)
    build._LOADED.clear()  # as a new process begins
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("built again"))
    assert build.load(tiny).number() == 42


def test_the_key_is_of_all_that_counts(tiny: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [build._key(tiny), build._key(replace(tiny, flags=(*tiny.flags, "-O1")))]
    keys.append(build._key(replace(tiny, units=(Unit("tiny.cpp", ("-O1",)),))))
    (tiny.folder / "number.h").write_text("#define NUMBER 41\n")
    keys.append(build._key(tiny))
    monkeypatch.setattr(build, "_compilers", lambda _: ["another compiler"])
    keys.append(build._key(tiny))
    assert len(set(keys)) == len(keys)


def test_a_changed_source_is_built_anew(tiny: Extension) -> None:
    build.load(tiny)
    (tiny.folder / "number.h").write_text("#define NUMBER 50\n")
    build._LOADED.clear()
    assert build.load(tiny).number() == 52


def test_a_library_under_a_foreign_key_is_not_loaded(tiny: Extension, cache: Path) -> None:
    other = replace(tiny, flags=("-std=c++17", "-fPIC", "-DEXTRA=666"))
    planted = build.build(other)
    target = build._target(tiny)
    target.write_bytes(planted.read_bytes())
    assert build.find(tiny) is None
    assert build.load(tiny).number() == 42


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_refused(tiny: Extension, cache: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    with pytest.raises(
        KernelError, match=f"mode {mode:04o}.*; remove it .* or set DS_CORE_CACHE"
    ) as caught:
        build.build(tiny)
    assert "chmod" not in str(caught.value)  # which would bless what others have put there


@pytest.mark.parametrize("which", ["the base", "a folder above"])
def test_a_base_that_others_can_change_is_refused(tiny: Extension, cache: Path, which: str) -> None:
    build.build(tiny)
    changed = cache.parent if which == "the base" else cache.parent.parent
    before = changed.stat().st_mode
    changed.chmod(0o777)
    with pytest.raises(KernelError, match="other users could put another folder in its place"):
        build.find(tiny)
    assert [f.level for f in checks.examine() if f.part == "kernel cache"] == ["fault"]
    changed.chmod(0o1777)  # sticky, as /tmp is: others cannot rename what they do not own
    assert build.find(tiny) is not None
    changed.chmod(before)


@pytest.mark.parametrize("which", ["base", "ops"])
def test_a_linked_folder_is_refused(
    tiny: Extension, cache: Path, tmp_path: Path, which: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link = cache if which == "ops" else cache.parent
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(KernelError, match="a link"):
        build.build(tiny)


@pytest.mark.fast_cases("link", "others may write", "changed", "unloadable")
@pytest.mark.parametrize(
    "how", ["link", "fifo", "others may write", "cut off", "changed", "unloadable"]
)
def test_a_library_that_cannot_be_trusted_is_built_anew(
    tiny: Extension, cache: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = build.build(tiny)
    data = target.read_bytes()
    if how in ("link", "fifo"):
        target.unlink()
    if how == "link":
        (tmp_path / "planted").write_bytes(data)
        target.symlink_to(tmp_path / "planted")
    elif how == "fifo":
        os.mkfifo(target)
    elif how == "others may write":
        target.chmod(0o720)
    elif how == "unloadable":  # whole and ours, but nothing that the linker takes
        target.write_bytes(f"no library {build.MARK}{build._key(tiny)}".encode())
        build._seal(target)
    else:
        target.write_bytes(data[:-1000] if how == "cut off" else data.replace(b"_tiny", b"_tinx"))
    if how != "unloadable":
        assert build.find(tiny) is None
    assert build.load(tiny).number() == 42
    assert target.name in caplog.text and "building ds-tiny" in caplog.text
    assert target.is_file() and not target.is_symlink() and target.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("suffix", [".so", ".lock"])
def test_a_folder_in_a_files_place_is_named(tiny: Extension, cache: Path, suffix: str) -> None:
    taken = build._target(tiny).with_suffix(suffix)
    (taken / "mine").mkdir(parents=True)
    with pytest.raises(KernelError, match=rf"{taken} is a folder.*remove it"):
        build.load(tiny)
    assert [p.name for p in taken.iterdir()] == ["mine"]


def test_a_library_that_never_loads_is_a_kernel_error(tiny: Extension) -> None:
    (tiny.folder / "tiny.cpp").write_text("int f() { return 1; }\n")
    with pytest.raises(KernelError, match="ds-tiny: .* cannot be loaded: .*PyInit__tiny"):
        build.load(tiny)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("which", ["library", "lock", "ops", "base", "above"])
def test_what_another_user_owns_is_not_trusted(tiny: Extension, cache: Path, which: str) -> None:
    target = build.build(tiny)
    lock = target.with_suffix(".lock")
    nobody = 65534
    paths = {
        "library": target,
        "lock": lock,
        "ops": cache,
        "base": cache.parent,
        "above": cache.parent.parent,
    }
    os.chown(paths[which], nobody, nobody)
    if which == "library":
        assert build.find(tiny) is None and build.load(tiny).number() == 42
        assert target.stat().st_uid == 0
        return
    with pytest.raises(KernelError, match="65534"):
        build.build(tiny, again=True)


def test_the_compilers_own_words(tiny: Extension, cache: Path) -> None:
    (tiny.folder / "tiny.cpp").write_text("int f() { return undeclared_thing; }\n")
    with pytest.raises(KernelError, match="does not compile here") as caught:
        build.load(tiny)
    text = str(caught.value)
    assert (
        "undeclared_thing" in text
        and "g++" in text
        and '"plugins": {"disable": ["ds-tiny"]}' in text
    )
    assert [p.suffix for p in cache.iterdir()] == [".lock"]  # nothing half-made is left


@pytest.mark.parametrize(
    ("absent", "fix"),
    [
        ("g++", "apt install g++"),
        ("ninja", "pip install ninja"),
        ("pybind11", "pip install pybind11"),
    ],
)
def test_a_missing_tool_is_named(
    tiny: Extension, monkeypatch: pytest.MonkeyPatch, absent: str, fix: str
) -> None:
    tool = build._tool
    spec = build.importlib.util.find_spec
    monkeypatch.setattr(build, "_tool", lambda name: None if name == absent else tool(name))
    monkeypatch.setattr(
        build.importlib.util, "find_spec", lambda name: None if name == absent else spec(name)
    )
    why = build.why_not(tiny)
    assert why is not None and f"{absent} not found" in why and fix in why
    with pytest.raises(KernelError, match="ds-tiny cannot be built"):
        build.load(tiny)


def test_a_compiler_named_in_cxx_is_not_replaced_silently(
    tiny: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    why = build.why_not(tiny)
    assert why is not None and "g++ not found" in why and "CXX" in why


CHILD = """
import json, sys, time
from pathlib import Path
from ds_kernel_kit import build
what = json.loads(sys.argv[1])
units = (build.Unit("tiny.cpp"),)
extension = build.Extension("ds-tiny", "_tiny", Path(what["folder"]), units, flags=tuple(what["flags"]))
if what["hang"]:
    build._compile = lambda *_: (print("holding", flush=True), time.sleep(600))
else:
    inner = build._compile
    build._compile = lambda *a: (print("compiled", flush=True), inner(*a))[1]
print(build.load(extension).number(), flush=True)
"""


@pytest.fixture
def child(tiny: Extension) -> Callable[[bool], subprocess.Popen[str]]:
    def start(hang: bool) -> subprocess.Popen[str]:
        what = json.dumps({"folder": str(tiny.folder), "flags": tiny.flags, "hang": hang})
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, what], stdout=subprocess.PIPE, text=True
        )

    return start


def test_processes_that_come_together_build_once(
    child: Callable[[bool], subprocess.Popen[str]],
) -> None:
    said = [p.communicate(timeout=300)[0].split() for p in [child(False) for _ in range(3)]]
    assert [words[-1] for words in said] == ["42"] * 3
    assert sum("compiled" in words for words in said) == 1


def test_a_killed_build_makes_nobody_wait(
    child: Callable[[bool], subprocess.Popen[str]], cache: Path
) -> None:
    killed = child(True)
    assert killed.stdout is not None and killed.stdout.readline() == "holding\n"
    assert [p for p in cache.iterdir() if ".tmp." in p.name]
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    start = time.monotonic()
    next_one = child(False)
    assert next_one.communicate(timeout=300)[0].split() == ["compiled", "42"]
    assert time.monotonic() - start < 60
    assert not [p for p in cache.iterdir() if ".tmp." in p.name]


def test_a_wheels_library_serves_without_any_tool(
    tiny: Extension, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = replace(tiny, prebuilt=tmp_path / "prebuilt")
    build.prebuild(tiny, tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_tool", lambda _: None)
    assert build.why_not(carried) is None
    assert build.load(carried).number() == 42 and not cache.exists()


def test_a_wheels_library_of_other_sources_does_not(tiny: Extension, tmp_path: Path) -> None:
    carried = replace(tiny, prebuilt=tmp_path / "prebuilt")
    build.prebuild(tiny, tmp_path / "prebuilt")
    (tiny.folder / "number.h").write_text("#define NUMBER 70\n")
    assert build.load(carried).number() == 72
