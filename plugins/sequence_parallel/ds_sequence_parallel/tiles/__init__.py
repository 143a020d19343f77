"""Layers, losses and activations whose memory is that of one tile."""
