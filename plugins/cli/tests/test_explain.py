"""``dscore explain TEXT``: the meaning of a message, from a pasted one or from a traceback."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from cli_runs import dscore
from ds_cli.explain.search import last_message, load, search

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    ds_core.initialize(model=net, config={"optimizer": "unknown key"})
  File "compose.py", line 120, in compose
    raise ConfigError(problems)
ds_core.errors.ConfigError: c.json: train_batch_size: train_batch_size 8 is not 2 x 1 x 3
"""


@pytest.mark.parametrize(
    ("text", "message", "meaning"),
    [
        (TRACEBACK, "train_batch_size … is not …", "Leave one of them out"),
        ("dscore: c.json: lr: unknown key 'lr'; x", "unknown key …", "misspelt"),
        ("c.json: fp16.enabled: must be true or false, not 3", "must be …, not …", "another type"),
    ],
)
def test_a_message_is_found_with_its_meaning(text: str, message: str, meaning: str) -> None:
    done = dscore("explain", text)
    assert done.exit_code == 0
    head, said, *rest = done.output.splitlines()
    assert head.endswith(f": {message}")
    assert meaning in said
    # A page that can be opened where only packages are installed.
    assert rest == [
        "  page: https://github.com/ds-core/ds_core/tree/main/docs/errors.md#configerror"
    ]


def test_every_message_finds_itself() -> None:
    data = load()
    rows = [row for row in data["messages"] if len(set(row[1].replace("…", " ").split())) > 4]
    assert len(rows) > 300
    for error, message, *_ in rows[::25]:
        found = search(f"{error}: {message}".replace("…", "something"), data)
        assert any(entry.message == message for entry in found.entries), message


def test_words_alone_find_the_nearest() -> None:
    done = dscore("explain", "batch size needed but nothing given")
    assert done.exit_code == 0
    assert done.output.startswith("no message is exactly this; the nearest:\n")
    assert "a batch size is needed, and … is given" in done.output


def test_a_class_alone_is_told() -> None:
    done = dscore("explain", "ds_core.errors.LossScaleError: zzz qqq")
    assert done.exit_code == 0
    assert done.output.startswith("LossScaleError")


def test_what_is_not_known_is_said() -> None:
    done = dscore("explain", "qwertz \x1b[31m yxcvb")
    assert done.exit_code == 1 and "by symptom: https://" in done.output
    assert "\x1b" not in done.output
    assert dscore("explain", "  ").exit_code == 2


def test_it_reads_stdin_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom ds_command_kit.app import make_app\n"
        "try:\n    make_app()(['explain', '-'])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=b"\xff\x00 noise\n" * 100_000 + TRACEBACK.encode(),
        capture_output=True,
        check=False,
    )
    assert done.stdout.decode().splitlines()[-1] == "False", done.stderr
    assert "Leave one of them out" in done.stdout.decode()


def test_huge_texts_take_no_time() -> None:
    started = time.monotonic()
    for text in ("a " * 5_000_000, "… " * 1_000_000, "must be " * 1_000_000, "\n" * 5_000_000):
        search(text, load())
    assert time.monotonic() - started < 20


def test_the_last_message_counts() -> None:
    assert last_message(TRACEBACK)[0] == "ConfigError"
    assert last_message("ValueError: a\n\nRuntimeError: b\nmore")[1] == "b\nmore"
    assert last_message("KeyboardInterrupt")[0] == "KeyboardInterrupt"
    assert last_message("") == ("", "")
