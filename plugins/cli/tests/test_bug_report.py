"""``dscore doctor --report``: it has what a maintainer asks for, and no secret, wherever one
stood."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from ds_cli.doctor.cleaning import clean
from ds_cli.doctor.last_failure import keep, kept
from ds_command_kit.app import make_app
from typer.testing import CliRunner

PLANTED = [f"planted{i:02d}{'q7x' * 3}" for i in range(14)]
FAILURE = f"""Traceback (most recent call last):
  File "/root/jobs/{PLANTED[0]}/train.py", line 3, in <module>
    connect(password='{PLANTED[1]}', url="s3://me:{PLANTED[2]}@bucket/x?token={PLANTED[3]}&part=7")
requests.HTTPError: 401 for Authorization: Bearer {PLANTED[4]} with hf_{PLANTED[5]}abcd
ZeroDivisionError: division by zero, max_tokens=512, api_key: {PLANTED[6]}
"""


def dscore(*words: str) -> Any:
    return CliRunner().invoke(make_app(), list(words), prog_name="dscore")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Secrets in the environment, in a config and in a failure that was kept; gives the config's
    path.
    """
    monkeypatch.setenv("DS_CORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_API_KEY", PLANTED[0])
    monkeypatch.setenv("DS_UPLOAD_TOKEN", PLANTED[7])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("DS_MIRROR", f"https://somebody:{PLANTED[8]}@mirror.example/simple")
    monkeypatch.setenv("PYTHONSTARTUP", f"/data/{PLANTED[9]}/start.py")
    monkeypatch.setenv("PROXY_LOGIN", f"http://somebody:{PLANTED[9]}@proxy.example")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED[10])
    keep(FAILURE, f"train.py --api-key {PLANTED[11]} --secret={PLANTED[12]} --lr 0.5")
    file = tmp_path / "config.json"
    config = {
        "train_batch_size": 4,
        "csv_monitor": {"enabled": False, "output_path": f"/logs/{PLANTED[13]}"},
    }
    file.write_text(json.dumps({**config, "somebody_api_key": PLANTED[13]}))
    return file


def test_no_planted_secret_is_in_it(planted: Path, tmp_path: Path) -> None:
    done = dscore("doctor", "--report", str(tmp_path / "report.md"), "--config", str(planted))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.md").read_text()
    assert [secret for secret in PLANTED if secret in text + done.output] == []


def test_it_has_what_is_asked_for(planted: Path) -> None:
    text = dscore("doctor", "--report", "-", "--config", str(planted)).output
    for part in (
        "Versions",
        "Platform",
        "Findings",
        "Plugins",
        "Environment",
        "Config",
        "Last failure of dscore run",
    ):
        assert f"\n## {part}\n" in text
    assert (
        "\nNCCL_DEBUG=INFO\n" in text
        and "\nDS_UPLOAD_TOKEN=***\n" in text
        and "AWS_SECRET" not in text
    )
    assert "\nDS_MIRROR=https://***@mirror.example/simple\n" in text
    assert (
        "\ndscore-train 0." in text
        and "\ntorch 2." in text
        and "kernel squared_norm: served by" in text
    )
    assert "csv_monitor (dscore-monitor-csv" in text and '"somebody_api_key": "***"' in text
    assert "ZeroDivisionError: division by zero, max_tokens=512, api_key: ***" in text
    assert "$ dscore run train.py --api-key *** --secret=*** --lr 0.5" in text


def test_the_failure_is_kept_without_secrets_and_for_its_owner_alone(
    planted: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cache" / "last_failure.txt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [secret for secret in PLANTED if secret in file.read_text()] == []
    keep("another", "train.py")
    assert "another" in kept() and "ZeroDivisionError" not in kept()
    assert [f.name for f in file.parent.iterdir()] == ["last_failure.txt"]


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for text in (
        "token_type = 3",
        "max_tokens: 4",
        "key: value",
        '{"pad_token": 7}',
        "rank 0 of 2",
        "a/b@c",
    ):
        assert clean(text) == text
    assert clean("/home/somebody/x /home/somebodyelse") == "~/x /home/somebodyelse"


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    for words, why in (
        (["--config", "x.json"], "give --report FILE too"),
        (["--json", "--report", "x.md"], "give one of them"),
        (["--report", "x.md", "--config", "no_such.json"], "no such config file"),
        (["--report", str(tmp_path / "no" / "folder.md")], "No such file or directory"),
    ):
        done = dscore("doctor", *words)
        assert done.exit_code == 2 and why in done.output, done.output
