"""A kit of somebody else, with a hook of its own."""
