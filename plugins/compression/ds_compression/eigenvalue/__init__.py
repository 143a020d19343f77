"""How much the loss bends along each block."""
