"""Which layers of a model are divided, and where each is cut."""
