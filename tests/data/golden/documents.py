"""What every golden file holds, and what the test expects of it."""

import random

END = 300
"""The token that ends a document, after the 300 of `tests.data.files.save_tokenizer`."""

DOCUMENTS = [random.Random(number).choices(range(299), k=3 + 5 * number) for number in range(10)]
"""Ids. In texts id 7 is the word w7."""

HELD_OUT = [random.Random(-number).choices(range(299), k=20) for number in range(1, 4)]
"""The documents of a part for validation."""


def texts(documents: list[list[int]]) -> list[str]:
    return [" ".join(f"w{number}" for number in document) for document in documents]


def stream(documents: list[list[int]]) -> list[int]:
    return [number for document in documents for number in (*document, END)]
