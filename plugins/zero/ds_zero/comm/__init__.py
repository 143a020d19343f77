"""How the weights and gradients of a bucket cross ranks."""
