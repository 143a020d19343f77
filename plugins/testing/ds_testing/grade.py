"""``dscore plugins grade MODULE``: how much of what users expect a plugin keeps, checked by machine
in four levels.

A rule passes, fails with a reason, or does not apply. A plugin has a level when every rule of it,
and of those below, passes or does not apply.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import importlib_metadata
import typer

from ds_core.catalogue import offered_by
from ds_core.entries import resolve
from ds_core.errors import ConfigError, DSError, UsageError
from ds_core.plugins import discover
from ds_testing.kits.grade_runs import gives_back, resumes, trains_alike
from ds_testing.kits.tools.plugin import PluginConformance

LEVELS = ("declared", "kept", "proven", "whole")
"""declared: installing it harms nobody. kept: it keeps the contract. proven: by tests of its own,
and it says so to users. whole: right on several ranks, resumed, and nothing is left of it."""

KITS = {
    "ds_accelerators": "AcceleratorConformance",
    "ds_charts": "ChartConformance",
    "ds_check": "CheckConformance",
    "ds_checkpoint_storages": "StorageConformance",
    "ds_checkpoint_formats": "CheckpointFormatConformance",
    "ds_checkpointer": "CheckpointerConformance",
    "ds_collectives": "CollectivesConformance",
    "ds_commands": "CommandConformance",
    "ds_compile_passes": "CompilePassConformance",
    "ds_config_formats": "ConfigFormatConformance",
    "ds_gradients": "GradientsConformance",
    "ds_interceptors": "InterceptorConformance",
    "ds_kernels": "KernelConformance",
    "ds_launchers": "LauncherConformance",
    "ds_loader": "LoaderConformance",
    "ds_memory": "MemoryConformance",
    "ds_mesh": "MeshConformance",
    "ds_mesh_axes": "MeshAxisConformance",
    "ds_monitors": "MonitorConformance",
    "ds_optimizers": "OptimizerConformance",
    "ds_partitioner": "PartitionerConformance",
    "ds_pipeline_schedules": "PipelineScheduleConformance",
    "ds_precision": "PrecisionConformance",
    "ds_rendezvous": "RendezvousConformance",
    "ds_runner": "RunnerConformance",
    "ds_schedulers": "SchedulerConformance",
    "ds_state_stores": "StateStoreConformance",
    "ds_step_end": "ObserverConformance",
    "ds_transforms": "TransformConformance|ShardedTransformConformance",
}
"""Hook -> the kit that its implementers are to pass."""


class Subject:
    """The plugin that is graded: its declaration module, and what is found around it.

    section, config: the section that it owns and a config of it that is valid; from its
    `PluginConformance` test where they are not given.
    """

    def __init__(self, module: str, section: str | None = None, config: Any = None) -> None:
        self.module = module
        self.section = section
        self.config = config
        if section is None and (kit := self._own_kit()) is not None:
            self.section = kit.section
            self.config = kit.good_config
        elif section is None:
            self.section = next(
                (f.name for f in discover() if f.module == module and f.owns_section), None
            )

    @cached_property
    def folder(self) -> Path:
        """Of the package."""
        spec = importlib.util.find_spec(self.module.partition(".")[0])
        assert spec is not None and spec.origin is not None, f"{self.module} cannot be found"
        return Path(spec.origin).parent

    @cached_property
    def tests(self) -> list[Path]:
        """Its test files: in ``tests`` beside the package."""
        return sorted((self.folder.parent / "tests").glob("test_*.py"))

    @cached_property
    def readme(self) -> str:
        """Its README, from beside the package or from its metadata."""
        file = self.folder.parent / "README.md"
        if file.exists():
            return file.read_text(encoding="utf-8")
        return str(self.metadata.get_payload() or self.metadata.get("Description") or "")

    @cached_property
    def metadata(self) -> Any:
        """The metadata of its distribution. Raises AssertionError where it is not installed."""
        dist = next((f.dist for f in discover() if f.module == self.module), None)
        assert dist is not None, (
            f"no installed distribution has the entry point {self.module}; pip install -e it"
        )
        return importlib_metadata.metadata(dist)

    @cached_property
    def kit(self) -> PluginConformance:
        """Its `PluginConformance`."""
        given = {"entry_point": self.module, "section": self.section, "good_config": self.config}
        made: PluginConformance = type("TestGraded", (PluginConformance,), given)()
        return made

    @cached_property
    def hooks(self) -> set[str]:
        """What it implements."""
        return set(self.kit.report().hooks)

    def _own_kit(self) -> type[PluginConformance] | None:
        """The test class of its author that says which section it has."""
        for file in self.tests:
            text = file.read_text(encoding="utf-8")
            if "PluginConformance" not in text or self.module not in text:
                continue
            spec = importlib.util.spec_from_file_location(f"graded_{file.stem}", file)
            assert spec is not None and spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(found)
            except Exception:  # the rule on tests tells of it
                continue
            for value in vars(found).values():
                own = inspect.isclass(value) and issubclass(value, PluginConformance)
                if own and getattr(value, "entry_point", None) == self.module:
                    return value  # type: ignore[no-any-return]
        return None


class NotApplicable(Exception):  # no error
    """The rule is not for this plugin."""


Check = Callable[[Subject], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """check: raises AssertionError with the reason, or `NotApplicable`."""

    name: str
    level: str
    text: str
    check: Check


@dataclass(frozen=True, slots=True)
class Verdict:
    """passed: None where the rule does not apply."""

    rule: Rule
    passed: bool | None
    why: str = ""


def _of_kit(*checks: str) -> Check:
    def check(subject: Subject) -> None:
        for name in checks:
            getattr(subject.kit, name)()

    return check


def _metadata(subject: Subject) -> None:
    found = subject.metadata
    licence = found.get("License-Expression") or found.get("License")
    lacking = [
        n
        for n, v in (("a licence", licence), ("requires-python", found.get("Requires-Python")))
        if not v
    ]
    lacking += [] if found.get("Summary") else ["a description"]
    assert not lacking, f"its metadata lacks {', '.join(lacking)}"


def _bounds(subject: Subject) -> None:
    required = [r for r in subject.metadata.get_all("Requires-Dist") or () if "extra ==" not in r]
    core = next((r for r in required if re.match(r"dscore[-_]train\b", r)), None)
    assert core is not None, "it does not require dscore-train"
    assert ">=" in core and "<" in core.replace("<=", "<"), f"{core!r} has no lower and upper bound"
    open_ended = [r for r in required if not re.search(r"[>=~]=", r)]
    assert not open_ended, f"no lower bound for {', '.join(open_ended)}"


def _strict(subject: Subject) -> None:
    subject.kit.test_model_is_strict_and_described()
    if subject.config is not None:
        subject.kit.test_good_config_validates()
        subject.kit.test_unknown_key_is_refused()


def _contract(subject: Subject) -> None:
    dist = next((f.dist for f in discover() if f.module == subject.module), "")
    if offered_by("folders", dist) is not None:  # of ds_core's own repository, and released with it
        return
    needs = getattr(resolve(subject.module), "DS_CONTRACT", None)
    assert type(needs) is int, (
        f"{subject.module} does not say DS_CONTRACT = N, the contract that it was written for"
    )


def _typed(subject: Subject) -> None:
    assert (subject.folder / "py.typed").exists(), (
        "the package has no py.typed: users' type checkers ignore it"
    )
    bare = [
        f"{file.name}:{node.lineno}"
        for file in sorted(subject.folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and node.returns is None
        and "no-untyped-def" not in file.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
    ]
    assert not bare, f"functions without annotations: {', '.join(bare[:5])}"


def _errors_name_it(subject: Subject) -> None:
    if subject.section is None:
        raise NotApplicable
    from ds_core.setup.compose import compose

    wrong = {
        subject.section: {"no_such_key_in_any_section": 1},
        "plugins": {"load": [f"{subject.section}={subject.module}"]},
    }
    try:
        compose(wrong)
    except ConfigError as error:
        said = str(error)
        assert subject.section in said, (
            f"a wrong key is reported without the section's name: {said}"
        )
        return
    raise AssertionError("a wrong key of its section is accepted")


def _has_tests(subject: Subject) -> None:
    assert subject.tests, f"no tests beside the package, in {subject.folder.parent / 'tests'}"


def _uses_kits(subject: Subject) -> None:
    _has_tests(subject)
    texts = "\n".join(
        f.read_text(encoding="utf-8") for f in (subject.folder.parent / "tests").rglob("*.py")
    )
    wanted = {"PluginConformance", *(KITS[hook] for hook in subject.hooks & KITS.keys())}
    lacking = sorted(kit for kit in wanted if not re.search(kit, texts))
    assert not lacking, f"its tests do not run {', '.join(lacking)}"


def _tests_pass(subject: Subject) -> None:
    _has_tests(subject)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu",
    ]
    done = subprocess.run(
        [*command, "tests"],
        cwd=subject.folder.parent,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, (
        done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    )


def _lower_bounds(subject: Subject) -> None:
    """Every lower bound is of a version that is there, and not above what is installed."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    for text in subject.metadata.get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        lows = [
            Version(s.version) for s in requirement.specifier if s.operator in (">=", "==", "~=")
        ]
        here = Version(importlib_metadata.version(requirement.name))
        assert all(low <= here for low in lows), (
            f"{text} is not what is tested here, {requirement.name} {here}"
        )


