"""States that rest in a store: on the host, or on a disk."""
