def install() -> None:
    """Let ``import deepspeed`` give ds_core in this process from now on; installing twice does
    nothing.

    Call it before anything imports deepspeed or a framework that looks for it (transformers,
    accelerate).
    """

def main() -> None:
    """Run the script or module that the command line names, with ``import deepspeed`` given by
    ds_core.
    """
