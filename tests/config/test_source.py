"""Reading: every format gives the same data, and nothing that is not a config ends in a traceback
of ours.
"""

from __future__ import annotations

import base64
import copy
import inspect
import json
import math
import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hjson
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_core.config import ConfigSource, read_config
from ds_core.errors import ConfigError

DEEP = 50_000
DATA: dict[str, Any] = {
    "train_batch_size": 8,
    "fp16": {"enabled": True, "loss_scale": 0.5},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 5e-4, "betas": [0.9, 0.999], "weight_decay": None},
    },
    "name": "größe ✓",
}


def write(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def fails(source: Any, *words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_config(source)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def test_a_dict_is_copied_and_left_alone() -> None:
    given_data = copy.deepcopy(DATA)
    read = read_config(given_data)
    assert read.raw == DATA == given_data
    read.raw["optimizer"]["params"]["lr"] = 1
    assert given_data == DATA


def test_every_format_reads_the_same(tmp_path: Path) -> None:
    without_null = copy.deepcopy(DATA)
    del without_null["optimizer"]["params"]["weight_decay"]  # TOML has no null
    toml = 'train_batch_size = 8\nname = "größe ✓"\n[fp16]\nenabled = true\nloss_scale = 0.5\n'
    toml += '[optimizer]\ntype = "AdamW"\n[optimizer.params]\nlr = 5e-4\nbetas = [0.9, 0.999]\n'
    assert read_config(write(tmp_path, "c.toml", toml)).raw == without_null
    assert read_config(str(write(tmp_path, "c.json", json.dumps(DATA)))).raw == DATA
    assert read_config(write(tmp_path, "c", json.dumps(DATA))).raw == DATA
    assert read_config(write(tmp_path, "c.hjson", hjson.dumps(DATA))).raw == DATA
    assert (
        read_config(write(tmp_path, "c.yaml", yaml.safe_dump(DATA, allow_unicode=True))).raw == DATA
    )
    text = base64.urlsafe_b64encode(json.dumps(DATA).encode()).decode()
    assert read_config(text).raw == DATA
    assert read_config(text.rstrip("=")).raw == DATA


def test_hjson_is_read_from_a_json_file_too(tmp_path: Path) -> None:
    text = "{\n  # samples\n  train_batch_size: 5e8\n  fp16: {enabled: true},\n}"
    read = read_config(write(tmp_path, "c.json", text))
    assert read.raw == {"train_batch_size": 500000000, "fp16": {"enabled": True}}


def test_a_format_that_is_not_installed_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_core.plugins.registry.discover", lambda: ())
    with pytest.raises(
        ConfigError, match=r"'\.yaml' is served by dscore-config-formats, which is not installed"
    ):
        read_config(write(tmp_path, "c.yaml", "a: 1"))
    with pytest.raises(ConfigError, match="not JSON"):
        read_config(write(tmp_path, "c.json", "{a: 1}"))
    assert read_config(write(tmp_path, "c.conf", '{"a": 1}')).raw == {"a": 1}


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    for name, text in (
        ("c.json", '{"a": 1}'),
        ("c.yaml", "a: 1"),
        ("c.toml", "a = 1"),
        ("c.hjson", "a: 1"),
    ):
        assert read_config(write(tmp_path, name, b"\xef\xbb\xbf" + text.encode())).raw == {"a": 1}


def test_yaml_words(tmp_path: Path) -> None:
    text = (
        "a: 5e8\nb: '5e8'\nc: 1:30\nd: 2024-01-01\ne: &x {p: 1, q: 2}\nf: {<<: *x, q: 3}\ng: "
        "[*x]\nh: yes\n"
    )
    raw = read_config(write(tmp_path, "c.yaml", text)).raw
    assert raw["a"] == 500000000
    assert raw["b"] == "5e8"
    assert raw["c"] == "1:30"
    assert raw["d"] == "2024-01-01"
    assert raw["f"] == {"p": 1, "q": 3}
    assert raw["g"] == [{"p": 1, "q": 2}]
    assert raw["h"] is True


def test_python_values_become_plain(tmp_path: Path) -> None:
    source = MappingProxyType({"path": tmp_path, "pair": (1, 2.5), "inner": OrderedDict(x=True)})
    assert read_config(source).raw == {
        "path": str(tmp_path),
        "pair": [1, 2.5],
        "inner": {"x": True},
    }


def test_a_source_is_returned_as_it_is() -> None:
    source = ConfigSource({"a": 1}, "here")
    assert read_config(source) is source


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("c.json", '{"a": 1', "line 1, column"),
        ("c.json", '{\n"a": 1,\n"b": ]\n}', "line 3, column"),
        ("c.json", '{"a": 1} {"b": 2}', "line 1, column"),
        ("c.json", '{"a": tru', "line 1, column"),
        ("c.json", "{'a': \x00}", "line 1"),
        ("c.hjson", "{a: [1, 2", "hjson"),
        ("c.hjson", "{a: 1 /* never closed", "hjson"),
        ("c.hjson", "{\n a: 1e999\n}", "hjson"),
        ("c.yaml", "a: [1, 2\nb: 3", "line 2, column"),
        ("c.yaml", "a: 1\n b: 2", "line 2, column"),
        ("c.yaml", "a: 1\n---\nb: 2", "line 2, column"),
        ("c.yaml", "a: *unknown", "line 1, column"),
        ("c.yaml", "a: !!python/object/apply:os.system ['true']", "not allowed"),
        ("c.yaml", "a: !!python/name:os.system", "line 1, column"),
        ("c.yaml", "a: !mine {b: 1}", "line 1, column"),
        ("c.yaml", "a: !!binary aGk=", "line 1, column"),
        ("c.yaml", "[a, b]: 1", "a key must be text"),
        ("c.yaml", "a: \x07", "not YAML"),
        ("c.yaml", "a: {<<: 3}", "must name a mapping"),
        ("c.toml", "a = ", "line 1, column"),
        ("c.toml", "[a\nb = 1", "line 1, column"),
        ("c.toml", "a = 1 2", "line 1, column"),
    ],
)
def test_bad_syntax_is_placed(tmp_path: Path, name: str, text: str, where: str) -> None:
    file = write(tmp_path, name, text)
    fails(file, str(file), where)


