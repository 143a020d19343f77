"""A third party's precision mode: linear layers compute with weights and inputs that e4m3 can
hold."""


def ds_config():
    from pydantic import Field

    from ds_core.config import Section

    class Float8(Section):
        skip: list[str] = Field([], description="Names of linear layers that stay as they are.")

    return Float8


def ds_precision(config, base):
    from dataclasses import replace
    from functools import partial

    from float8.linear import convert

    skip = config.section("float8").skip
    return replace(
        base,
        name=f"{base.name} with float8 e4m3 but for {skip}",
        convert=partial(convert, skip=skip),
    )
