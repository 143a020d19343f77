"""A checkpointer that keeps checkpoints in the layout of torch.distributed.checkpoint (DCP): section ``dcp``."""


def ds_config():
    from ds_core.config import Section

    class Dcp(Section):
        """It has no keys."""

    return Dcp


def ds_checkpointer(ctx):
    from dcp_checkpointer import DcpCheckpointer

    return DcpCheckpointer()
