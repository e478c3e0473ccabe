"""Several sources, mixed by weight."""
