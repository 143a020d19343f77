"""A hook with an argument that the hook does not have."""


def ds_step_end(ctx, step, colour):
    """`colour` is no argument of ds_step_end."""
