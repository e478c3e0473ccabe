"""Continue prompts with a run's weights: turn texts into tokens, and the tokens that are drawn into texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from jaxdist.config import RequestError
from jaxdist.huggingface.chat_template import ChatTemplate, Message
from jaxdist.huggingface.given_tokenizer import ids_of
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.request.knobs import shown
from jaxdist.training.continuation import Continuation, Ending
from jaxdist.training.decoding import Choice, Decoding


class Prompter:
    """Turns texts into prompts, which are tokens, and begins the texts behind them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: SpecialTokens,
        ending: Ending,
        template: ChatTemplate | None = None,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ):
        """With a `template`, the model answers texts instead of continuing them; `system` says how.

        `variables` are further ones of the template, such as `enable_thinking`.
        """
        self._tokenizer = tokenizer
        self._special = special
        self._ending = ending
        self._template = template
        self._variables = variables or {}
        self.own = 0
        """Prompts so far that begin with the BOS as text."""
        self.opening: list[Message] = []
        """The messages before the user's."""
        if system is not None:
            self.opening = [{"role": "system", "content": system}]

    def of_text(self, text: str) -> list[int]:
        """Return the tokens of a text. A BOS stands before it as before the documents of training.

        Raises `RequestError` where they leave no room for more.
        """
        if self._template:
            return self.of_messages([*self.opening, {"role": "user", "content": text}])
        ids = self._encode(text)
        self.own += self._special.has_own(ids)
        return self._checked(self._special.around(ids), f"prompt {shown(text)}")

    def of_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, whose BOS the template writes. Raises `RequestError` as `of_text`."""
        assert self._template is not None
        return self._checked(self._encode(self._template.render(messages, **self._variables)), "conversation")

    def note(self) -> str | None:
        """Return a sentence about how prompts were read, if there is one to tell."""
        return self._special.own_note(self._tokenizer, self.own, "prompt") if self.own else None

    def begin(self, prompt: Sequence[int]) -> Continuation:
        """Return the text behind a prompt, which is empty so far."""
        return Continuation(self._tokenizer, prompt, self._ending, answers=self._template is not None)

    def _encode(self, text: str) -> list[int]:
        return ids_of(self._tokenizer, text)

    def _checked(self, ids: list[int], what: str) -> list[int]:
        if len(ids) >= self._ending.sequence:
            raise RequestError(
                f"the {what} has {len(ids)} tokens, and model.sequence {self._ending.sequence} leaves no room to "
                f"continue it; shorten it"
            )
        return ids


class Writer:
    """Draws the tokens of continuations, on all devices of the mesh."""

    def __init__(self, decoding: Decoding, choice: Choice, seed: int, moving: Callable[[], object]):
        """Draw with these weights; `moving` is called before each token, as a sign of life."""
        self._decoding = decoding
        self._choice = choice
        self._seed = seed
        self._moving = moving

    def write(
        self, texts: Sequence[Continuation], show: Callable[[str], object] = lambda text: None, turn: int = 0
    ) -> None:
        """Continue the texts until each has ended; `show` gets what can be shown of a text as it comes.

        What is drawn depends on the seed, the place of the text and the `turn` of a conversation. All processes must
        call this alike, and all have the texts afterwards.
        """
        prompts = [text.prompt for text in texts]
        seed = (self._seed + turn) % 2**32
        most = max(text.ending.tokens for text in texts)
        for tokens in self._decoding.draw(prompts, self._choice, seed, self._moving, most):
            for text, token in zip(texts, tokens, strict=True):
                if not text.ended:
                    show(text.add(int(token)))
            if all(text.ended for text in texts):
                return
