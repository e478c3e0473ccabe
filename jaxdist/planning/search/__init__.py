"""Search for the best way to split a training step over a cluster.

All legal candidates are estimated roughly, and the best of these are predicted exactly and ranked.
"""
