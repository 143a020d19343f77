"""A third party's wheel adds an accelerator, an optimizer, a schedule, a monitor and a section to
ds_core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from building import build_wheels, pip
from ds_testing.processes import clean_environment, run

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which acme's wheel was installed."""
    place = tmp_path_factory.mktemp("acme")
    (wheel,) = build_wheels([HERE / "acme"], place / "wheels")
    pip("install", "--no-deps", "--no-compile", "-q", "--target", str(place / "site"), str(wheel))
    return place / "site"


def config(folder: Path, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AcmeSign", "params": {"lr": 0.25}},
        "scheduler": {"type": "AcmeHalving", "params": {"every": 2}},
        "acme": {
            "journal": str(folder / "journal.jsonl"),
            "events": str(folder / "events.jsonl"),
            **section,
        },
    }


def run_script(
    site: Path, folder: Path, settings: dict[str, Any], *, status: int = 0, **environment: str
) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    env = clean_environment(PYTHONPATH=str(site), **environment)
    output: str = run(
        [sys.executable, str(HERE / "train.py"), str(file)], cwd=folder, env=env, status=status
    )
    return output


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_everything_of_acme_works_together(acme: Path, tmp_path: Path) -> None:
    output = run_script(acme, tmp_path, config(tmp_path), DS_ACCELERATOR="acme", ACME_DEVICE="1")
    seen = json.loads(output.splitlines()[-1])
    assert seen["accelerator"] == "acme"
    assert (seen["optimizer"], seen["scheduler"], seen["steps"]) == ("AcmeSign", "LambdaLR", 3)
    assert seen["lr"] == [0.125]  # halved once, after two steps
    # one sign for three steps, in its largest element
    assert seen["moved"] == pytest.approx(0.25 + 0.25 + 0.125)

    assert seen["bias"][0] != seen["bias"][1]

    *steps, end = lines(tmp_path / "journal.jsonl")
    assert [s["step"] for s in steps] == [0, 1, 2]
    assert steps[0]["loss"] > steps[-1]["loss"]
    assert end == {"began": [0, 1, 2], "accelerator": "acme"}

    events = lines(tmp_path / "events.jsonl")
    assert [step for name, _, step in events if name == "Train/Samples/train_loss"] == [8, 16, 24]
    assert [value for name, value, _ in events if name == "Train/Samples/lr"][0] == 0.25


@pytest.mark.slow
def test_its_section_has_effect_key_by_key(acme: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, every=2, freeze_biases=True)
    del settings["acme"]["events"]
    output = run_script(acme, tmp_path, settings)
    seen = json.loads(output.splitlines()[-1])
    assert seen["accelerator"] != "acme"  # there is none
    assert seen["bias"][0] == seen["bias"][1]
    assert [row.get("step") for row in lines(tmp_path / "journal.jsonl")] == [0, 2, None]
    assert not (tmp_path / "events.jsonl").exists()


MISTAKES: tuple[tuple[dict[str, Any], list[str]], ...] = (
    ({"acme": {"jurnal": "x"}}, ["acme.jurnal", "journal", "acme-ds 1.2.3"]),
    ({"acme": {"journal": "x", "every": 0}}, ["acme.every", "0"]),
    (
        {"acme": {"journal": "x", "events": "x"}},
        ["acme.events", "is the journal", "name another file"],
    ),
    ({"acmee": {}}, ["acmee", "acme"]),
    ({"optimizer": {"type": "AcmeSing"}}, ["optimizer.type", "AcmeSing", "acmesign"]),
    ({"optimizer": {"type": "AcmeSign", "params": {"lr": 0.0}}}, ["optimizer.params.lr", "0"]),
    (
        {"scheduler": {"type": "AcmeHalving", "params": {"evry": 2}}},
        ["scheduler.params.evry", "every"],
    ),
)


@pytest.fixture(scope="module")
def answers(acme: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a config check says to each of the mistakes, asked in one process."""
    code = """
import json, sys, ds_core
from ds_core.errors import ConfigError
answers = []
for settings in json.loads(sys.argv[1]):
    try:
        ds_core.compose(settings)
        answers.append("no error")
    except ConfigError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
    settings = [config(tmp_path_factory.mktemp("check")) | change for change, _ in MISTAKES]
    env = clean_environment(PYTHONPATH=str(acme))
    answers: list[str] = json.loads(
        run([sys.executable, "-c", code, json.dumps(settings)], env=env)
    )
    return answers


@pytest.mark.fast_cases(
    "acme.every",
    "acme.events",
    "acmee",
    "optimizer.type",
    "optimizer.params.lr",
    "scheduler.params.evry",
)
@pytest.mark.parametrize("index", range(len(MISTAKES)), ids=[words[0] for _, words in MISTAKES])
def test_a_mistake_in_what_acme_owns_is_named(answers: list[str], index: int) -> None:
    _, words = MISTAKES[index]
    assert [w for w in words if w not in answers[index]] == [], answers[index]


def select(acme: Path, status: int = 0, **environment: str) -> str:
    """The name of the accelerator that is chosen, or the message of why none can be."""
    code = "import ds_core; print(ds_core.get_accelerator().name)"
    env = clean_environment(PYTHONPATH=str(acme), **environment)
    output: str = run([sys.executable, "-c", code], env=env, status=status)
    return output[output.rindex("AcceleratorError") :] if status else output.strip()


@pytest.mark.slow
def test_its_accelerator_is_found_by_probing_and_beats_the_cores_own(acme: Path) -> None:
    assert select(acme, ACME_DEVICE="1") == "acme"
    assert select(acme) != "acme"
    assert select(acme, ACME_DEVICE="1", DS_ACCELERATOR="cpu") == "cpu"


@pytest.mark.slow
def test_an_accelerator_that_cannot_be_had_is_answered_with_why(acme: Path) -> None:
    unavailable = select(acme, status=-1, DS_ACCELERATOR="acme")
    words = ("acme", "acme-ds", "no acme device is plugged in")
    assert [w for w in words if w not in unavailable] == [], unavailable
    unknown = select(acme, status=-1, DS_ACCELERATOR="acmi")
    words = ("acmi", "did you mean 'acme'", "cpu (dscore-train)", "no acme device is plugged in")
    assert [w for w in words if w not in unknown] == [], unknown


def test_its_command_stands_beside_our_own(acme: Path) -> None:
    env = clean_environment(PYTHONPATH=str(acme))
    dscore = str(Path(sys.executable).with_name("dscore"))
    assert "Say who made this." in run([dscore, "--help"], env=env)
    assert run([dscore, "acme", "--name", "ds"], env=env).strip() == "acme greets ds"


@pytest.mark.slow
def test_its_options_stand_beside_those_of_dscore_run(acme: Path, tmp_path: Path) -> None:
    env = clean_environment(PYTHONPATH=str(acme))
    dscore = str(Path(sys.executable).with_name("dscore"))
    (tmp_path / "say.py").write_text("import os, sys; print(os.environ['ACME_MOOD'], sys.argv[1:])")
    said = run([dscore, "run", "--mood=good", "say.py", "--mood", "bad"], env=env, cwd=tmp_path)
    assert said.strip() == "good ['--mood', 'bad']"
    said = run(
        [dscore, "run", "--nproc", "1", "--only_greet", "--tag", "say.py", "x"],
        env=env,
        cwd=tmp_path,
        status=3,
    )
    assert said.strip() == "acme greets --nproc 1 --tag say.py x"
    assert "--mood 'odd': it is one of good, bad" in run(
        [dscore, "run", "--mood", "odd", "say.py"], env=env, status=2
    )
