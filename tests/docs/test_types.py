"""What programs write passes ``mypy --strict``, and a misspelt name does not."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks

from ds_core.setup.assemble import initialize

SHOWN = """
from typing import Any, Protocol, cast

import ds_core
import ds_core.compat
import torch
from torch import nn

config = {"train_batch_size": 2}
data: torch.utils.data.Dataset[Any] = torch.utils.data.TensorDataset(torch.ones(4, 2))
net = nn.Linear(2, 1)
given = ds_core.initialize(model=net, config=config, training_data=data)
reveal_type(given.training_dataloader)
reveal_type(given.optimizer)
alone = ds_core.initialize(model=net, config="ds_config.json")
reveal_type(alone.training_dataloader)
made = ds_core.initialize(model=net, config=config, optimizer=torch.optim.SGD(net.parameters()))
reveal_type(made.optimizer)
old = ds_core.initialize(None, net, config_params=config)
reveal_type(old[2])
engine, optimizer, loader, scheduler = given
reveal_type(engine)
reveal_type(engine.resume())
reveal_type(engine.evaluate(data, {}))
reveal_type(engine.zero_optimization_stage())
engine.compile()
engine.generate(torch.ones(1, 2))
ds_core.compat.install()


class Scores(Protocol):
    def score(self, n: int) -> float: ...


reveal_type(cast(Scores, engine).score(3))
engine.sav_checkpoint("folder")
engine.weight
ds_core.initialize(model=net, config=7)
ds_core.initialize(model=net, confg=config)
"""
GIVEN = """from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import mse_loss

build_model: Callable[[], torch.nn.Module] = torch.nn.Identity
build_data: Callable[[], torch.utils.data.Dataset[Any]] = torch.utils.data.Dataset

"""
"""What README's diff takes for granted."""
REVEALED = [
    "ds_core.setup.start.TrainingLoader",
    "torch.optim.optimizer.Optimizer | None",
    "None",
    "torch.optim.optimizer.Optimizer",
    "ds_core.engine.data.Loader | None",
    "ds_core.engine.engine.Engine",
    "str | None",
    "dict[str, float]",
    "int",
    "float",
]
ERRORS = [
    '"Engine" has no attribute "sav_checkpoint"  [attr-defined]',
    '"Engine" has no attribute "weight"  [attr-defined]',
    'No overload variant of "initialize" matches argument types "Linear", "int"  [call-overload]',
    'Unexpected keyword argument "confg" for overloaded function "initialize"; did you mean "config"?'
    "  [call-overload]",
    'No overload variant of "initialize" matches argument types "Linear", "dict[str, int]"'
    "  [call-overload]",
]


def test_the_stub_has_the_arguments_and_the_words_of_the_function() -> None:
    tree = ast.parse((ROOT / "ds_core" / "setup" / "start.pyi").read_text("utf-8"))
    written = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "initialize"]
    wanted = list(inspect.signature(initialize).parameters)
    for function in written:
        given = function.args
        names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        assert names == wanted
    assert len(written) == 5
    assert ast.get_docstring(written[0]) == inspect.getdoc(initialize)


@pytest.mark.slow
def test_programs_pass_mypy_strict(tmp_path: Path) -> None:
    """One run for all: the README's first example, the scripts of the tutorial, and what is shown."""
    files = [tmp_path / "shown.py"]
    files[0].write_text(SHOWN)
    for page in ("README.md", "docs/tutorials/train-my-script.md"):
        for number, text in enumerate(scripts(ROOT / page)):
            files.append(tmp_path / f"{Path(page).stem.replace('-', '_').lower()}_{number}.py")
            files[-1].write_text(text)
    assert len(files) > 2
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += ["--config-file=", "--untyped-calls-exclude=torch", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if ": note: " not in line]
    elsewhere = [line for line in said if "shown.py" not in line]
    assert elsewhere == []
    assert re.findall(r'note: Revealed type is "(.*)"', done.stdout) == REVEALED
    assert [line.partition(": error: ")[2] for line in said] == ERRORS


def scripts(page: Path) -> list[str]:
    """The page's Python blocks that are whole programs: they import what they use."""
    found = blocks(page)
    texts = [b.text for b in found if b.language == "python"]
    for block in found:  # a loop before and after
        if block.language == "diff":
            kept = [line[1:] for line in block.text.splitlines() if line[:1] in " +"]
            texts.append(GIVEN + "\n".join(kept) + "\n")
    return [text for text in texts if "ds_core.initialize(" in text and "import ds_core" in text]
