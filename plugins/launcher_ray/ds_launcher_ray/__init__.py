"""``dscore run --launcher ray``: one agent per node of a running Ray cluster."""
