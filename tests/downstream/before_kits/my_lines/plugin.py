def ds_config():
    from pydantic import Field

    from ds_core.config import Section

    class MyLines(Section):
        file: str = Field(description="The file that gets one line of JSON per event.")

    return MyLines


def ds_monitors(ctx):
    from my_lines.monitor import LineMonitor

    return [LineMonitor(ctx.config.section("my_lines").file)]
