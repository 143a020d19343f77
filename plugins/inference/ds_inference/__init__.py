"""Inference: trained models answer, through programs of ds-inference-kit where their family is known."""
