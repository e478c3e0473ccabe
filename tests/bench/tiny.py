"""What several tests of `bench gpu` need."""

TINY = """
[model]
family = "llama"
layers = 3
embed = 32
heads = 4
kv_heads = 2
mlp = 48
vocab = 300
sequence = 32
"""


def last(found):
    """What a part has found in the end."""
    return list(found)[-1]
