"""Rows of data as documents that are conversations: with what is learned of them where there is a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.data.chats.forms import (
    FORMS,
    PREFERENCE,
    Conversation,
    Form,
    called_tools,
    conversation_of,
    form_by_keys,
)
from jaxdist.data.chats.rendering import Rendered, Renderer
from jaxdist.data.readers.reader import Document, named_keys


class Conversations(NamedTuple):
    """Makes documents of rows of a form (`WholeRows`)."""

    form: str
    """Its name in `FORMS`."""
    renderer: Renderer | None = None
    """None where there is no tokenizer: then a document is the turns one after another, for a look."""

    @classmethod
    def of_json(cls, found: list[Any] | None) -> Conversations | None:
        """Return what JSON has kept."""
        if found is None:
            return None
        form, renderer = found
        if renderer is None:
            return cls(form)
        template, folder, names, special, *others = renderer
        return cls(form, Renderer(template, folder, tuple(map(tuple, names)), tuple(special), *others))

    def keys(self, present: Iterable[str]) -> list[str]:
        """Return those of the keys of a file that are read. Raises `ValueError` with what is wrong with them."""
        there = set(present)
        missing = [key for key in self._form.needed if key not in there]
        if missing:
            raise ValueError(
                f'the keys {named_keys(there)}, and no "{missing[0]}" as data.form {self.form} has; name another form'
            )
        return [key for key in (*self._form.needed, *self._form.more) if key in there]

    def document(self, row: Mapping[str, Any], where: object) -> Document | None:
        """Return the conversation of a row. Raises `RequestError` where none, or nothing of it, can be learned."""
        try:
            conversation = conversation_of(row, self._form)
        except ValueError as error:
            raise RequestError(f"{where} has {error} (data.form {self.form}){self._remedy(row)}") from error
        if self.renderer is None:
            return Document(conversation.transcript(), True)
        try:
            rows = self.renderer.rows(conversation)
        except ValueError as error:
            raise RequestError(
                f"{where} has a conversation that the chat template of '{self.renderer.folder}' does not make to learn "
                f"from: {error}; correct the row"
            ) from error
        text = "".join(row.text for row in rows)
        return Document(
            text,
            True,
            rows=tuple(rows),
            forged=self._forged(conversation),
            pair=conversation.rejected is not None,
            continued=conversation.continued is not None,
            uncalled=self.renderer.learn == "assistant" and _lacks_call(conversation, rows),
        )

    @property
    def pairs(self) -> bool:
        """Whether each row is a pair of a better and a worse answer."""
        return self.form == PREFERENCE

    @property
    def may_be_texts(self) -> bool:
        """Whether rows may hold texts that no template turns into messages."""
        return self.form in ("prompt", PREFERENCE)

    @property
    def noun(self) -> str:
        """What a row is called."""
        return "pair" if self.pairs else "conversation"

    @property
    def _form(self) -> Form:
        return FORMS[self.form]

    def _remedy(self, row: Mapping[str, Any]) -> str:
        """Return of which other form a row is that lacks a key of this one, if it is of any, and what to do."""
        there = {key for key, value in row.items() if value is not None}
        other = "text" if TEXT in there else form_by_keys(there)
        if other in ("", self.form) or there.issuperset(self._form.needed):
            return "; correct the row"
        return f", but the keys of data.form {other}; write all rows in one form"

    def _forged(self, conversation: Conversation) -> bool:
        """Return whether a text that is not the assistant's has a special token, and could end its own turn."""
        assert self.renderer
        given = [message["content"] for message in conversation.messages if message["role"] != "assistant"]
        return any(token in text for text in given for token in self.renderer.special)


def _lacks_call(conversation: Conversation, rows: Iterable[Rendered]) -> bool:
    """Return whether the assistant calls a tool that no learned text names: the template leaves such calls out."""
    learned = "".join(row.text[start:stop] for row in rows for start, stop in row.learned)
    return any(name not in learned for name in called_tools(conversation))
