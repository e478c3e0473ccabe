"""Read the prompts of a file, and the texts that end a continuation."""

from __future__ import annotations

import json
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.files import open_regular

LARGEST = 1 << 28
"""Bytes of the largest file of prompts that is read."""


def stop_texts(text: str) -> tuple[str, ...]:
    r"""Return the texts of `--stop`: the text itself, or several as a JSON list, such as `["\n", "User:"]`.

    Raises `ValueError` for a list that is no JSON, and for a text that is empty.
    """
    texts = [text]
    if text.startswith("["):
        try:
            texts = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError('a text that begins with [ is a JSON list of texts, such as ["[end]", "\\n"]') from None
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise ValueError("each text that ends a continuation must have at least one character")
    return tuple(texts)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or of a .jsonl the `prompt` of each line. Raises `RequestError`."""
    try:
        with open_regular(path, links=True) as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise RequestError(f"--prompts '{path}' cannot be read: {(error.strerror or str(error)).lower()}") from error
    if len(content) > LARGEST:
        raise RequestError(f"--prompts '{path}' is larger than {LARGEST >> 20} MiB; split it")
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompts '{path}' is not UTF-8 text; convert it") from error
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise RequestError(f"--prompts '{path}' holds no prompt; write one a line")
    if path.suffix == ".jsonl":
        return [_of_json(path, number, line) for number, line in numbered]
    return [line for _, line in numbered]


def _of_json(path: Path, number: int, line: str) -> str:
    """Return the `prompt` of a line of JSON."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, RecursionError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise RequestError(
            f"--prompts '{path}' line {number} is not a JSON object with the text of a prompt; "
            f'write {{"prompt": "..."}}'
        )
    return prompt
