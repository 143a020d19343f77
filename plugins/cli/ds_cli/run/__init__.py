"""``dscore run``: from its words to a launcher."""
