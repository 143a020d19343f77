"""A misspelt hook."""


def ds_step_ends(ctx):
    """There is no such hook."""
