"""Families with latent attention (MLA)."""
