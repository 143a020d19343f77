"""``dscore run --launcher slurm``: one agent per node of a Slurm allocation, started with srun."""
