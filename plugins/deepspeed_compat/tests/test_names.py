"""The table of names: each is served as its row says, by the objects of ds_core and its plugins
themselves.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from ds_deepspeed_compat import install
from ds_deepspeed_compat.finder import FINDER
from ds_deepspeed_compat.names import modules, names_of
from ds_deepspeed_compat.names.entry import State


@pytest.fixture(autouse=True)
def deepspeed() -> Iterator[object]:
    install()
    yield importlib.import_module("deepspeed")
    sys.meta_path.remove(FINDER)
    for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.mark.parametrize("path", sorted(modules()))
def test_every_name_of_a_module_is_served_as_its_row_says(path: str) -> None:
    module = importlib.import_module(path)
    for name, row in names_of(path).items():
        there = row.state is not State.MISSING or f"{path}.{name}" in modules()
        assert hasattr(module, name) == there, f"{path}.{name}: {row}"
        assert (name in dir(module)) == there
        said = row.text or row.state in (State.WORKS, State.CONSTANT)
        assert said, f"{path}.{name} says neither how it differs nor what to use"


def test_no_module_has_a_name_twice() -> None:
    for path, groups in modules().items():
        names = [name for rows in groups for words in rows for name in words.split()]
        assert len(names) == len(set(names)), (
            f"{path}: {sorted(n for n in names if names.count(n) > 1)}"
        )


def test_names_are_the_real_objects(deepspeed: object) -> None:
    from deepspeed.runtime.lr_schedules import WarmupLR  # type: ignore[import-not-found]
    from ds_lr_schedules.schedules import WarmupLR as Ours
    from ds_zero import Init

    assert deepspeed.zero.Init is Init  # type: ignore[attr-defined]
    assert WarmupLR is Ours
    assert pickle.loads(pickle.dumps(WarmupLR)) is Ours  # noqa: S301  our own bytes
    assert list(inspect.signature(deepspeed.initialize).parameters)[:4] == [  # type: ignore[attr-defined]
        *("args", "model", "optimizer", "model_parameters"),
    ]


def test_a_name_that_is_not_offered_is_missing_in_pythons_sense(deepspeed: object) -> None:
    assert not hasattr(deepspeed, "replace_transformer_layer")
    assert getattr(deepspeed, "replace_transformer_layer", 3) == 3
    why = r"deepspeed\.replace_transformer_layer is not offered by ds_core: init_inf"
    with pytest.raises(AttributeError, match=why):
        deepspeed.replace_transformer_layer(None, model=None)  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=why):
        from deepspeed import replace_transformer_layer  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ImportError, match=r"deepspeed\.module_inject\.DSPolicy is not offered"):
        from deepspeed.module_inject import DSPolicy  # type: ignore[import-not-found]  # noqa: F401
    inspect.getmembers(deepspeed)


def test_python_finds_its_way_through_the_modules(deepspeed: ModuleType) -> None:
    assert deepspeed.__spec__ is not None
    assert deepspeed.__file__ is not None
    found = [module.name for module in pkgutil.walk_packages(deepspeed.__path__, "deepspeed.")]
    assert found == sorted(path for path in modules() if path != "deepspeed")
    assert importlib.util.find_spec("deepspeed.runtime.zero.config") is not None


def test_constants_have_deepspeeds_values() -> None:
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO  # type: ignore[import-not-found]
    from deepspeed.runtime import lr_schedules  # type: ignore[import-not-found]

    assert UNIVERSAL_CHECKPOINT_INFO == "universal_checkpoint_info"
    assert lr_schedules.LR_RANGE_TEST_MIN_LR == "lr_range_test_min_lr"


def test_a_package_that_is_not_installed_is_named_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "ds_pipeline"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ds_pipeline" else find(name)
    )
    with pytest.raises(
        ImportError, match=r"served by dscore-pipeline, which is not installed: .*pip install"
    ):
        from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]  # noqa: F401


def test_other_names_and_modules_do_not_exist(deepspeed: object) -> None:
    assert not hasattr(deepspeed, "initialise")
    with pytest.raises(
        AttributeError, match=r"'deepspeed.zero' has no attribute 'Initt'.*docs/migrate.md"
    ):
        _ = deepspeed.zero.Initt  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.zerro")
    assert importlib.util.find_spec("deepspeed.zerro") is None


def test_star_imports_give_what_is_served() -> None:
    space: dict[str, object] = {}
    exec("from deepspeed.moe.sharded_moe import *", space)  # noqa: S102  the statement is what is tested
    assert "TopKGate" in space
    assert "MOELayer" not in space
