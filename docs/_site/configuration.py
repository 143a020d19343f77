"""The configuration reference: every key of every section, from the pydantic models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

HEAD = """# Configuration reference

Every key of a config, as the installed packages define it. `dscore config explain KEY` says the same in a terminal, and
`dscore config schema` prints all of it as JSON Schema for editors. How files are read and checked:
[Configuration](../configuration.md).
"""


def configuration_pages() -> dict[str, str]:
    """One page for the core's keys, one for each section, one for optimizers and schedules, and a
    list of all.
    """
    from ds_cli.config.command import _installed_models, _named_models

    from ds_core.config.core import CoreConfig

    models = _installed_models()
    pages = {"config/core.md": core_page(CoreConfig, models)}
    singles = [name for name in sorted(models) if "root" in models[name][0].model_fields]
    pages["config/single-keys.md"] = singles_page({name: models[name] for name in singles})
    rows = [f"| [top-level keys](config/core.md) | `dscore-train` | {_plain(about(CoreConfig))} |"]
    for name in sorted(models):
        model, owner = models[name]
        page = "single-keys" if name in singles else name
        if name not in singles:
            pages[f"config/{name}.md"] = section_page(name, models)
        rows.append(
            f"| [`{name}`](config/{page}.md) | `{owner.split()[0]}` | {_plain(about(model))} |"
        )
    for kind, what in (("optimizer", "Optimizers"), ("scheduler", "Schedules")):
        pages[f"config/{kind}-params.md"] = params_page(what, kind, _named_models()[kind])
    toc = "\n".join(path.removesuffix(".md") for path in pages)
    parts = [
        HEAD,
        "## Sections\n\n| section | package | what it is |\n| --- | --- | --- |\n"
        + "\n".join(rows),
        "## Parameters by name\n\n- [`optimizer.params`](config/optimizer-params.md), by "
        "`optimizer.type`\n"
        "- [`scheduler.params`](config/scheduler-params.md), by `scheduler.type`",
        f"## Documented by DeepSpeed, not offered\n\n{not_offered(models)}",
        f"```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
    ]
    return {"configuration.md": "\n\n".join(parts), **pages}


def about(model: type) -> str:
    """The first paragraph of a model's docstring."""
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


def _option(text: str) -> str:
    """As the value of an option, where a quote at the beginning would be taken for one of the whole
    value.
    """
    plain = _plain(text)
    return "'" + plain.replace("'", "''") + "'" if plain.startswith('"') else plain


def core_page(core: type, models: dict) -> str:
    """The keys that the core owns, sections among them."""
    parts = ["# Top-level keys", "Keys of the core, which is always there: package `dscore-train`."]
    return "\n\n".join([*parts, *entries(core, "", models)]) + "\n"


def section_page(name: str, models: dict) -> str:
    """One section and all keys below it."""
    model, owner = models[name]
    parts = [f"# {name}", _plain(about(model)), f"Package: `{owner.split()[0]}`."]
    return (
        "\n\n".join([*parts, *(list(entries(model, name, models)) or ["It has no keys."])]) + "\n"
    )


def singles_page(models: dict) -> str:
    """The keys of packages whose value is no object."""
    parts = ["# Single keys", "Top-level keys that belong to a package and have one value."]
    for name, (model, owner) in models.items():
        default = model.model_fields["root"].default
        lines = [f"```{{confval}} {name}", f":type: {_option(_type_of(model))}"]
        lines += [f":default: `{json.dumps(default)}`"] if isinstance(default, (int, str)) else []
        parts.append(
            "\n".join([*lines, "", f"{_plain(about(model))} Package: `{owner.split()[0]}`.", "```"])
        )
    return "\n\n".join(parts) + "\n"


def params_page(what: str, kind: str, named: dict) -> str:
    """The parameters of every name that `kind` can have."""
    from ds_cli.config.explanation import explain

    from ds_core.config.keys import iter_keys

    parts = [
        f"# {what}",
        f"What `{kind}.params` takes, by `{kind}.type`. Names are case-insensitive.",
    ]
    for name, (model, owner) in sorted(named.items()):
        parts += [f"## {name}", _plain(about(model)), f"Package: `{owner.split()[0]}`."]
        rows = []
        for key in iter_keys(model):
            if key.path != key.name:
                continue
            said = explain(f"{kind}.params.{key.path}", {}, {kind: {name: (model, owner)}})
            rows.append(
                f"| `{key.path}` | {_plain(said.type)} | {_code(said.default)} | "
                f"{_plain(said.description)} |"
            )
        parts.append(
            "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def entries(model: type, prefix: str, models: dict) -> Iterator[str]:
    """Every key of `model` as a `confval`, in the order of the model; other spellings are told with
    the key.
    """
    from ds_cli.config.explanation import explain

    from ds_core.config.keys import iter_keys

    seen = set()
    for key in iter_keys(model, prefix):
        ours = all(part.strip("[]*") for part in key.path.split("."))
        if key.spelling != key.name or key.path in seen or not ours:
            continue
        seen.add(key.path)
        said = explain(key.path, models)
        default = "absent" if said.keys and said.default.startswith(("{", "null")) else said.default
        options = f":type: {_option(said.type)}\n:default: {_code(default)}"
        text = _plain(said.description) or "See the key's section."
        yield f"```{{confval}} {key.path}\n{options}\n\n{text}\n```"


def _code(value: str) -> str:
    return value if value in ("required", "computed", "absent") else f"`{value}`"


def _type_of(model: type) -> str:
    from ds_core.config.translate import describe

    field = model.model_fields["root"]
    hint: Any = field.annotation
    for extra in field.metadata:
        hint = Annotated[hint, extra]
    return describe(hint) or "any value"


def not_offered(models: dict) -> str:
    """The documented sections that no package serves, each with the reason and what to use."""
    from ds_core.catalogue import documented

    rows = []
    for name, row in sorted(documented().items()):
        if name not in models and row["owner"] not in {
            owner.split()[0] for _, owner in models.values()
        } | {"dscore-train"}:
            rows.append(f"| `{name}` | {row['why']} |")
    head = "Such a section is accepted while it is switched off. Switched on, it is an error.\n\n"
    return head + "\n".join(["| section | why |", "| --- | --- |", *rows])