def _documented(subject: Subject) -> None:
    text = subject.readme
    assert "pip install" in text, "its README does not say how to install it"
    assert "```" in text, "its README has no example"
    limits = r"^#+ .*\blimits?\b|\blimits?:|costs and limits|what there is not"
    told = re.search(limits, text, re.IGNORECASE | re.MULTILINE)
    assert told, "its README does not tell its limits"
    if subject.section is not None:
        model = subject.kit.models()[0]
        lacking = [n for n in model.model_fields if n != "root" and n not in text]
        assert not lacking, f"its README does not name the keys {', '.join(lacking)}"


def _run(check: Callable[[str, str, Any], None]) -> Check:
    def run(subject: Subject) -> None:
        if subject.section is None or subject.config is None or "ds_config" not in subject.hooks:
            raise NotApplicable
        try:
            check(subject.module, subject.section, subject.config)
        except DSError as error:
            if subject.section in str(error):  # it needs another model, and says so
                raise NotApplicable from error
            raise AssertionError(f"refused without its section's name: {error}") from error

    return run


TWICE = ("test_hooks_answer_twice_the_same", "test_names_do_not_collide")

RULES = (
    Rule(
        "torch-free",
        "declared",
        "the declaration loads no torch",
        _of_kit("test_imports_nothing_heavy"),
    ),
    Rule(
        "quiet", "declared", "importing it changes nothing", _of_kit("test_import_changes_nothing")
    ),
    Rule(
        "independent",
        "declared",
        "it imports no other plugin",
        _of_kit("test_imports_no_other_plugin"),
    ),
    Rule("loads", "declared", "it can be named in plugins.load", _of_kit("test_loads_by_name")),
    Rule(
        "hooks",
        "declared",
        "its hooks are known and fit",
        _of_kit("test_every_hook_is_known_and_fits"),
    ),
    Rule("repeatable", "kept", "hooks answer twice the same", _of_kit(*TWICE)),
    Rule("references", "kept", "references lead somewhere", _of_kit("test_references_resolve")),
    Rule("entries", "kept", "entries are well formed", _of_kit("test_entries_are_well_formed")),
    Rule(
        "strict",
        "kept",
        "its section is strict and described",
        _strict,
    ),
    Rule("errors", "kept", "errors of its section name it", _errors_name_it),
    Rule("metadata", "kept", "licence, Python and description are given", _metadata),
    Rule("bounds", "kept", "requirements have bounds", _bounds),
    Rule("contract", "kept", "it says which contract it was written for", _contract),
    Rule("typed", "proven", "it is typed", _typed),
    Rule("kits", "proven", "its tests run the kit of each hook", _uses_kits),
    Rule(
        "documented", "proven", "its README has install, example, limits and every key", _documented
    ),
    Rule("lower-bounds", "proven", "lower bounds are of what is tested", _lower_bounds),
    Rule("tests", "proven", "its tests pass", _tests_pass),
    Rule(
        "parallel",
        "whole",
        "two ranks, and tp, pp and ep axes, train as one process",
        _run(trains_alike),
    ),
    Rule("resumes", "whole", "a resumed run continues exactly", _run(resumes)),
    Rule("given-back", "whole", "nothing is left of it after destroy()", _run(gives_back)),
)


