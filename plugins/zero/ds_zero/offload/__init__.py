"""States that are kept in a store: on the host, or on a disk."""
