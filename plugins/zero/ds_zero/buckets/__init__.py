"""Parameters in flat buffers, and their states by name."""
