"""Claims a section and does not describe it."""
