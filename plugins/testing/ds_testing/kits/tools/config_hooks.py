"""The conformance kits for what reads a config before anything runs: `CheckConformance`,
`ChartConformance`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from xml.etree import ElementTree

from ds_core.entries import Chart
from ds_core.errors import ConfigError, Problem
from ds_core.setup.compose import compose

SVG = "{http://www.w3.org/2000/svg}svg"
ASK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from ds_core.setup.compose import compose
from ds_core.errors import ConfigError
try:
    chosen = compose(json.loads(sys.argv[2]))
    [row for a in chosen.plugins.ask("ds_charts", config=chosen.config, plugins=chosen.plugins) for row in a.value]
except ConfigError:
    pass
sys.exit("torch" in sys.modules)
"""


class CheckConformance:
    """Inherit, and set `cases`; ``class TestMine(CheckConformance)``, so that pytest collects it."""

    cases: ClassVar[Sequence[tuple[Mapping[str, Any], Sequence[str]]]] = ()
    """Configs, and for each the keys in which something is wrong: ``({"mine": {"a": 1}},
    ("mine.a",))``; one of them in which nothing is.
    """
    load: ClassVar[tuple[str, ...]] = ()
    """``plugins.load``, for a plugin that is not installed."""

    def problems(self, config: Mapping[str, Any]) -> list[Problem]:
        """What a check of `config` finds."""
        try:
            compose(_loading(config, self.load))
        except ConfigError as error:
            return list(error.problems)
        return []

    def test_there_are_good_and_bad_configs(self) -> None:
        """A rule is shown by a config that keeps it, and by one that does not."""
        kinds = {bool(keys) for _, keys in self.cases}
        assert kinds == {True, False}, (
            f"{type(self).__name__}.cases needs a config without, and one with a problem"
        )

    def test_each_problem_is_found_at_its_key(self) -> None:
        """The keys in which something is wrong are those of `cases`, in any order."""
        for config, keys in self.cases:
            found = self.problems(config)
            said = "; ".join(map(str, found)) or "nothing"
            assert sorted(p.path for p in found) == sorted(keys), (
                f"{json.dumps(config)}: {keys} expected, said: {said}"
            )

    def test_problems_say_what_to_do(self) -> None:
        """Each has a key, a message and a fix, and is told the same when asked again."""
        for config, _ in self.cases:
            found = self.problems(config)
            for problem in found:
                assert problem.path, (
                    f"{problem}: give the dotted path of the key, Problem('optimizer.params.lr', "
                    "...)"
                )
                assert problem.message.strip() and problem.fix.strip(), (
                    f"{problem}: give what is wrong and the fix"
                )
            assert self.problems(config) == found, (
                f"{json.dumps(config)}: another answer when asked again"
            )

    def test_no_torch_is_loaded(self) -> None:
        """``dscore config check`` stays quick."""
        for config, _ in self.cases[:2]:
            _asks_without_torch(_loading(config, self.load), "ds_check")


class ChartConformance:
    """Inherit, and set `config`; ``class TestMine(ChartConformance)``, so that pytest collects it."""

    config: ClassVar[Mapping[str, Any]] = {}
    """One for which the plugin has a chart."""
    load: ClassVar[tuple[str, ...]] = ()
    """``plugins.load``, for a plugin that is not installed."""

    def charts(self) -> list[Chart]:
        """What ``dscore plan`` is given for `config`."""
        chosen = compose(_loading(self.config, self.load))
        answers = chosen.plugins.ask("ds_charts", config=chosen.config, plugins=chosen.plugins)
        return [chart for answer in answers for chart in answer.value]

    def test_there_is_a_chart(self) -> None:
        """At least one, and the same when asked again."""
        found = self.charts()
        assert found, f"there is no chart; is the plugin's section in {type(self).__name__}.config?"
        assert self.charts() == found, "another answer when asked again; draw from the config alone"

    def test_names_are_of_files(self) -> None:
        """`name` becomes ``FOLDER/name.svg``: letters, digits, dashes; no two are alike."""
        names = [chart.name for chart in self.charts()]
        for name in names:
            plain = name.replace("-", "").replace("_", "").replace(".", "")
            assert plain.isalnum() and plain.isascii() and name[0] != ".", (
                f"the name {name!r} cannot be a file's"
            )
        assert len({name.lower() for name in names}) == len(names), f"names are used twice: {names}"

    def test_it_has_words(self) -> None:
        """Title and text say it without the drawing, to terminals and to those who do not see
        it."""
        for chart in self.charts():
            assert chart.title.strip() and chart.text.strip(), (
                f"{chart.name}: give a title and a text"
            )

    def test_drawings_stand_on_their_own(self) -> None:
        """An SVG document of its own: well-formed, with its namespace, no script and nothing from
        elsewhere.
        """
        for chart in self.charts():
            if chart.svg is None:
                continue
            try:
                root = ElementTree.fromstring(chart.svg)
            except ElementTree.ParseError as error:
                raise AssertionError(
                    f"{chart.name}: the drawing is not well-formed XML: {error}"
                ) from error
            assert root.tag == SVG, (
                f'{chart.name}: the root is {root.tag}; write <svg xmlns="{SVG[1:-4]}" ...>'
            )
            for element in root.iter():
                assert not element.tag.endswith("}script"), (
                    f"{chart.name}: a drawing runs nothing; remove <script>"
                )
                for key, value in element.attrib.items():
                    outside = key.endswith("href") and not value.startswith(("#", "data:"))
                    assert not outside, (
                        f"{chart.name}: {value} lies elsewhere; put it into the drawing"
                    )

    def test_no_torch_is_loaded(self) -> None:
        """``dscore plan`` asks before it knows that torch is needed."""
        _asks_without_torch(_loading(self.config, self.load), "ds_charts")


def _loading(config: Mapping[str, Any], load: tuple[str, ...]) -> dict[str, Any]:
    return (
        {**config, "plugins": {**config.get("plugins", {}), "load": list(load)}}
        if load
        else dict(config)
    )


def _asks_without_torch(config: dict[str, Any], hook: str) -> None:
    command = [sys.executable, "-c", ASK, json.dumps(sys.path), json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    assert done.returncode == 0, (
        f"{hook} imports torch; calculate without it, or import it where it is needed"
    )
