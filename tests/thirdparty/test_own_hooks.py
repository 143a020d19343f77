"""A stranger's kit defines a hook, and a stranger's plugin implements it: no line of ds_core's
knows of either.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ds_cli.plugin import ds_commands
from ds_command_kit.app import make_app
from torch import nn
from typer.testing import CliRunner

import ds_core
from ds_core.errors import PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import HOOKS, offers
from ds_core.plugins.registry import PluginSettings

HERE = Path(__file__).parent
Install = Callable[..., None]
CONFIG = {"train_batch_size": 1, "plugins": {"load": ["sees_rain"]}}
MADE = ("weather", "umbrellas", "sees_rain", "sees_rain_too", "unmarked")
RAIN = "def ds_weather(ctx, hour): return [f'rain at {hour} on rank {ctx.rank}']\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_ds: None) -> Iterator[Install]:
    """Put a distribution that names hooks beside modules of a name and a text each, as pip
    would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(dist: str = "", hooks: str = "", **modules: str) -> None:
        if dist:
            folder = tmp_path / f"{dist}-1.0.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
            (folder / "entry_points.txt").write_text(f"[ds_core.hooks]\n{hooks}\n")
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        ds_core.reset()

    yield make
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in MADE:
            del sys.modules[name]
    monkeypatch.undo()
    ds_core.reset()


def install_kit(install: Install, tmp_path: Path) -> None:
    shutil.copytree(
        HERE / "weather", tmp_path / "weather", ignore=shutil.ignore_patterns("__pycache__")
    )
    install("weather", "ds_weather = weather.hookspecs")


def test_a_kit_with_a_hook_of_its_own_and_a_plugin_that_has_it(
    install: Install, tmp_path: Path
) -> None:
    install_kit(install, tmp_path)
    install(sees_rain=RAIN)
    Plugins(PluginSettings(), [])
    # nothing of a kit is imported before a plugin has its hook
    assert "weather.hookspecs" not in sys.modules
    engine, *_ = ds_core.initialize(model=nn.Linear(1, 1), config=CONFIG)
    from weather.kit import forecasts  # type: ignore[import-not-found]

    assert forecasts(engine, 7) == ["rain at 7 on rank 0"]
    engine.destroy()


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("def ds_weather(ctx, colour): return []", "colour"),
        ("def ds_wether(ctx): return []", "did you mean 'ds_weather'"),
        ("async def ds_weather(ctx): return []", "ds_weather with async def"),
    ],
)
def test_a_kits_hook_is_checked_as_the_cores(
    install: Install, tmp_path: Path, plugin: str, said: str
) -> None:
    install_kit(install, tmp_path)
    install(sees_rain=plugin)
    with pytest.raises(PluginError, match=f"sees_rain.*{said}"):
        ds_core.initialize(model=nn.Linear(1, 1), config=CONFIG)


def test_what_a_kits_hook_may_return_is_checked(install: Install, tmp_path: Path) -> None:
    install_kit(install, tmp_path)
    install(sees_rain="def ds_weather(): return [7]")
    plugins = Plugins(PluginSettings(load=["sees_rain"]), [])
    with pytest.raises(PluginError, match=r"sees_rain.*failed in ds_weather.*element 0 is an int"):
        plugins.ask("ds_weather", ctx=None, hour=0)


def test_without_the_kit_only_an_optional_hook_is_passed_over(install: Install) -> None:
    install(sees_rain=f"from ds_core import hookimpl\n@hookimpl(optionalhook=True)\n{RAIN}")
    engine, *_ = ds_core.initialize(model=nn.Linear(1, 1), config=CONFIG)
    with pytest.raises(PluginError, match="no installed package has a hook 'ds_weather'"):
        engine.ctx.plugins.ask("ds_weather", ctx=engine.ctx, hour=1)
    engine.destroy()
    install(sees_rain_too=RAIN)
    with pytest.raises(PluginError, match="defines unknown hook 'ds_weather'"):
        Plugins(PluginSettings(load=["sees_rain_too"]), [])


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        (
            "ds_weather = nowhere.at_all",
            "'ds_weather'.*cannot specify ds_weather: ModuleNotFoundError",
        ),
        ("ds_weather = json", "cannot specify ds_weather: AttributeError"),
        ("ds_weather = unmarked", "not marked by ds_core.plugins.checks.gives"),
    ],
)
def test_a_kit_that_defines_no_hook(install: Install, hooks: str, said: str) -> None:
    install("odd", hooks, unmarked="def ds_weather(): ...\n", sees_rain=RAIN)
    with pytest.raises(PluginError, match=f"sees_rain.*{said}"):
        Plugins(PluginSettings(load=["sees_rain"]), [])
    Plugins(PluginSettings(), [])  # nobody else is concerned


def test_names_that_are_no_hooks_are_left_out(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(
        "odd",
        "ds_close = weather.hookspecs\nweather = weather.hookspecs",
        sees_rain="def ds_close(): ...",
    )
    Plugins(PluginSettings(load=["sees_rain"]), [])
    assert "ds_weather" not in HOOKS
    assert "hook 'ds_close' (odd 1.0, module weather.hookspecs) is left out" in caplog.text


def test_two_kits_with_one_hook_are_named(install: Install, tmp_path: Path) -> None:
    install_kit(install, tmp_path)
    install("other", "ds_weather = weather.hookspecs", sees_rain=RAIN)
    assert "ds_weather" not in offers()  # nobody else is concerned
    with pytest.raises(
        PluginError, match=r"sees_rain.*\(other 1.0.* is defined by 'ds_weather' \(weather 1.0"
    ):
        Plugins(PluginSettings(load=["sees_rain"]), [])


def test_dscore_plugins_lists_what_a_kits_hook_offers(install: Install) -> None:
    install(
        "umbrellas",
        "ds_large_umbrellas = umbrellas\n[ds_core.backends]\nsees_rain = sees_rain",
        umbrellas="from ds_core.plugins.checks import gives, references\n"
        "@gives(references)\ndef ds_large_umbrellas(): ...",
        sees_rain="def ds_large_umbrellas(): return {'black': 'sees_rain:x'}",
    )
    runner = CliRunner()
    done = runner.invoke(make_app(ds_commands()), ["plugins", "--json"], prog_name="dscore")
    assert done.exit_code == 0, done.output
    (row,) = (row for row in json.loads(done.output) if row["name"] == "sees_rain")
    assert (row["state"], row["offers"]) == ("loaded", {"large umbrella": ["black"]}), row
