def ds_config():
    from ds_core.config import Section

    class Plain(Section):
        """It has no keys."""

    return Plain


def ds_partitioner(ctx):
    from my_plain.plain_partitioner import PlainPartitioner

    return PlainPartitioner(ctx)
