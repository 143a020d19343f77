"""``dscore run --launcher openmpi``: one agent per host of a hostfile, started with Open MPI's
mpirun.
"""