def examine(subject: Subject, without: frozenset[str] = frozenset()) -> Iterator[Verdict]:
    """What each rule says of the plugin.

    without: names of rules that are not asked.
    """
    for rule in RULES:
        if rule.name in without:
            continue
        try:
            rule.check(subject)
        except NotApplicable:
            yield Verdict(rule, None)
        except Exception as error:  # a rule that cannot be carried out is not kept
            why = (
                str(error)
                if isinstance(error, AssertionError)
                else f"{type(error).__name__}: {error}"
            )
            yield Verdict(rule, False, why.strip().partition("\nassert ")[0])
        else:
            yield Verdict(rule, True)


def level_of(verdicts: list[Verdict]) -> str:
    """The highest level all of whose rules, and those below, are kept; "" for none."""
    reached = ""
    for level in LEVELS:
        if any(v.passed is False for v in verdicts if v.rule.level == level):
            break
        reached = level
    return reached


def grade(
    module: Annotated[
        str, typer.Argument(metavar="MODULE", help="The declaration: the entry point's value.")
    ],
    section: Annotated[
        str, typer.Option(metavar="NAME", help="Its section, where its tests do not say it.")
    ] = "",
    config: Annotated[
        str, typer.Option(metavar="JSON", help="A valid value of the section, likewise.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Leave out its own tests, and runs of training.")
    ] = False,
) -> None:
    """Say how much of what users expect the plugin with the declaration MODULE keeps.

    Exit codes:
      0: every rule passes, or does not apply
      1: a rule fails

    Examples:
      dscore plugins grade my_lines.plugin
      dscore plugins grade my_lines.plugin --fast --json
    """
    try:
        exists = importlib.util.find_spec(module) is not None
    except ImportError:
        exists = False
    if not exists:
        raise UsageError(
            f"no module {module!r} can be imported; give the value of the plugin's entry point"
        )
    subject = Subject(
        module, section or None, json.loads(config) if config else ({} if section else None)
    )
    without = frozenset(("tests", "parallel", "resumes", "given-back")) if fast else frozenset()
    verdicts = list(examine(subject, without))
    level = level_of(verdicts)
    if as_json:
        rows = [
            {"rule": v.rule.name, "level": v.rule.level, "passed": v.passed, "why": v.why}
            for v in verdicts
        ]
        print(json.dumps({"module": module, "level": level, "rules": rows}, indent=2))
    else:
        for verdict in verdicts:
            mark = {True: "ok", False: "no", None: "-"}[verdict.passed]
            print(f"{mark:3}{verdict.rule.level:9} {verdict.rule.name:13} {verdict.rule.text}")
            if verdict.why:
                print(f"   {'':9} {'':13} {verdict.why}")
        print(f"{module}: {level or 'no level'}{' (fast)' if fast else ''}")
    if any(v.passed is False for v in verdicts):
        raise SystemExit(1)
