"""Monitors of tracking services, with the real packages, offline: what they record, and what they
never record.

`make test-monitors` installs the packages and runs this. No account and no network is used.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ds_monitor_csv.files import file_stem
from ds_testing import MonitorConformance

from ds_core.engine import Monitor
from ds_core.entries import Event

sys.path.insert(0, str(Path(__file__).parent))
import records

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

KEY = "PLANTED1234567890abcdefSECRET"
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "COMET_AUTO_LOG_ENV_DETAILS": "0",
    "COMET_INTERNAL_SENTRY_DSN": "",
    "DO_NOT_TRACK": "true",
}
"""No server, and no reports of errors to the makers of the packages either."""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the current one, and where every service keeps its records.

    wandb's own process remembers the folder it was started in, and child processes would find it by
    a variable.
    """
    import wandb

    for name, value in {**OFFLINE, "COMET_OFFLINE_DIRECTORY": str(tmp_path / "comet")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    wandb.teardown()


def wandb_monitor() -> Monitor:
    from ds_monitor_wandb.config import WandbConfig
    from ds_monitor_wandb.monitor import WandbMonitor

    return WandbMonitor(
        WandbConfig(enabled=True, project="p", group="g", team="t"), {"a": {"b": 1}}
    )


def comet_monitor(**section: Any) -> Monitor:
    from ds_monitor_comet.config import CometConfig
    from ds_monitor_comet.monitor import CometMonitor

    given = {"samples_log_interval": 1, "online": False, **section}
    return CometMonitor(CometConfig(enabled=True, **given), {"a": {"b": 1}})


def trackio_monitor(**section: Any) -> Monitor:
    from ds_monitor_trackio.config import TrackioConfig
    from ds_monitor_trackio.monitor import TrackioMonitor

    return TrackioMonitor(TrackioConfig(enabled=True, **section), {"a": {"b": 1}})


def mlflow_monitor(folder: Path, **section: Any) -> Any:
    from ds_monitor_mlflow.config import MLflowConfig
    from ds_monitor_mlflow.monitor import MLflowMonitor

    return MLflowMonitor(
        MLflowConfig(enabled=True, tracking_uri=str(folder), **section), {"a": {"b": 1}}
    )


# -- values ----------------------------------------------------------------------------------------

SERVICES = [
    ("wandb", wandb_monitor, records.read_wandb),
    ("comet", comet_monitor, records.read_comet),
    ("trackio", trackio_monitor, records.read_trackio),
]


@pytest.mark.parametrize(("service", "make", "read"), SERVICES, ids=[row[0] for row in SERVICES])
def test_names_values_and_steps_are_kept(
    offline: Path,
    service: str,
    make: Callable[[], Monitor],
    read: Callable[[Path], list[records.Row]],
) -> None:
    """Odd names, falling steps, a name twice in one step, extreme values; a run that goes on after
    NaN.
    """
    names = (
        "a/b/c",
        "a.b",
        "with space",
        "comma,quote\"'",
        "back\\slash",
        "../up",
        "größe",
        "%d {0}",
        "a:b|c*?<>",
    )
    events = [Event(name, i + 0.5, 8) for i, name in enumerate(names)]
    events += [Event("loss", 1.0 / (i + 1), 16 - i) for i in range(10)] + [
        Event("loss", 7.0, 7),
        Event("loss", 8.0, 7),
    ]
    events += [
        Event("big", 1e30, 2**40),
        Event("big", -1e-30, 2**40 + 1),
        Event("odd", math.nan, 9),
        Event("last", 1.0, 9),
    ]
    monitor = make()
    for start in range(0, len(events), 5):
        monitor.write_events(events[start : start + 5])
        monitor.flush()
    monitor.close()
    monitor.close()
    expected: dict[str, list[tuple[float, int]]] = {}
    if service == "comet":  # at most a value per sample
        events = [event for event in events if event[:2] not in (("loss", 7.0), ("loss", 8.0))]
    for name, value, step in events:
        expected.setdefault(name, []).append((value, step))
    found: dict[str, list[tuple[float, int]]] = {}
    for name, value, step in read(offline):
        found.setdefault(name, []).append((value, step))
    odd = found.pop("odd", [])
    del expected["odd"]
    assert found == expected
    assert all(math.isnan(value) and step == 9 for value, step in odd)


class TestMLflow(MonitorConformance):
    relative_tolerance = 0.0

    def make_monitor(self, tmp_path: Path) -> Monitor:
        from ds_monitor_kit import Background

        return Background(mlflow_monitor(tmp_path / "mlruns"))

    def read_events(self, tmp_path: Path) -> list[records.Row]:
        return records.read_mlflow(tmp_path / "mlruns")

    def stored_name(self, name: str) -> str:
        from ds_monitor_mlflow.monitor import metric_name

        return metric_name(name)


# -- sections --------------------------------------------------------------------------------------


def test_wandb_gets_its_section_and_the_config(offline: Path) -> None:
    monitor = wandb_monitor()
    monitor.close()
    found = records.wandb_records(offline)
    (run,) = [r.run for r in found if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.entity) == ("p", "g", "t")
    assert {u.key: json.loads(u.value_json) for u in run.config.update if u.key == "a"} == {
        "a": {"b": 1}
    }
    metrics = [r.metric for r in found if r.WhichOneof("record_type") == "metric"]
    assert any(m.glob_name == "*" and m.step_metric == "global_samples" for m in metrics)


def test_a_run_of_the_program_s_own_is_used_and_left_open(offline: Path) -> None:
    import mlflow
    import trackio
    import wandb

    own = wandb.init(project="mine")
    theirs = trackio.init(project="mine", name="own", embed=False)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    try:
        mlflow.set_tracking_uri((offline / "mlruns").as_uri())
        active = mlflow.start_run()
    finally:
        del os.environ["MLFLOW_ALLOW_FILE_STORE"]
    monitors = [
        wandb_monitor(),
        trackio_monitor(name="other"),
        mlflow_monitor(offline / "elsewhere"),
    ]
    for monitor in monitors:
        monitor.write_events([Event("x", 1.0, 1)])
        monitor.close()
    own.log({"mine": 1})
    own.finish()
    theirs.finish()
    assert mlflow.active_run() is not None and not (offline / "elsewhere").exists()
    mlflow.end_run()
    assert records.read_mlflow(offline / "mlruns") == [("x", 1.0, 1)]
    assert ("x", 1.0, 1) in records.read_trackio(offline)
    history = [
        r.history
        for r in records.wandb_records(offline)
        if r.WhichOneof("record_type") == "history"
    ]
    assert ["x" in str(h) for h in history] == [True, False]
    assert active.info.run_id


def test_comet_s_section(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "A" * 32
    comet_monitor(
        project="p",
        workspace="w",
        experiment_key=key,
        mode="create",
        experiment_name="mine",
        api_key=KEY,
    ).close()
    (path,) = (offline / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        told = json.loads(archive.read("experiment.json"))
        assert all(KEY.encode() not in archive.read(name) for name in archive.namelist())
    assert (told["project_name"], told["workspace"], told["offline_id"]) == ("p", "w", key)
    assert told["resume_strategy"] == "create"
    said = [m["payload"] for m in records.comet_messages(offline)]
    assert any("mine" in str(m) and "Name" in str(m) for m in said)
    assert any("a.b" in str(m) for m in said if "param" in m)


def test_comet_s_environment(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "PROJECT_NAME": "envp",
        "WORKSPACE": "envw",
        "EXPERIMENT_NAME": "envname",
        "EXPERIMENT_KEY": "B" * 40,
    }
    for name, value in values.items():
        monkeypatch.setenv(f"COMET_{name}", value)
    monkeypatch.setenv("COMET_API_KEY", KEY)
    comet_monitor().close()
    (path,) = (offline / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        told = json.loads(archive.read("experiment.json"))
        assert all(KEY.encode() not in archive.read(name) for name in archive.namelist())
    assert (told["project_name"], told["workspace"], told["offline_id"]) == (
        "envp",
        "envw",
        "B" * 40,
    )
    assert any("envname" in str(m) for m in records.comet_messages(offline))


def test_comet_logs_a_metric_every_so_many_samples(offline: Path) -> None:
    monitor = comet_monitor(samples_log_interval=100)
    for step in range(0, 400, 32):
        monitor.write_events(
            [Event("loss", float(step), step), *([Event("rare", 1.0, step)] if step == 64 else [])]
        )
    monitor.close()
    assert [r for r in records.read_comet(offline) if r[0] == "rare"] == [("rare", 1.0, 64)]
    assert [step for name, _, step in records.read_comet(offline) if name == "loss"] == [
        0,
        128,
        256,
        384,
    ]


def test_mlflow_goes_on_with_a_run(offline: Path) -> None:
    first = mlflow_monitor(offline / "m", experiment="e", run_name="r")
    first.write_events([Event("x", 1.0, 1)])
    first.close()
    again = mlflow_monitor(offline / "m", run_id=first._run.run_id)
    again.write_events([Event("x", 2.0, 2)])
    again.close()
    assert records.read_mlflow(offline / "m") == [("x", 1.0, 1), ("x", 2.0, 2)]


# -- a whole run -----------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, ds_core
torch.manual_seed(0)
engine, *_ = ds_core.initialize(model=torch.nn.Linear(4, 1), config=sys.argv[1])
for step in range(7):
    loss = engine(torch.randn(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.log({"Mine/step": step, "Mine/loss": loss})
engine.save_checkpoint("checkpoint")
if len(sys.argv) > 2:
    raise ValueError("the crash of the test")
engine.destroy()
"""


def whole_run(folder: Path, *arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
    """Train with all six monitors in `folder`; the config has a key of Comet's, the environment one
    of wandb's.
    """
    files = {"enabled": True, "output_path": "records"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "fp16": {"enabled": False},
        "csv_monitor": {**files, "job_name": "csv"},
        "tensorboard": {**files, "job_name": "tensorboard"},
        "wandb": {"enabled": True},
        "comet": {"enabled": True, "online": False, "samples_log_interval": 1, "api_key": KEY},
        "mlflow": {"enabled": True, "tracking_uri": "records/mlflow"},
        "trackio": {"enabled": True},
        "wall_clock_breakdown": True,
        "steps_per_print": 1,
        "dump_state": True,
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(SCRIPT)
    places = {
        "WANDB_DIR": "records",
        "COMET_OFFLINE_DIRECTORY": "records/comet",
        "TRACKIO_DIR": "records/trackio",
    }
    surroundings = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    env = {**surroundings, **OFFLINE, "WANDB_API_KEY": KEY * 2, **places}
    (folder / "records").mkdir()
    return subprocess.run(
        [sys.executable, "train.py", "config.json", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_all_monitors_record_the_same_values_of_one_run(tmp_path: Path) -> None:
    done = whole_run(tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "records"
    sources = {
        "csv": records.read_csv(folder / "csv"),
        "tensorboard": records.read_tensorboard(folder / "tensorboard"),
        "wandb": records.read_wandb(folder / "wandb"),
        "comet": records.read_comet(folder / "comet"),
        "mlflow": records.read_mlflow(folder / "mlflow"),
        "trackio": records.read_trackio(folder / "trackio"),
    }
    tables = {
        service: {(file_stem(name), step): value for name, value, step in rows}
        for service, rows in sources.items()
    }
    truth = tables.pop("csv")
    names = {name for name, _ in truth}
    expected = {
        "train_loss",
        "lr",
        "grad_norm",
        "skipped_steps",
        "elapsed_time_ms_forward",
        "elapsed_time_ms_step",
    }
    assert {f"Train_Samples_{name}" for name in expected} | {"Mine_step", "Mine_loss"} <= names
    assert {step for name, step in truth if name == "Train_Samples_train_loss"} == {
        2 * i for i in range(1, 8)
    }
    for service, table in tables.items():
        assert table.keys() == truth.keys(), service
        tolerance = 1e-6 if service == "tensorboard" else 1e-12  # TensorBoard keeps float32
        for place, value in table.items():
            assert value == pytest.approx(truth[place], rel=tolerance, abs=1e-12), (service, place)
        assert len(sources[service]) == len(truth), f"{service} has values twice"


def test_no_key_is_in_any_output_or_record(tmp_path: Path) -> None:
    """Of a run that crashes: what it says, what `dscore` says of its config, and every file that is
    left.
    """
    done = whole_run(tmp_path, "crash")
    assert "ValueError: the crash of the test" in done.stderr
    assert "'api_key': '***'" in done.stdout + done.stderr  # dump_state shows the config
    said = [done.stdout, done.stderr]
    for words in (
        ["config", "explain", "comet.api_key"],
        ["config", "check", "config.json"],
        ["doctor"],
    ):
        cli = subprocess.run(
            [sys.executable, "-m", "ds_cli", *words], cwd=tmp_path, capture_output=True, text=True
        )
        said += [cli.stdout, cli.stderr]
    assert not any(KEY in text for text in said)
    seen = 0
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "config.json":
            contents = [path.read_bytes()]
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    contents += [archive.read(name) for name in archive.namelist()]
            assert not any(KEY.encode() in data for data in contents), path
            seen += 1
    assert seen > 20
    for reader, folder in (
        (records.read_wandb, "wandb"),
        (records.read_comet, "comet"),
        (records.read_csv, "csv"),
    ):
        assert reader(tmp_path / "records" / folder), (
            f"{folder} lost the values of a run that crashed"
        )


def test_a_key_that_a_service_puts_into_its_error_is_hidden(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comet_ml

    def fail(**arguments: Any) -> None:
        raise ValueError(f"the key {arguments['api_key']} is not known")

    monkeypatch.setattr(comet_ml, "start", fail)
    with pytest.raises(Exception, match=r"the key \*\*\* is not known") as error:
        comet_monitor(api_key=KEY, online=None)
    assert KEY not in "".join(traceback.format_exception(error.value))
