"""The optimizer table: update rules and learning-rate schedules, each with what requests and predictions ask of it.

Requests read it, and answer in a moment: no file of this room imports jax or optax before a function needs it.
"""
