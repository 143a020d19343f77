"""The kits for engine methods, checks, charts, commands and meshes find planted faults, and say
what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from building import write_metadata
from ds_testing import (
    ChartConformance,
    CheckConformance,
    CommandConformance,
    EngineMethodsConformance,
    MeshAxisConformance,
    MeshConformance,
)

Plant = Callable[[str], str]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """The text of a declaration -> the name of a module that has it."""

    def make(text: str) -> str:
        name = f"planted_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return make


def fails(check: Callable[[], Any], saying: str) -> None:
    with pytest.raises(AssertionError) as found:
        check()
    assert saying in str(found.value)


# -- methods of the engine -------------------------------------------------------------------------

METHOD = 'def method(engine):\n    """What it does."""\n'
GIVES = "def ds_engine_methods(): return {'%s': __name__ + ':%s'}"


@pytest.mark.parametrize(
    ("text", "check", "saying"),
    [
        (
            "def bare(engine): 1\n" + GIVES % ("method", "bare"),
            "test_names_are_free_and_described",
            "has no docstring",
        ),
        (
            METHOD + GIVES % ("_method", "method"),
            "test_names_are_free_and_described",
            "no public name",
        ),
        (
            METHOD + GIVES % ("register_buffer", "method"),
            "test_names_are_free_and_described",
            "hide the module's own",
        ),
        (
            "def lone(): 1\n" + GIVES % ("method", "lone"),
            "test_the_first_argument_is_the_engine",
            "takes no engine",
        ),
        (
            METHOD + "def ds_engine_methods(): return dict.fromkeys(('method', 'more'), __name__ + "
            "':method')",
            "test_it_gives_what_it_says",
            "['more'] are given too",
        ),
        ("def ds_engine_methods(): return {}", "test_it_gives_what_it_says", "are not given"),
    ],
)
def test_wrong_methods(text: str, check: str, saying: str, plant: Plant) -> None:
    from ds_testing.kits.tools.engine_methods import CONFIG
    from ds_testing.kits.train.partitioner import with_plugins
    from ds_testing.one_process import one_process_engine
    from torch import nn

    module = plant(text)
    name = next((n for n in ("_method", "register_buffer") if f"'{n}'" in text), "method")
    kit = type("Kit", (EngineMethodsConformance,), {"load": (module,), "names": (name,)})()
    with one_process_engine(nn.Linear(3, 1), with_plugins(CONFIG, {}, [module])) as engine:
        fails(lambda: getattr(kit, check)(engine), saying)


def test_methods_that_differ_by_rank(plant: Plant) -> None:
    gives = "def ds_engine_methods(): return {'method' + os.environ['RANK']: __name__ + ':method'}"
    module = plant(f"import os\n{METHOD}{gives}")
    kit = type("Kit", (EngineMethodsConformance,), {"load": (module,), "names": ("method0",)})()
    fails(kit.test_every_rank_has_the_same, "do not choose methods by rank")


# -- checks and charts -----------------------------------------------------------------------------

CHECK = (
    "from ds_core.errors import Problem\ndef ds_check(config):\n    if "
    "config.core.gradient_clipping > 2: "
)
GOOD = {"train_batch_size": 1}
BAD = {"train_batch_size": 1, "gradient_clipping": 5.0}


@pytest.mark.parametrize(
    ("text", "check", "saying"),
    [
        (
            "return [Problem('other', 'wrong', 'fix')]",
            "test_each_problem_is_found_at_its_key",
            "said: other: wrong",
        ),
        (
            "return [Problem('gradient_clipping', 'wrong')]",
            "test_problems_say_what_to_do",
            "give what is wrong and",
        ),
        (
            "return [Problem('', 'wrong', 'fix')]",
            "test_problems_say_what_to_do",
            "give the dotted path",
        ),
        ("import torch\n    return []", "test_no_torch_is_loaded", "ds_check imports torch"),
    ],
)
def test_wrong_checks(text: str, check: str, saying: str, plant: Plant) -> None:
    module = plant(CHECK + text + "\n    return []\n")
    cases = ((BAD, ("gradient_clipping",)), (GOOD, ()))
    fails(
        getattr(type("Kit", (CheckConformance,), {"load": (module,), "cases": cases})(), check),
        saying,
    )


def test_a_right_check_passes_and_needs_both_kinds(plant: Plant) -> None:
    module = plant(CHECK + "return [Problem('gradient_clipping', 'wrong', 'fix')]\n    return []\n")
    kit = type(
        "Kit", (CheckConformance,), {"load": (module,), "cases": ((BAD, ("gradient_clipping",)),)}
    )()
    kit.test_each_problem_is_found_at_its_key()
    kit.test_problems_say_what_to_do()
    fails(kit.test_there_are_good_and_bad_configs, "needs a config without")


CHART = "from ds_core.entries import Chart\ndef ds_charts(config):\n    return [Chart(%s)]"


@pytest.mark.parametrize(
    ("text", "check", "saying"),
    [
        (CHART % "'a/b', 'Title', 'text'", "test_names_are_of_files", "cannot be a file's"),
        (CHART % "'a', 'Title', ' '", "test_it_has_words", "give a title and a text"),
        (CHART % "'a', 'T', 't', '<svg'", "test_drawings_stand_on_their_own", "not well-formed"),
        (CHART % "'a', 'T', 't', '<svg/>'", "test_drawings_stand_on_their_own", "xmlns"),
        (
            CHART % "'a', 'T', 't', '<svg xmlns=\"http://www.w3.org/2000/svg\"><script/></svg>'",
            "test_drawings_stand_on_their_own",
            "remove <script>",
        ),
        (
            CHART % "'a', 'T', 't', '<svg xmlns=\"http://www.w3.org/2000/svg\"><image "
            'href="x.png"/></svg>\'',
            "test_drawings_stand_on_their_own",
            "lies elsewhere",
        ),
        ("def ds_charts(config): return []", "test_there_is_a_chart", "is the plugin's section in"),
    ],
)
def test_wrong_charts(text: str, check: str, saying: str, plant: Plant) -> None:
    kit = type("Kit", (ChartConformance,), {"config": GOOD, "load": (plant(text),)})()
    fails(getattr(kit, check), saying)


# -- commands --------------------------------------------------------------------------------------

COMMAND = (
    "from ds_core.entries import CommandEntry\ndef ds_commands(): return {'planted': "
    "CommandEntry('%s:run', %r)}"
)


@pytest.mark.slow
def test_wrong_commands(plant: Plant, tmp_path: Path) -> None:
    module = plant("import torch\n" + COMMAND % ("nowhere", "Help."))
    kit = type("Kit", (CommandConformance,), {"plugin": module})()
    fails(
        kit.test_each_is_listed_before_it_is_imported,
        "does not list planted; is the plugin installed?",
    )
    write_metadata(tmp_path, "planted", entry_points={"ds_core.backends": {"planted": module}})
    fails(kit.test_each_is_listed_before_it_is_imported, "torch was imported")
    fails(kit.test_each_explains_itself, "ended with 1, not 0")
    without = type("Kit", (CommandConformance,), {"plugin": plant(COMMAND % ("nowhere", ""))})()
    fails(without.test_each_has_a_line_of_help, "has no help")


# -- meshes ----------------------------------------------------------------------------------------


class Anything:
    """An mpu."""


@pytest.mark.fast_cases(
    "def ds_param_axes(name): return ['own']-test_what_is_shared_stays_the_same-bias differs between ranks"
)
@pytest.mark.parametrize(
    ("text", "check", "saying"),
    [
        ("", "test_the_axes_are_there", "does ds_mesh_axes give it?"),
        (
            "def ds_param_axes(name): return []",
            "test_parameters_are_held_as_declared",
            "weight is held on []",
        ),
        (
            "def ds_param_axes(name): return ['own']",
            "test_what_is_shared_stays_the_same",
            "bias differs between ranks",
        ),
    ],
)
def test_wrong_axes(text: str, check: str, saying: str, plant: Plant) -> None:
    axes = (
        "from ds_core.entries import Axis\ndef ds_mesh_axes(config): return [Axis('own', 2, "
        "inside='dp')]\n"
    )
    module = plant((axes if text else "def ds_check(config): return []\n") + text)
    kit = type("Kit", (MeshAxisConformance,), {"load": (module,), "held": {"own": ("weight",)}})()
    fails(getattr(kit, check), saying)


@pytest.mark.fast_cases(
    "plan_mesh([], world_size, rank)-test_objects_of_others_are_left-answer None for what is not yours"
)
@pytest.mark.parametrize(
    ("answer", "check", "saying"),
    [
        (
            "plan_mesh([], world_size, 0)",
            "test_sizes_and_places",
            "use the arguments rank and world_size",
        ),
        (
            "plan_mesh([], world_size, rank)",
            "test_objects_of_others_are_left",
            "answer None for what is not yours",
        ),
    ],
)
def test_wrong_meshes(answer: str, check: str, saying: str, plant: Plant) -> None:
    module = plant(
        f"from ds_core.mesh import plan_mesh\ndef ds_mesh(mpu, rank, world_size): return {answer}"
    )
    kit = type("Kit", (MeshConformance,), {"load": (module,), "make_mpu": staticmethod(Anything)})()
    fails(getattr(kit, check), saying)
