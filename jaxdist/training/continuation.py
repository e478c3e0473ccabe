"""A text that grows token by token: what of it can be shown meanwhile, and what ends it. Nothing here knows a model.

Tokens are no characters. One character may come as several tokens, and a text that would end the continuation may be
about to be written; both are held back until they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What stands at the end of a decoded text for the bytes of a character that is not complete."""

STOP_TOKEN = "stop token"
STOP_TEXT = "stop text"
TOKENS = "tokens"
SEQUENCE = "sequence"


@dataclass(frozen=True)
class Ending:
    """What ends a continuation."""

    tokens: int
    """The requested number of tokens has been drawn."""
    sequence: int
    """Prompt and continuation together are as long as the model can see."""
    stops: tuple[int, ...] = ()
    """One of these tokens is drawn; it is no part of the text."""
    stop_texts: tuple[str, ...] = ()
    """One of these texts is written; the continuation ends before it."""


class TextStream:
    """Decodes tokens one by one. The texts that it returns are together that of all tokens."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]):
        """`context` are the tokens before: whether a word begins with a space may depend on them."""
        self._tokenizer = tokenizer
        self._ids = list(context)
        # Tokens from `_begin` to `_shown` have been returned; they are decoded again as the context of the next ones.
        self._begin = 0
        self._shown = len(context)

    def add(self, token: int) -> str:
        """Add a token and return the text that is complete with it, which is empty within a character."""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._begin = self._shown
        self._shown = len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text of the tokens that have not been returned: a character that stays incomplete."""
        text = self._new_text()
        self._shown = len(self._ids)
        return text

    def _new_text(self) -> str:
        context = self._tokenizer.decode(self._ids[self._begin : self._shown])
        whole = self._tokenizer.decode(self._ids[self._begin :])
        return whole[len(context) :]


class Continuation:
    """A text that grows token by token behind a prompt, until something ends it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], ending: Ending, answers: bool = False):
        """Begin a text behind the tokens of `prompt`; one that `answers` does not go on with its last word."""
        self.prompt = prompt
        self.ids: list[int] = []
        """The tokens drawn, without the one that ended the text."""
        self.text = ""
        """The text so far, as far as it can be shown: it grows only at its end."""
        self.ended: str | None = None
        """Why it ended: `STOP_TOKEN`, `STOP_TEXT`, `TOKENS` or `SEQUENCE`. None while it grows."""
        self.ending = ending
        self._stream = TextStream(tokenizer, () if answers else prompt)
        self._held = ""

    def add(self, token: int) -> str:
        """Add a token that was drawn, and return the text that can be shown now behind what was shown before."""
        assert self.ended is None
        if token in self.ending.stops:
            return self._end(STOP_TOKEN)
        self.ids.append(token)
        self._held += self._stream.add(token)
        if self._cut_before_stop():
            self.ended = STOP_TEXT
            return self._show(len(self._held))
        if len(self.ids) == self.ending.tokens:
            return self._end(TOKENS)
        if len(self.prompt) + len(self.ids) == self.ending.sequence:
            return self._end(SEQUENCE)
        return self._show(len(self._held) - self._begun_stop())

    def _cut_before_stop(self) -> bool:
        """Drop the first stop text and all after it. Return whether there is one."""
        places = [self._held.find(stop) for stop in self.ending.stop_texts]
        found = [place for place in places if place >= 0]
        if found:
            self._held = self._held[: min(found)]
        return bool(found)

    def _begun_stop(self) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        longest = 0
        for stop in self.ending.stop_texts:
            for length in range(longest + 1, len(stop)):
                if self._held.endswith(stop[:length]):
                    longest = length
        return longest

    def _end(self, why: str) -> str:
        """End the text, and return all that was held back."""
        self.ended = why
        self._held += self._stream.rest()
        return self._show(len(self._held))

    def _show(self, length: int) -> str:
        """Add the first `count` characters held back to the text, and return them."""
        shown = self._held[:length]
        self._held = self._held[length:]
        self.text += shown
        return shown
