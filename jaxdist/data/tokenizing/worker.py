"""Tokenize pieces in a process of its own: `python -m jaxdist.data.tokenizing.worker FOLDER`.

Their numbers come from standard input, a line each.
It writes a line of JSON on stdout for what it has read, for each piece that is written, and for a reason to refuse the
text. It ends when its standard input does, so that none outlives the process that has started it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from jaxdist.config import RequestError
from jaxdist.data.tokenizing.encoder import TOKENIZER, Encoder
from jaxdist.data.tokenizing.pieces import Plan
from jaxdist.files.json_files import LARGEST_LISTING, read_text
from jaxdist.huggingface.given_tokenizer import load_tokenizer

TELL_SECONDS = 0.5
"""Seconds between two lines about what was read."""

READ, WRITTEN, REFUSED = "read", "written", "refused"
"""What lines are about: bytes that were read; the number of a piece; sentences."""


def main(folder: Path) -> None:
    """Write the pieces whose numbers come in, one after another."""
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, numbers), daemon=True).start()
    telling = _Telling()
    try:
        plan = Plan.read(folder)
        tokenizer = load_tokenizer(read_text(folder / TOKENIZER, LARGEST_LISTING, links=False))
        encoder = Encoder(folder, plan, tokenizer)
        while True:
            piece = numbers.get()
            encoder.write(piece, telling.read)
            telling.flush()
            _tell(WRITTEN, piece)
    except RequestError as error:
        _tell(REFUSED, error.problems)


class _Telling:
    """Tells how much was read, now and then."""

    def __init__(self) -> None:
        self._bytes = 0
        self._told_at = time.monotonic()

    def read(self, count: int) -> None:
        """Note that so many bytes were read."""
        self._bytes += count
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Tell it now."""
        _tell(READ, self._bytes)
        self._bytes = 0
        self._told_at = time.monotonic()


def _listen(lines: TextIO, numbers: queue.SimpleQueue[int]) -> None:
    for line in lines:
        numbers.put(int(line))
    # Also in the middle of a piece: the process that has started this one has ended.
    os._exit(0)


def _tell(what: str, content: int | list[str]) -> None:
    print(json.dumps({what: content}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
