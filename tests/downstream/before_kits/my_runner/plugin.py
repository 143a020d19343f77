def ds_config():
    from ds_core.config import Section

    class MyRunner(Section):
        """It has no keys."""

    return MyRunner


def ds_runner(ctx):
    from my_runner.runner import PulledFirst

    return PulledFirst()
