"""ZeRO for ds_core: model states partitioned over the ranks that would hold the same ones."""
