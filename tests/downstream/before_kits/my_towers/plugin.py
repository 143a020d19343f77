from ds_core.entries import Axis


def ds_config():
    from pydantic import Field

    from ds_core.config import Section

    class MyTowers(Section):
        size: int = Field(1, ge=1, description="How many ranks have towers of their own.")

    return MyTowers


def ds_mesh_axes(config):
    return [Axis("towers", config.section("my_towers").size, inside="dp")]


def ds_param_axes(name):
    return ["towers"] if "tower." in name else []
