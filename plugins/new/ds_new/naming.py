"""The name of a new plugin: what it is called as distribution, package and class, and whether it is
free.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass

from ds_command_kit.show import CommandError

from ds_core.catalogue import documented, offered_by
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import HOOKS, discover


@dataclass(frozen=True, slots=True)
class Names:
    """A name in its forms: ``my-lines`` is pip's, ``my_lines`` Python's and the config's,
    ``MyLines`` a class.
    """

    name: str
    package: str
    cls: str


def names_of(name: str, kind: str = "") -> Names:
    """The forms of `name`.

    Raises CommandError for one that cannot be used, and says why and what could.

    kind: of `KINDS`; what configs and commands name it by must be free too.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_.][A-Za-z0-9]+)*", name):
        # Suggest the closest valid name: the letters and digits that were given.
        words = "-".join(re.findall(r"[a-z0-9]+", name.lower())).lstrip("-0123456789")
        fix = f"; {words!r} would do" if words else ""
        raise CommandError(
            f"{name!r} is no name for a plugin: letters and digits, with single dashes between, "
            f"and a letter first{fix}"
        )
    made = forms_of(name)
    if why := _taken(made) or _offered(made, kind):
        other = f"{made.name}-2" if made.name.startswith("my-") else f"my-{made.name}"
        raise CommandError(
            f"{name!r} cannot be used: {why}; choose another name, such as {other!r}"
        )
    return made


def forms_of(name: str) -> Names:
    """The forms of a name, free or not."""
    dist = re.sub(r"[-_.]+", "-", name).lower()
    return Names(
        dist, dist.replace("-", "_"), "".join(part.capitalize() for part in dist.split("-"))
    )


def _taken(names: Names) -> str:
    """Why a name is not free; "" when it is."""
    if keyword.iskeyword(names.package):
        return f"{names.package!r} is a word of Python"
    if names.package in sys.stdlib_module_names:
        return f"{names.package!r} is a module of Python's standard library"
    for found in discover():
        if (
            names.package in (found.name, found.module.partition(".")[0])
            or names.name == found.dist
        ):
            return f"{found.owner} is installed and has the plugin {found.name!r}"
    if names.package in documented():
        return f"{names.package!r} is a section of ds_core's documents"
    if names.package in _core_keys():
        return f"{names.package!r} is a key of the core's config"
    # The last check, as it also finds what the checks above explain better.
    if importlib.util.find_spec(names.package) is not None:
        return f"a package {names.package!r} can be imported here, and the new one would hide it"
    return ""


BY_NAME = {
    "collectives": "ds_collectives",
    "command": "ds_commands",
    "compile-pass": "ds_compile_passes",
    "launcher": "ds_launchers",
    "optimizer": "ds_optimizers",
    "pipeline-schedule": "ds_pipeline_schedules",
    "scheduler": "ds_schedulers",
    "state-store": "ds_state_stores",
}
"""The kinds whose plugins are chosen by a name, and the hook by which they offer it."""


def _offered(names: Names, kind: str) -> str:
    """Who offers something of this kind by the name already; "" where nobody does."""
    hook = BY_NAME.get(kind)
    if hook is None:
        return ""
    what = hook.removeprefix("ds_")
    # Templates offer what they make under the package's name or the class's; case does not count.
    given = {names.package, names.cls.lower()}
    offers = Plugins().named(hook, what) if hook in HOOKS else {}
    for name, answer in offers.items():
        if name in given:
            return f"the {kind} {name!r} is {answer.plugin.dist}'s"
    for name in sorted(given):
        if dist := offered_by(what, name):
            return f"the {kind} {name!r} is {dist}'s"
    return ""


def _core_keys() -> frozenset[str]:
    from ds_core.config.core import CORE_KEYS

    return CORE_KEYS
