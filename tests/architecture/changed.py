"""The tests that a change calls for: ``python tests/architecture/changed.py [--base REV] [--list]``.

A package's own tests are chosen when one of its files changed. Where other packages import it (the
core and the kits), the conformance tests of those are chosen too, and the test files that import
what changed: not all their tests, as a change of the core would then choose everything. Also
chosen: test files that changed, or whose helpers did, and for pages the tests of the documents.
tests/architecture is always run. What was not chosen is left to ``make test``.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

from distributions import PACKAGES, ROOT  # noqa: E402
from graph import imports, read_modules, resolve  # noqa: E402

CORE_TESTS = ("tests/core", "tests/config", "plugins/testing/tests/kit")
"""What holds the core's own behaviour, and the kits' (which are written against it)."""
CORE_PARTS = ("accelerator", "comm")
"""Folders of the core whose tests, of the same name, are chosen for their own changes only."""
FAST = "not slow and not gpu and not integration and not hosts"
SOURCE = (".py", ".pyi", ".cpp", ".h", ".cu", ".jinja", ".j2", ".json", ".toml")
TESTED = ("tests", "plugins", "ops", "monitors", "examples")


@dataclass
class Chosen:
    """What to give to pytest, with the reason of each."""

    why: dict[str, str] = field(default_factory=dict)

    def add(self, targets: Iterable[str], why: str) -> None:
        """Add `targets`: folders, files, or ``file::Class``. The first reason is kept."""
        for target in targets:
            self.why.setdefault(target, why)

    def arguments(self) -> list[str]:
        """Without those that lie in another that is chosen."""

        def covered(target: str) -> bool:
            file, _, node = target.partition("::")
            above = [parent.as_posix() for parent in Path(file).parents]
            return any(each in self.why for each in ([file] if node else []) + above)

        return sorted(target for target in self.why if not covered(target))


class Repository:
    """Packages, test files, and who imports whom. Paths are relative to its root."""

    def __init__(self, root: Path = ROOT, packages: Iterable[Path] = PACKAGES) -> None:
        self.root = root
        self.packages = {package.name: package for package in packages}

    @cached_property
    def modules(self) -> dict[str, str]:
        """Text by module, of all packages."""
        return read_modules(self.packages.values())[0]

    @cached_property
    def handed_on(self) -> dict[str, str]:
        """Name that a package's ``__init__.pyi`` hands on -> the module that defines it."""
        found = {}
        for package in self.packages.values():
            for stub in package.rglob("__init__.pyi"):
                face = ".".join(stub.parent.relative_to(package.parent).parts)
                for node in ast.walk(ast.parse(stub.read_text())):
                    if isinstance(node, ast.ImportFrom) and node.module:
                        for alias in node.names:
                            found[f"{face}.{alias.asname or alias.name}"] = node.module
        return found

    def _targets(self, text: str) -> set[str]:
        """The modules that a text imports; for what a package hands on, those that define it."""
        names = (self.handed_on.get(name, name) for name in imports(ast.parse(text)))
        return {resolve(name, self.modules) for name in names} - {""}

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """Package -> the packages that import it, directly or through others."""
        direct: dict[str, set[str]] = {name: set() for name in self.packages}
        for module, text in self.modules.items():
            package = module.partition(".")[0]
            for target in self._targets(text):
                direct[target.partition(".")[0]].add(package)
        found = {}
        for name in direct:
            seen: set[str] = set()
            todo = [name]
            while todo:
                for importer in direct[todo.pop()] - seen:
                    seen.add(importer)
                    todo.append(importer)
            found[name] = seen - {name}
        return found

    @cached_property
    def tests(self) -> dict[str, str]:
        """Text by path, of all test files and of the modules beside them."""
        files = (f for top in TESTED for f in (self.root / top).rglob("*.py"))
        found = {f.relative_to(self.root).as_posix(): f for f in files}
        return {
            path: file.read_text()
            for path, file in sorted(found.items())
            # frozen copies and broken files are read by tests as data
            if "tests" in path.split("/") and not {"broken", "before_kits"} & set(path.split("/"))
        }

    @cached_property
    def test_targets(self) -> dict[str, set[str]]:
        """Path of a test file or helper -> the modules of packages that it imports."""
        return {path: self._targets(text) for path, text in self.tests.items()}

    def tests_of(self, package: str) -> str:
        """The folder of a package's own tests; "" for one that has none."""
        folder = self.packages[package].parent / "tests"
        return folder.relative_to(self.root).as_posix() if folder.is_dir() else ""

    def conformance(self, folder: str) -> Iterator[str]:
        """``file::Class`` of each conformance test below a folder."""
        for path, text in self.tests.items():
            if is_test(path) and path.startswith(f"{folder}/") and "Conformance" in text:
                for node in ast.parse(text).body:
                    if isinstance(node, ast.ClassDef):
                        bases = [ast.unparse(base) for base in node.bases]
                        if any(base.endswith("Conformance") for base in bases):
                            yield f"{path}::{node.name}"

    def using(self, helper: str) -> Iterator[str]:
        """The test files that import a module of a tests folder, directly or through another."""
        stem = Path(helper).stem
        for path, text in self.tests.items():
            if stem in text and path != helper and area(path) in (area(helper), helper):
                heads = {name.partition(".")[0] for name in imports(ast.parse(text))}
                if stem in heads and is_test(path):
                    yield path
                elif stem in heads:
                    yield from self.using(path)


