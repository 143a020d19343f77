"""Where checkpoints are kept: the contract, the disk, and how a place is found by its address."""
