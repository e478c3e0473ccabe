"""Conversations, and the folder of a tokenizer with a chat template."""

import json
import random
from pathlib import Path

from tests.data.chats.test_golden_chats import GOLDEN, TOKENIZERS

WORDS = ["the", "loss", "of", "one", "device", "is", "every", "mesh", "and", "2", "x", "1"]


def tokenizer_folder(to: Path, template: str = "chatml") -> Path:
    """Make the folder of a tokenizer with one of the golden templates, or with none."""
    to.mkdir()
    (to / "tokenizer.json").write_text((TOKENIZERS / "qwen" / "tokenizer.json").read_text())
    config = {"eos_token": "<|im_end|>"}
    if template:
        config["chat_template"] = (GOLDEN / "templates" / f"{template}.jinja").read_text()
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


def conversations(count: int, turns: int = 3, words: int = 8, seed: int = 0) -> list[dict]:
    """Rows of messages, of 1 to `turns` answers."""
    draws = random.Random(seed)

    def text() -> str:
        return " ".join(draws.choice(WORDS) for _ in range(draws.randint(1, words)))

    rows = []
    for _ in range(count):
        messages = []
        for _ in range(draws.randint(1, turns)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        rows.append({"messages": messages})
    return rows


def json_lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
