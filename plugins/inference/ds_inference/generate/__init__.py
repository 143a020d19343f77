"""From requests to tokens."""