def is_test(path: str) -> bool:
    """Whether pytest collects it."""
    return Path(path).name.startswith("test_") and path.endswith(".py")


def area(path: str) -> str:
    """The tests folder that a test or helper belongs to."""
    parts = path.split("/")
    return "/".join(parts[: parts.index("tests") + 1])


def choose(changed: Iterable[str], repository: Repository) -> Chosen:
    """The tests for these changed files, named relative to the root."""
    chosen = Chosen()
    chosen.add(["tests/architecture"], "always")
    owners = {
        package.relative_to(repository.root).as_posix() + "/": name
        for name, package in repository.packages.items()
    }
    touched: dict[str, set[str]] = {}
    for path in changed:
        exists = (repository.root / path).exists()
        owner = next((name for top, name in owners.items() if path.startswith(top)), "")
        if owner:
            if path.endswith(SOURCE):
                touched.setdefault(owner, set()).add(path)
        elif "tests" in path.split("/"):
            if is_test(path):
                chosen.add([path] if exists else [], "changed")
            elif path.endswith("conftest.py") or not path.endswith(".py"):
                folder = Path(path).parent.as_posix()
                chosen.add([folder] if folder != "tests" and exists else [], f"{path} changed")
            else:
                chosen.add(repository.using(path), f"use {path}")
        elif path.endswith(".md") or path.startswith("docs/"):
            chosen.add(["tests/docs"], f"{path} changed")
        elif path == "conftest.py":
            chosen.add(CORE_TESTS, "conftest.py changed")
        elif path.startswith("examples/"):
            chosen.add(["examples"], f"{path} changed")
    for package, paths in touched.items():
        _of_package(package, paths, repository, chosen)
    return chosen


def _of_package(package: str, paths: set[str], repository: Repository, chosen: Chosen) -> None:
    why = f"{package} changed"
    own = repository.tests_of(package)
    if package == "ds_core":
        parts = [part for part in CORE_PARTS for path in paths if f"ds_core/{part}/" in path]
        chosen.add([*CORE_TESTS, *(f"tests/{part}" for part in parts)], why)
    else:
        chosen.add([own] if own else [], why)
    for importer in sorted(repository.importers[package]):
        chosen.add(
            repository.conformance(repository.tests_of(importer)), f"{importer} imports {package}"
        )
    modules = {
        module_of(path, repository.packages[package].relative_to(repository.root)) for path in paths
    }
    # The core's modules are imported by nearly every test; its own tests stand for those.
    if package != "ds_core":
        for path, targets in repository.test_targets.items():
            if targets & modules:
                found = [path] if is_test(path) else repository.using(path)
                chosen.add(found, f"import what changed in {package}")


def module_of(path: str, package: Path) -> str:
    """The dotted name of a package's file."""
    parts = Path(path).relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Files that differ from `base` in the working tree, and those that git does not know yet."""
    diff = _git(root, "diff", "--name-only", "--no-renames", base)
    return sorted({*diff, *_git(root, "ls-files", "--others", "--exclude-standard")})


def default_base(root: Path = ROOT) -> str:
    """Where this branch left origin/main; the commit before the last where that is not known."""
    for words in (["merge-base", "HEAD", "origin/main"], ["rev-parse", "HEAD~1"]):
        try:
            base = _git(root, *words)[0]
        except subprocess.CalledProcessError:
            continue
        if base != _git(root, "rev-parse", "HEAD")[0] or words[0] == "rev-parse":
            return base
    return "HEAD"


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="", help="compare with this revision")
    parser.add_argument("--list", action="store_true", help="print what is chosen, and run nothing")
    options, rest = parser.parse_known_args()
    base = options.base or default_base()
    files = changed_files(base)
    chosen = choose(files, Repository())
    print(f"{len(files)} files differ from {base[:12]}:", flush=True)
    for target in chosen.arguments():
        print(f"  {target}  ({chosen.why[target]})", flush=True)
    if options.list:
        return 0
    words = [sys.executable, "-m", "pytest", "-m", FAST, *chosen.arguments(), *rest]
    return subprocess.run(words, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
