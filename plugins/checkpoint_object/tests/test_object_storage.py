"""Checkpoints in S3: the kit, runs of several ranks, and what happens to a store that others touch.

The server is moto's, in a process of its own; see object_server.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from ds_checkpoint.command import app
from ds_checkpoint.offline import open_saved
from ds_checkpoint.storages.conformance import StorageConformance
from ds_checkpoint.storages.contract import Storage
from ds_checkpoint_object.opening import open_storage
from object_runs import advance, make, states, wrong
from object_server import BUCKET, environment, keys, s3, s3_server
from typer.testing import CliRunner

from ds_core import comm
from ds_core.errors import CheckpointError


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address, environment(address):
        yield address


@pytest.mark.usefixtures("server")
class TestS3(StorageConformance):
    def make_storage(self, tmp_path: Path, below: str = "") -> Storage:
        return open_storage(f"s3://{BUCKET}/{tmp_path.name}/run/{below}".rstrip("/"), None)


# -- runs of several ranks -------------------------------------------------------------------------

ZERO = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2000}}
UNCHECKED: dict[str, Any] = ZERO | {"checkpoint": {"verify": False}}
FALLBACK = {"checkpoint": {"keep_last": 2}}
SMALL = {"checkpoint_object": {"part_size": 5 << 20, "requests": 3}}


def save(address: str, url: str, steps: int, tags: list[str], config: dict[str, Any]) -> list[Any]:
    """Steps, each saved under its tag; the weights after each."""
    with environment(address):
        torch.manual_seed(0)
        engine = make(**config)
        found = []
        for tag in tags:
            for _ in range(steps):
                engine.backward(engine(torch.ones(1, 40)).square().mean())
                engine.step()
            engine.save_checkpoint(url, tag, client_state={"tag": tag})
            found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.wait_for_checkpoint()
        engine.destroy()
        return found


def load(address: str, url: str, tag: str | None, config: dict[str, Any]) -> Any:
    """(path, client state, weights), or the error, after which nothing has changed."""
    with environment(address):
        engine = make(**config)
        before = [p.detach().clone() for p in engine.module.parameters()]
        fallback = bool(config.get("checkpoint", {}).get("keep_last"))
        try:
            path, client = engine.load_checkpoint(url, tag, fallback=fallback)
        except CheckpointError as error:
            assert all(map(torch.equal, engine.module.parameters(), before))
            return str(error)
        finally:
            engine.destroy()
        return path, client, [p.detach().clone() for p in engine.module.parameters()]


LR = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


@pytest.mark.fast_cases("False-1-2", "True-2-1")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("later", [False, True])
def test_resuming_at_another_size(
    ranks: Any, server: str, tmp_path: Path, before: int, after: int, later: bool
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    config: dict[str, Any] = ZERO | LR | SMALL | {"checkpoint": {"async": later}}
    saved = ranks(before, save, server, url, 2, ["a", "b"], config)
    for path, client, weights in ranks(after, load, server, url, None, config):
        assert (path, client) == (f"{url}/b", {"tag": "b"})
        assert all(map(torch.equal, weights, saved[0][-1]))
    for _, _, weights in ranks(after, load, server, url, "a", UNCHECKED):
        assert all(map(torch.equal, weights, saved[0][0]))


def test_a_tag_that_is_saved_again(ranks: Any, server: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    saved = ranks(2, save, server, url, 1, ["a", "a", "a"], LR)
    for path, _, weights in ranks(2, load, server, url, None, {}):
        assert path == f"{url}/a"
        assert all(map(torch.equal, weights, saved[0][2]))
    # of the saves that were replaced nothing is left, nor of the lease
    found = keys(server, tmp_path.name)
    assert len({key.split("/")[2] for key in found if key.endswith(".safetensors")}) == 1
    assert not any(key.endswith(".lease") for key in found)


def test_keep_last(ranks: Any, server: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    ranks(2, save, server, url, 1, ["a", "b", "c", "d"], FALLBACK)
    found = {key.split("/")[1] for key in keys(server, tmp_path.name)}
    assert found == {"c", "d", "latest"}


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(server: str, ranks: Any, tmp_path: Path) -> str:
    """The URL of a place with the checkpoints "old" and "new", of one rank."""
    url = f"s3://{BUCKET}/{tmp_path.name}"
    ranks(1, save, server, url, 1, ["old", "new"], {})
    return url


def _key(server: str, url: str, end: str, tag: str = "new") -> str:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    [key] = [key for key in keys(server, f"{prefix}/{tag}/") if key.endswith(end)]
    return key


DAMAGES = {
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "hostile header": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
    "removed": None,
}


@pytest.mark.fast_cases("truncated", "changed", "removed")
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_object_is_named_and_the_older_one_is_loaded(
    ranks: Any, server: str, saved: str, what: str
) -> None:
    key = _key(server, saved, "rank00000.safetensors")
    damage = DAMAGES[what]
    if damage is None:
        s3(server, "DELETE", key)
    else:
        s3(server, "PUT", key, damage(s3(server, "GET", key)))
    [message] = ranks(1, load, server, saved, None, {})
    assert f"s3://{BUCKET}/{key}" in message and "load another tag" in message
    [[path, _, _]] = ranks(1, load, server, saved, None, FALLBACK)
    assert path == f"{saved}/old"


HOSTILE = {
    "a save_id that is a path": (b'"save_id": "', b'"save_id": "../../'),
    "cut off": (b'"states"', None),
    "another format": (b"ds_core.checkpoint", b"ds_core.chackpoint"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest(ranks: Any, server: str, saved: str, what: str) -> None:
    from ds_checkpoint.folder.format import checksum

    key = _key(server, saved, "manifest.json")
    text = s3(server, "GET", key)
    old, new = HOSTILE[what]
    text = text[: text.index(old)] if new is None else text.replace(old, new, 1)
    if new is not None:  # with a right checksum, which anybody can compute
        body, seal, _ = text.rpartition(b',\n "checksum": "')
        text = body + seal + checksum(body).encode() + b'"\n}\n'
    s3(server, "PUT", key, text)
    [message] = ranks(1, load, server, saved, None, {})
    assert f"s3://{BUCKET}/{key}" in message, message
    [[path, _, _]] = ranks(1, load, server, saved, None, FALLBACK)
    assert path == f"{saved}/old"


def test_what_is_no_checkpoint_is_never_replaced_or_removed(
    ranks: Any, server: str, tmp_path: Path
) -> None:
    prefix = tmp_path.name
    theirs = [
        f"{prefix}/a/manifest.json",
        f"{prefix}/notes/rank00000.safetensors",
        f"{prefix}/b/0123/thesis.txt",
        f"{prefix}/b/model.safetensors",
    ]
    for key in theirs:
        s3(server, "PUT", key, b"{}")
    debris = f"{prefix}/b/0123456789abcdef0123456789abcdef/rank00000.safetensors"
    s3(server, "PUT", debris, b"half")
    url = f"s3://{BUCKET}/{prefix}"
    with pytest.raises(Exception, match="is not of a checkpoint of ds_core, so it is not replaced"):
        ranks(1, save, server, url, 1, ["a"], {})
    ranks(1, save, server, url, 1, ["b", "c"], {"checkpoint": {"keep_last": 1}})
    found = set(keys(server, prefix))
    assert set(theirs) <= found and debris not in found


def test_unfinished_uploads_are_cleared(ranks: Any, server: str, tmp_path: Path) -> None:
    save_id = "0123456789abcdef0123456789abcdef"
    ours = f"{tmp_path.name}/a/{save_id}/rank00000.safetensors"
    theirs = f"{tmp_path.name}/a/{save_id}/thesis.txt"
    for key in (ours, theirs):
        s3(server, "POST", key, query="?uploads")
    ranks(1, save, server, f"s3://{BUCKET}/{tmp_path.name}", 1, ["b"], {})
    left = s3(server, "GET", "", query=f"?uploads&prefix={tmp_path.name}").decode()
    assert theirs in left and ours not in left


# -- commands --------------------------------------------------------------------------------------


def dscore(*arguments: str, status: int = 0) -> str:
    """What ``dscore checkpoint`` with these arguments prints, or the text of its error."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == status, (done.output, done.exception)
    return done.output + (str(done.exception) if status else "")


