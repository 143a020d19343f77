"""Models that are sharded while they are built."""
