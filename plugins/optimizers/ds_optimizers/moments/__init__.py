"""Optimizers with other moments than Adam's: of rows, of orthogonalised updates, and averages."""
