"""From an order of samples to micro-batches."""
