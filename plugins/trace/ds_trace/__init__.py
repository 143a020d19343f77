"""dscore-trace: torch.profiler on chosen steps of a ds_core run, and where those steps went."""
