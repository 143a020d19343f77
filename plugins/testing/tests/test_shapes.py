"""Shapes in signatures are checked in tests, in pool workers too, and only where that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ds_testing import shapes

pytest.importorskip("jaxtyping")
pytest.importorskip("beartype")

ROWS = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from somewhere_else import Kernels


def weigh(
    rows: Float[Tensor, "tokens hidden"], by: Float[Tensor, " tokens"], kernels: Kernels | None = None
) -> Float[Tensor, "tokens hidden"]:
    return rows * by[:, None] if kernels is None else rows.t()


def both(parts: Sequence[Float[Tensor, "tokens hidden"]]) -> tuple[Float[Tensor, " all"], Kernels]:
    return torch.cat(list(parts)).flatten(), 1


def plain(rows: Tensor, kernels: Kernels | None = None) -> Tensor:
    return rows


@dataclass(frozen=True, slots=True)
class Routing:
    experts: Int[Tensor, "tokens k"]
    weights: Float[Tensor, "tokens k"]

    @staticmethod
    def of(experts: Int[Tensor, "tokens k"]) -> Routing:
        return Routing(experts, experts.float())

    @torch.no_grad()
    def dropped(self, counts: Int[Tensor, " experts"]) -> Int[Tensor, ""]:
        return counts.sum() - (self.experts >= 0).sum()


LATER = weigh
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module above, loaded with checks."""
    (tmp_path / "shaped").mkdir()
    (tmp_path / "shaped" / "__init__.py").write_text("")
    (tmp_path / "shaped" / "rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    shapes.install(["shaped"])
    import shaped.rows

    yield shaped.rows
    for name in ("shaped", "shaped.rows"):
        del sys.modules[name]


def test_right_shapes_pass(rows: ModuleType) -> None:
    x = torch.ones(3, 2)
    assert rows.weigh(x, torch.ones(3)).shape == (3, 2)
    assert rows.both([x, x])[0].shape == (12,)
    assert rows.Routing.of(torch.zeros(3, 1, dtype=torch.int64)).dropped(torch.tensor([3, 1])) == 1


def test_wrong_shapes_are_found(rows: ModuleType) -> None:
    from jaxtyping import TypeCheckError

    x = torch.ones(3, 2)
    with pytest.raises(TypeCheckError, match="by"):
        rows.weigh(x, torch.ones(2))
    with pytest.raises(TypeCheckError, match="rows"):
        rows.weigh(x.int(), torch.ones(3))
    with pytest.raises(TypeCheckError, match="return value"):
        rows.weigh(x, torch.ones(3), kernels=object())
    with pytest.raises(TypeCheckError, match="parts"):
        rows.both([torch.ones(3)])
    with pytest.raises(TypeCheckError, match="weights"):
        rows.Routing(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 2))
    with pytest.raises(TypeCheckError, match="experts"):
        rows.Routing.of(x)
    with pytest.raises(TypeCheckError, match="counts"):
        rows.Routing.of(x.long()).dropped(x.long())


def test_what_is_not_wrapped(rows: ModuleType) -> None:
    """A function without shapes; and what the module kept under another name is wrapped as well."""
    assert not hasattr(rows.plain, "__wrapped__")
    assert rows.LATER.__wrapped__ is rows.weigh.__wrapped__
    assert rows.weigh.__annotations__["by"] == "Float[Tensor, ' tokens']"


def test_torch_compile_sees_the_function_itself(rows: ModuleType) -> None:
    compiled = torch.compile(rows.weigh, backend="eager", fullgraph=True)
    assert compiled(torch.ones(3, 2), torch.ones(3)).shape == (3, 2)


def checked_names() -> list[str]:
    from ds_moe import gating

    return [
        name for name in ("top1", "capacity_of") if hasattr(getattr(gating, name), "__wrapped__")
    ]


SUITE = """
from test_shapes import checked_names


def test_here_and_in_workers(ranks):
    assert checked_names() == ["top1"]
    assert ranks(2, checked_names) == [["top1"], ["top1"]]
"""


@pytest.mark.slow
@pytest.mark.fast_cases("ds_optimizers ds_moe")
@pytest.mark.parametrize("packages", ["ds_optimizers ds_moe", ""])
def test_the_option_of_pytest(tmp_path: Path, packages: str) -> None:
    """`ds_shapes` reaches the workers; without it nothing is checked."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    env = {name: value for name, value in os.environ.items() if name != shapes.ENV}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ini = ["-o", f"ds_shapes={packages}", "-c", os.devnull, "-p", "ds_testing.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *ini, str(tmp_path / "test_suite.py")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    expected = "1 passed" if packages else "assert [] == ['top1']"
    assert expected in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_production_imports_no_jaxtyping() -> None:
    code = (
        "import sys, ds_moe.layer, ds_moe.dispatch\n"
        "print([n for n in ('jaxtyping', 'beartype') if n in sys.modules], hasattr(ds_moe.gating.top1, '__wrapped__'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] False"
