"""The table of names: each is served as its row says, by the objects of ds_core and its plugins themselves."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Iterator

import pytest
from ds_deepspeed_compat import install
from ds_deepspeed_compat.finder import FINDER
from ds_deepspeed_compat.missing import NotOfferedError
from ds_deepspeed_compat.names import State, modules, names_of


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
        value = getattr(module, name)
        assert name in dir(module)
        built = type(value).__name__ != "_StandIn"
        assert built == (row.state is not State.MISSING), f"{path}.{name}: {row}"
        assert row.text or row.state is State.WORKS, f"{path}.{name} says neither how it differs nor what to use"


def test_no_module_has_a_name_twice() -> None:
    for path, groups in modules().items():
        names = [name for rows in groups for words in rows for name in words.split()]
        assert len(names) == len(set(names)), f"{path}: {sorted(n for n in names if names.count(n) > 1)}"


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


def test_a_name_that_is_not_built_says_so_when_it_is_used(deepspeed: object) -> None:
    from deepspeed.module_inject import DSPolicy  # type: ignore[import-not-found]

    with pytest.raises(
        NotOfferedError, match=r"deepspeed\.replace_transformer_layer is not offered by ds_core: init_inf"
    ):
        deepspeed.replace_transformer_layer(None, model=None)  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="DSPolicy"):
        _ = DSPolicy.model_fields
    assert not isinstance(3, DSPolicy)

    class Derived(DSPolicy):  # type: ignore[misc]
        pass

    with pytest.raises(NotOfferedError):
        Derived()


def test_a_package_that_is_not_installed_is_named_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "ds_pipeline"]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "ds_pipeline":
                raise ModuleNotFoundError("No module named 'ds_pipeline'", name="ds_pipeline")

    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]

    with pytest.raises(NotOfferedError, match=r"served by ds-pipeline, which is not installed: .*pip install"):
        PipelineModule([])


def test_other_names_and_modules_do_not_exist(deepspeed: object) -> None:
    assert not hasattr(deepspeed, "initialise")
    with pytest.raises(AttributeError, match=r"'deepspeed.zero' has no attribute 'Initt'.*docs/migrate.md"):
        _ = deepspeed.zero.Initt  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.zerro")
    assert importlib.util.find_spec("deepspeed.zerro") is None


def test_star_imports_give_what_is_served() -> None:
    space: dict[str, object] = {}
    exec("from deepspeed.moe.utils import *", space)  # noqa: S102  the statement is what is tested
    assert "is_moe_param" in space
    assert "split_params_grads_into_shared_and_expert_params" not in space
