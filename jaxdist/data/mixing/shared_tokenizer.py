"""Train one tokenizer on the texts of several sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.sources import Sources
from jaxdist.data.token_cache import open_cache
from jaxdist.data.tokenizing.encoder import TOKENIZER, train_tokenizer
from jaxdist.data.tokenizing.token_store import kept_tokenizer
from jaxdist.files import digest, write_whole
from jaxdist.files.caches import cache_folder
from jaxdist.huggingface.given_tokenizer import GivenTokenizer

VERSION = 1
"""Version of the tokenizers in the cache; increase it when the same texts would give another one."""


def shared_tokenizer(texts: Iterable[Sources], vocab: int, progress: Progress) -> GivenTokenizer:
    """Return a byte-level BPE that is trained at the first call, and later read from the cache.

    Its sample is every n-th training document of all texts, one text after another: of a larger text it has more,
    whatever the weights are, so that other weights do not need another tokenizer. Neither the names of the texts nor
    their order matter. Raises `RequestError` if a text changes meanwhile.
    """
    texts = list(texts)
    size = sum(text.size for text in texts)
    reading = Pass(progress, "reading the data", size)
    stamps = [text.stamp() for text in texts]
    contents = [text.digest(reading.read) for text in texts]
    ordered = [texts[place] for place in sorted(range(len(texts)), key=contents.__getitem__)]

    def fill(new: Path) -> dict[str, int]:
        sampling = Pass(progress, "reading text for the tokenizer", size)
        documents = itertools.chain.from_iterable(text.split(sampling.read) for text in ordered)
        training = sum(text.training.text_size for text in ordered)
        write_whole(new / TOKENIZER, train_tokenizer(documents, training, vocab))
        for text, stamp in zip(texts, stamps, strict=True):
            if text.stamp() != stamp:
                raise RequestError(f"'{text.name}' changed while it was read; start again when it is complete")
        return {}

    folder = cache_folder() / digest("shared tokenizer", VERSION, vocab, *sorted(contents))
    open_cache(folder, fill, progress)
    return kept_tokenizer(folder)
