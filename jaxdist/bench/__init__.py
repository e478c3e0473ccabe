"""Measurements of train steps, of how they scale, and of the hardware below them."""
