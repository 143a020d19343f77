"""Our own packages reach the top level of ``dscore plugins grade``, but for the exceptions that are
written here.

Rules that run tests or train are left out: `make test` does both.
"""

from __future__ import annotations

import pytest
from ds_testing.grade import RULES, Subject, examine, level_of

from ds_core.naming import PREFIX
from ds_core.plugins.discovery import discover

RUN_ELSEWHERE = frozenset(("tests", "parallel", "resumes", "given-back"))
"""By `make test`: the tests of each package, its combinations, and
tests/combinations/test_given_back.py.
"""
OTHERWISE = {
    "ChartConformance": "tests draw each chart",
    "CheckConformance": "tests ask for each rule by its message",
    "CommandConformance": "tests run each command",
    "CompilePassConformance": "tests compare compiled runs with plain ones on several ranks",
    "GradientsConformance": "of the packages that change gradients; a recorder changes none",
    "InterceptorConformance": "tests record what is intercepted",
    "KernelConformance": "of the packages that serve its kernels",
    "LauncherConformance": "tests start real clusters, in network namespaces",
    "LoaderConformance": "tests of its loader, among ranks that come and go",
    "MeshAxisConformance": "tests train along the axis on 2 and 4 ranks",
    "MeshConformance": "tests make Megatron's groups",
    "MonitorConformance": "tests run the real service, or its recorded protocol",
    "ObserverConformance": "tests compare runs with and without it",
    "PartitionerConformance": "tests compare losses and weights with the core's",
    "PluginConformance": "tests/architecture asks the same of every declaration",
    "StateStoreConformance": "of the packages that bring stores",
    "TransformConformance|ShardedTransformConformance": "tests train on 2 and 4 ranks, and save "
    "and load",
}
"""A kit that a package's own tests do not run -> what they do instead."""
DOCUMENTED = {
    "ds_checkpoint.plugin": "keys of DeepSpeed's are told in docs/checkpoints.md",
    "ds_data_sampling.plugin": "its keys are told in docs/data.md",
    "ds_inference.sections": "keys of DeepSpeed's are told in docs/deepspeed-keys.md",
    "ds_moe.plugin": "keys of AutoEP are told in docs/deepspeed-keys.md",
    "ds_pipeline.plugin": "keys of DeepSpeed's without effect are told in docs/differences.md",
    "ds_zero.plugin": "keys of DeepSpeed's without effect are told in docs/differences.md",
}
"""A README without all that the rule asks for -> where it is told."""

MODULES = sorted({found.module for found in discover() if found.dist.startswith(PREFIX)})


@pytest.mark.parametrize("module", MODULES)
def test_a_package_of_ours_reaches_the_top(module: str) -> None:
    verdicts = list(examine(Subject(module), RUN_ELSEWHERE))
    wrong = []
    for verdict in verdicts:
        if verdict.passed is not False or (
            verdict.rule.name == "documented" and module in DOCUMENTED
        ):
            continue
        if verdict.rule.name == "kits":
            lacking = set(verdict.why.removeprefix("its tests do not run ").split(", "))
            if lacking <= OTHERWISE.keys():
                continue
        wrong.append(f"{verdict.rule.name}: {verdict.why}")
    assert wrong == []


def test_rules_and_levels() -> None:
    assert 20 <= len(RULES) <= 25
    assert level_of([]) == "whole"


def test_exceptions_are_still_needed() -> None:
    others = frozenset(rule.name for rule in RULES) - {"documented"}
    for module in DOCUMENTED:
        (verdict,) = examine(Subject(module), others)
        assert verdict.passed is False, f"{module} needs no exception any more"