@pytest.mark.parametrize("name", ["c.json", "c.hjson", "c.yaml", "c.toml", "c"])
@pytest.mark.parametrize("text", [b"", b" \n\t", b"\xff\xfe{\x00}\x00", b'{"a": "\xe9"}'])
def test_not_text_at_all(tmp_path: Path, name: str, text: bytes) -> None:
    file = write(tmp_path, name, text)
    fails(file, str(file), "UTF-8" if text.strip() else "empty")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", "[1]"),
        ("c.json", "3"),
        ("c.json", "null"),
        ("c.yaml", "text"),
        ("c.yaml", "- a"),
        ("c.hjson", "[1]"),
    ],
)
def test_the_top_level_is_an_object(tmp_path: Path, name: str, text: str) -> None:
    fails(write(tmp_path, name, text), "top level must be an object")


@pytest.mark.parametrize("value", [3, None, True, b"{}", ["a"], object(), 1.5, {1}, sys])
def test_a_config_of_the_wrong_type(value: Any) -> None:
    fails(value, type(value).__name__)


def test_things_that_are_not_there(tmp_path: Path) -> None:
    fails(tmp_path, str(tmp_path), "directory")
    fails(tmp_path / "absent.json", "no such file", "absent.json")
    fails("", "empty")
    fails('{"train_batch_size": 8}', "text of a config")
    fails("a" * 100_000, "no such file")
    fails("a\x00b", "no such file")
    fails(base64.urlsafe_b64encode(b'{"a": NaN}').decode(), "a: NaN")
    fails(base64.urlsafe_b64encode(b'{"a": ').decode(), "base64 config", "line 1")


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    fails(write(tmp_path, "c.json", b" " * (16 * 1024 * 1024 + 1)), "larger than 16 MiB")


def nested(opening: str, closing: str, depth: int = DEEP) -> str:
    return opening * depth + closing * depth


@pytest.mark.fast_cases("c.json-3", "c.hjson-1", "c.yaml-2", "c.toml-0", "c.toml-1")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"a":' * DEEP + "1" + "}" * DEEP),
        ("c.json", '{"a":' + nested("[", "]") + "}"),
        ("c.json", '{"a":' + "[" * DEEP),
        ("c.json", '{"a":' + nested("[", "]", 200) + "}"),
        ("c.hjson", "{a:" * DEEP + "1" + "}" * DEEP),
        ("c.hjson", "{a:" + nested("[", "]") + "}"),
        ("c.yaml", "{a: " * DEEP + "1" + "}" * DEEP),
        ("c.yaml", "a: " + nested("[", "]")),
        ("c.yaml", "a: " + nested("[", "]", 120)),
        ("c.toml", "a = " + nested("[", "]")),
        ("c.toml", ".".join(["a"] * DEEP) + " = 1"),
        ("c.toml", "a = " + "{a = " * DEEP + "1" + "}" * DEEP),
    ],
    ids=lambda v: v if len(v) < 10 else "",
)
def test_endless_nesting(tmp_path: Path, name: str, text: str) -> None:
    fails(write(tmp_path, name, text), "levels")


