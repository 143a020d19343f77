"""Sequence parallelism for ds_core: ranks along the mesh axis ``sp`` divide every sequence among them."""
