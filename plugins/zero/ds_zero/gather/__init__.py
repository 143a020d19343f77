"""Stage 3: which weights are gathered when, and who may touch one outside of that."""