def test_nested_and_cyclic_dicts() -> None:
    deep: Any = 1
    for _ in range(DEEP):
        deep = {"a": deep}
    fails(deep, "levels")
    listed: list[Any] = []
    listed.append(listed)
    fails({"a": listed}, "a[0][0]", "levels")
    cyclic: dict[str, Any] = {"a": {}}
    cyclic["a"]["b"] = cyclic
    fails(cyclic, "a.b.a.b", "levels")


def test_an_almost_full_stack_is_not_our_traceback() -> None:
    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        else:
            fails({"a": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]}, "levels")

    dive(sys.getrecursionlimit() - len(inspect.stack(0)) - 30)


def test_yaml_bombs(tmp_path: Path) -> None:
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
    bomb += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    fails(write(tmp_path, "c.yaml", bomb), "200000 values")
    fails(write(tmp_path, "d.yaml", "a: &x {b: *x}"), "levels")
    fails(write(tmp_path, "e.yaml", "a: &x {<<: *x, b: 1}"), "levels")


def test_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    for name, text in (
        ("c.json", '{"a": %s}'),
        ("c.yaml", "a: %s"),
        ("c.toml", "a = %s"),
        ("c.hjson", "{a: %s\n}"),
    ):
        fails(write(tmp_path, name, text % ("9" * 5000)), str(tmp_path))


def test_the_origin_is_told_and_the_values_are_not(tmp_path: Path) -> None:
    file = write(tmp_path, "c.json", '{"api_key": "hunter2"}')
    assert "hunter2" not in repr(read_config(file))
    assert str(file) in repr(read_config(file))


TEXT = st.characters(exclude_categories=["Cs"])
# yaml.safe_dump writes the text "0E0" without quotes, as YAML 1.1 has it; for us that is a number.
NUMERIC = re.compile(r"[-+]?[\d._]+[eE][-+]?\d+")
NAMES = st.text(TEXT, min_size=1, max_size=8).filter(lambda t: not NUMERIC.fullmatch(t))
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text(TEXT, max_size=12).filter(lambda t: not NUMERIC.fullmatch(t))
)
TREES = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda t: st.lists(t, max_size=3) | st.dictionaries(NAMES, t, max_size=3),
        max_leaves=12,
    ),
    max_size=4,
)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return (
            not isinstance(a, bool)
            and not isinstance(b, bool)
            and math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-300)
        )
    return type(a) is type(b) and bool(a == b)


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_round_trips(tmp_path_factory: Any, tree: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("trees")
    assert alike(read_config(tree).raw, tree)
    text = json.dumps(tree)
    assert alike(read_config(write(folder, "c.json", text)).raw, tree)
    assert alike(read_config(write(folder, "c.hjson", text)).raw, tree)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert alike(read_config(encoded).raw, tree)
    assert alike(
        read_config(write(folder, "c.yaml", yaml.safe_dump(tree, sort_keys=False))).raw, tree
    )


def read_or_refuse(file: Path) -> None:
    """Anything but data or a ConfigError that names the file is a failure."""
    try:
        raw = read_config(file).raw
    except ConfigError as error:
        raw = {"refused": str(error)}
        if str(file) not in str(error):
            raise AssertionError("the error does not name the file") from error
    assert isinstance(raw, dict)


SUFFIXES = st.sampled_from([".json", ".hjson", ".yaml", ".toml", ""])
SYNTAX = st.text(alphabet="{}[]:,\"'#/*\\ \n-&*!<|>%@`=.e+1atrufnl", max_size=60)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200), SUFFIXES)
def test_noise_never_escapes(tmp_path_factory: Any, noise: bytes, suffix: str) -> None:
    read_or_refuse(write(tmp_path_factory.mktemp("noise"), f"c{suffix}", noise))


@settings(deadline=None, max_examples=150)
@given(SYNTAX, SUFFIXES)
def test_structured_noise_never_escapes(tmp_path_factory: Any, noise: str, suffix: str) -> None:
    read_or_refuse(write(tmp_path_factory.mktemp("noise"), f"c{suffix}", noise))
