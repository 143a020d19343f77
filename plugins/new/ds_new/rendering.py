"""From a kind and a name to the files of a distribution.

[Note: one template library] jinja2, which torch brings: nothing more is installed. copier would add
a dozen packages and needs git for what it is made for, updating a project from a newer template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ds_core
from ds_core import __version__
from ds_new.kinds import KINDS
from ds_new.naming import Names

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = ("pytest>=8", "ruff>=0.6", "mypy>=1.11")
COMMON = {
    "pyproject.toml.jinja": "pyproject.toml",
    "README.md.jinja": "README.md",
    "LICENSE": "LICENSE",
    "gitignore.jinja": ".gitignore",
    "ci.yml.jinja": ".github/workflows/ci.yml",
    "init.py.jinja": "{package}/__init__.py",
    "train.py.jinja": "example/train.py",
}
EXAMPLE = "train.py.example.jinja"
"""The example of a kind whose model is not the common one."""
BASE = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
}
"""The config of the example, before the plugin's part."""


def render(kind: str, names: Names) -> dict[str, str]:
    """The text of every file of a new distribution, by its path."""
    environment = _environment()
    given = _variables(kind, names)
    config = environment.get_template(f"{kind}/config.json.jinja").render(given)
    own: dict[str, Any] = json.loads(config)
    # The README shows the plugin's own part of the config; the example's file has all of it.
    given["config"] = _pretty(own) if own else ""
    files = {
        path.format(package=names.package): environment.get_template(f"common/{file}").render(given)
        for file, path in COMMON.items()
    }
    if (TEMPLATES / kind / EXAMPLE).exists():  # a model of its own
        files["example/train.py"] = environment.get_template(f"{kind}/{EXAMPLE}").render(given)
    files[f"{names.package}/py.typed"] = ""
    files["example/config.json"] = _pretty({**BASE, **own}) + "\n"
    for file in modules(kind):
        # Templates are named by their role: ``test.py`` is the distribution's test, others are
        # modules.
        path = f"tests/test_{names.package}.py" if file == "test.py" else f"{names.package}/{file}"
        files[path] = environment.get_template(f"{kind}/{file}.jinja").render(given)
    return dict(sorted(files.items()))


def modules(kind: str) -> Iterator[str]:
    """The Python files of a kind: its modules, the declaration first, and ``test.py``."""
    found = sorted(
        file.name.removesuffix(".jinja") for file in (TEMPLATES / kind).glob("*.py.jinja")
    )
    yield "plugin.py"
    yield from (file for file in found if file != "plugin.py")


def _variables(kind: str, names: Names) -> dict[str, Any]:
    about = KINDS[kind]
    meaning = about.meaning.partition(";")[0]
    return {
        "name": names.name,
        "package": names.package,
        "cls": names.cls,
        "kind": kind,
        "contract": ds_core.contract,
        "description": f"{names.name}: {meaning}",
        "group": "ds_core.plugins" if about.section else "ds_core.backends",
        "dependencies": _ours("dscore-train", *about.needs),
        "test_dependencies": [*_ours("dscore-testing", *about.test_needs), *TOOLS],
        "page": about.page,
        "anchor": re.sub(r"[^a-z0-9 -]", "", about.title.lower()).replace(" ", "-"),
    }


def _ours(*distributions: str) -> list[str]:
    """Requirements; one without a bound gets the version that is installed as its lowest, and
    the next that may break: 0.1.3 -> ``>=0.1.3,<0.2``.
    """
    major, minor = (int(part) for part in __version__.split(".")[:2])
    series = f">={__version__},<{f'0.{minor + 1}' if major == 0 else major + 1}"
    return [dist if ">" in dist else dist + series for dist in distributions]


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(f'"{text}"' for text in texts)


def _pretty(config: Any) -> str:
    """JSON with one line a section, as far as it is short."""
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items()]
    return "{\n" + ",\n".join(rows) + "\n}"


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        # A misspelt variable is an error here, and not a gap in the files that are written.
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    made.filters["quoted"] = _quoted
    return made
