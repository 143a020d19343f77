"""``dscore run --launcher mpich`` (or impi, mvapich): one agent per host of a hostfile, started
with Hydra.
"""
