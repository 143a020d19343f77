"""Checkpoints in the memory of neighbouring hosts.

Every few steps each rank's states are copied to memory that outlives its process, and to that of
other hosts. A run that is started again by its launcher goes on from there; see docs/checkpoints.md.
"""
