"""dscore-data-sampling: which samples a ds_core run sees, in which order and in which batches, for all
ranks together.
"""
