"""Count the bytes of text that predicted tokens stand for: all but those of tokens that nothing predicts."""

from __future__ import annotations

from tokenizers import Tokenizer

from jaxdist.data.readers.reader import Document
from jaxdist.huggingface.given_tokenizer import encode, ids_of
from jaxdist.huggingface.special_tokens import SpecialTokens


class TextBytes:
    """Counts the bytes of the documents of a file of which every token is predicted that has one in front of it.

    With `apart`, no document has the one before it in front.
    """

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens, apart: bool):
        self._tokenizer = tokenizer
        self._special = special
        self._bos = self._name(special.bos)
        self._eos = self._name(special.eos)
        # With a BOS token, that one predicts the first of the text; so does the end of the document before, unless it
        # is kept apart.
        self._first_alone = special.bos is None and special.eos is None
        self._each_alone = special.bos is None and apart

    def of(self, document: Document, first: bool) -> int:
        """Return the bytes of a document, which is the `first` of its file or not."""
        uncounted = self._delimiters(document)
        if document.begins and (self._each_alone or (self._first_alone and first)):
            uncounted += self._bytes_of_first_token(document.text)
        return max(0, len(document.text.encode()) - uncounted)

    def _delimiters(self, document: Document) -> int:
        """Return the bytes of the BOS and the EOS that a document has as text."""
        begins = document.begins and self._bos != "" and document.text.startswith(self._bos)
        ends = document.ends and self._eos != "" and document.text.endswith(self._eos)
        if not begins and not ends:
            return 0
        ids = ids_of(self._tokenizer, document.text)
        size = 0
        if self._special.has_own(ids, begins, ends=False):
            size += len(self._bos.encode())
        if self._special.has_own(ids, begins=False, ends=ends):
            size += len(self._eos.encode())
        return size

    def _name(self, token: int | None) -> str:
        """Return a token as text; an empty one where there is none."""
        return "" if token is None else self._tokenizer.id_to_token(token) or ""

    def _bytes_of_first_token(self, text: str) -> int:
        """Return the bytes of a text before the character where its second token begins."""
        offsets = encode(self._tokenizer, text).offsets
        end = offsets[1][0] if len(offsets) > 1 else len(text)
        return len(text[:end].encode())
