"""What dscore-rendezvous offers to ds_core (torch-free)."""

from __future__ import annotations

from ds_core.entries import RendezvousEntry

RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK")
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
)


def ds_rendezvous() -> RendezvousEntry:
    """Jobs of MPI, Slurm, SageMaker and AzureML; ranks compare notes at rank 0's store."""
    return RendezvousEntry(
        "ds_rendezvous.jobs:find", "ds_rendezvous.jobs:open_store", (*RANKS, *LOCAL_RANKS)
    )
