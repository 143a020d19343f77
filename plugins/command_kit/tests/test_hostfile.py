"""Hostfiles, names of hosts, and filters."""

from __future__ import annotations

from pathlib import Path

import pytest
from ds_command_kit.hosts import Host
from ds_command_kit.hosts.hostfile import filter_hosts, read_hostfile

DEVICES = {"a": [0, 1, 2, 3], "b": [0, 1]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h0 slots=x\n", "line 1: 'h0 slots=x'"),
        ("h0 slots=1\nh0 slots=1\n", "line 2.*twice"),
        ("#\n", "names no host"),
        ("-oProxyCommand=x slots=1\n", "line 1.*no host"),
        ("a slots=1\nu@-oProxyCommand=touch${IFS}X slots=1\n", "line 2: '-oProxyCommand.*no host"),
        ("a,-oProxyCommand=x slots=1\n", "line 1: 'a,-oProxyCommand=x'.*no host"),
        ("-oX@a slots=1\n", "line 1: '-oX'.*no user"),
        ("^/etc/hostname slots=1\n", "no host"),
        ("node-b: slots=1\n", "line 1: 'node-b:'.*no host"),
        ("fe80::1%$x slots=1\n", "no host"),
        ("h\u00e9 slots=1\n", "no host"),
        ("u@ slots=1\n", "no host"),
        ("h0 slots=0\n", "0 slots"),
    ],
)
def test_bad_hostfiles(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_hostfile(str(tmp_path / "hosts"))


def test_names_of_hosts(tmp_path: Path) -> None:
    names = [
        "node-1",
        "10.0.0.7",
        "a.b-c.example.org",
        "user.x@node_1",
        "fe80::1",
        "fe80::1%eth0",
        "u@2001:db8::7",
    ]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=2\n" for name in names))
    hosts = read_hostfile(str(tmp_path / "hosts"))
    assert hosts is not None and list(hosts) == names
    slots = {name: [0, 1] for name in ("a", "fe80::1")}
    assert filter_hosts(slots, include="fe80::1:1") == {"fe80::1": [1]}
    assert filter_hosts(slots, exclude="fe80::1") == {"a": [0, 1]}
    with pytest.raises(ValueError, match="host 'b' in 'b:1' is not known"):
        filter_hosts(slots, include="b:1")
    with pytest.raises(ValueError, match="no host"):
        Host("a;b")  # whoever makes it, such as the list that slurm gives


def test_filters() -> None:
    assert filter_hosts(DEVICES, include="b@a:2,0") == {"a": [0, 2], "b": [0, 1]}
    assert filter_hosts(DEVICES, exclude="a:0,1@b") == {"a": [2, 3]}
    assert filter_hosts(DEVICES) == DEVICES
    for filters in ({"include": "c"}, {"include": "b:2"}, {"include": "a", "exclude": "b"}):
        with pytest.raises(ValueError, match=r"'c'|\[2\]|give one"):
            filter_hosts(DEVICES, **filters)