def test_the_commands_take_urls(server: str, saved: str, tmp_path: Path) -> None:
    told = json.loads(dscore("inspect", saved, "--json"))
    assert told["path"] == f"{saved}/new" and told["step"] == 2
    assert f"{saved}/old: ok" in dscore("verify", f"{saved}/old")
    assert "all states are equal" in dscore("diff", f"{saved}/new", saved)
    assert "model.safetensors" in dscore("export", saved, str(tmp_path / "weights"))
    assert dscore("prune", saved, "--keep", "1") == f"removed {saved}/old\n"
    message = dscore("verify", saved, "--tag", "old", status=1)
    assert "does not exist" in message and "there are new" in message


def test_importing_to_a_url(server: str, tmp_path: Path) -> None:
    from ds_checkpoint_deepspeed.importing import import_checkpoint

    url = f"s3://{BUCKET}/{tmp_path.name}"
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    path, _ = import_checkpoint(tmp_path / "model.pt", url, "x")
    assert path == f"{url}/x"
    with open_saved(url) as opened:
        assert torch.equal(opened.source.whole("module/w"), torch.ones(3))


def test_states_of_a_pattern(ranks: Any, server: str, tmp_path: Path) -> None:
    """The pattern of object_runs.py is what the tests of kills compare."""
    assert ranks(2, _patterns, server, f"s3://{BUCKET}/{tmp_path.name}") == [True, True]


def _patterns(address: str, url: str) -> bool:
    with environment(address):
        engine = make()
        for _ in range(2):
            advance(engine)
        engine.save_checkpoint(url)
        advance(engine)
        engine.load_checkpoint(url)
        held = not wrong(engine)
        states(engine)[3].view(-1)[7] += 1
        broken = wrong(engine) == ["3"]
        engine.destroy()
        return held and broken and comm.world_size() == 2
