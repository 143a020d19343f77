"""The extras of dscore-train: one for each need, and what none of them may bring by accident."""

from __future__ import annotations

import re
import sys

from distributions import DISTRIBUTIONS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OURS = {
    tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
    for folder in DISTRIBUTIONS
}


def named(extra: str) -> set[str]:
    """What an extra names, those of the extras that it names included."""
    found = set()
    for line in EXTRAS[extra]:
        name = re.split(r"[\[<>=]", line)[0]
        if name == PROJECT["name"]:
            found |= named(re.search(r"\[(.+)\]", line)[1])  # type: ignore[index]
        else:
            found.add(name)
    return found


def test_there_is_one_for_each_need() -> None:
    assert list(EXTRAS) == ["standard", "hf", "serve", "cluster", "cuda", "dev", "all"]
    assert named("standard") < named("all") and named("standard") < named("hf")
    assert {"accelerate", "transformers", "dscore-deepspeed-compat"} <= named("hf")
    assert "dscore-inference[serve]" in "".join(EXTRAS["serve"])
    assert named("cuda") == {"dscore-ops-cuda"}
    assert {"dscore-testing", "dscore-testing-hosts", "dscore-new"} <= named("dev")


def test_every_distribution_is_in_one() -> None:
    assert OURS - set().union(*map(named, EXTRAS)) == set()


def test_all_has_every_feature_and_nothing_that_takes_over() -> None:
    """No pytest, no launchers, no compiler for CUDA, and no command that DeepSpeed owns."""
    launchers = {name for name in OURS if name.startswith("dscore-launcher-")}
    assert len(launchers) == 6 and launchers <= named("cluster")
    tools = {"dscore-testing", "dscore-testing-hosts", "dscore-new"}
    assert OURS - named("all") == launchers | tools | {"dscore-deepspeed-compat", "dscore-ops-cuda"}


def test_lists_are_in_order() -> None:
    """A new distribution has one place, so that two branches that add one merge."""
    for extra, lines in EXTRAS.items():
        names = [re.split(r"[\[<>=]", line)[0] for line in lines]
        ours = [name for name in names if name in OURS]
        assert ours == sorted(ours), extra
