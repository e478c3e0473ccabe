"""The text that a chat template makes of a conversation, and which of its characters are learned.

One rule finds them for every template: of the answer at turn i are learned the characters by which the conversation up
to it exceeds the conversation before it, rendered with the prompt that makes the assistant answer. Then the model
meets in training what it meets when it answers. The rule holds where both are how the whole begins. Where a later turn
changes an earlier one (Qwen 3 drops its thinking, gpt-oss and Phi-3 end the last turn in another way), the
conversation becomes several rows, each of which ends with an answer. Where even that does not hold, it is refused.

The template's own `generation` marker is not looked at: most templates lack it, and in some it is wrong.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.values import Learn
from jaxdist.data.chats.forms import Conversation, Message, shared_start
from jaxdist.files.json_files import parse_json
from jaxdist.huggingface.chat_template import ChatTemplate, ChatText

VERSION = 2
"""Version of the rule; increase it when the same conversation would become other rows."""

DATE = datetime(2024, 7, 26)
"""The date that templates write: with today's, the same data would give other tokens tomorrow."""

SHOWN = 30
"""Characters of a text that a reason shows."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with what was thought before its content."""


class Rendered(NamedTuple):
    """A row to learn from, as text."""

    text: str
    learned: tuple[tuple[int, int], ...]
    """From and to which character."""
    thinks: bool | None = None
    """The `enable_thinking` with which the template made it; None where the template has not been told."""


class Renderer(NamedTuple):
    """What conversations are rendered with; JSON can hold it, so that other processes do the same."""

    template: str
    """Jinja text; empty where the tokenizer has no template."""
    folder: str
    """Where it is from, for messages."""
    names: tuple[tuple[str, str], ...]
    """The special tokens that it may name, such as `bos_token`, each with its text."""
    special: tuple[str, ...]
    """All special tokens of the tokenizer."""
    begin: str
    """The token that is put before a text without turns; empty for none."""
    end: str
    """The token that is put after it; empty for none."""
    learn: Learn
    """What is learned: all answers, the last one of each conversation, or every token."""

    def rows(self, conversation: Conversation) -> list[Rendered]:
        """Return the rows of a conversation, in the order of their answers.

        Raises `ValueError` with a reason where nothing can be learned from it.
        """
        if conversation.rejected:
            pair = conversation._replace(rejected=None), conversation.rejected
            return [self._answer(one) for one in pair]
        if conversation.continued:
            return [self._continued(*conversation.continued)]
        if not self.template:
            raise ValueError(f"no chat template is in '{self.folder}'")
        if all(message["role"] != "assistant" for message in conversation.messages):
            raise ValueError("it has no turn of the assistant")
        reasons: list[str] = []
        for arguments in _as_given_or_text(conversation.messages):
            for thinks in self._thinking(conversation.messages):
                try:
                    return self._rows(arguments, conversation.tools, thinks, conversation.answered)
                except ValueError as error:
                    reasons.append(str(error))
        raise ValueError(reasons[0])

    def _answer(self, conversation: Conversation) -> Rendered:
        """Return the only row of one of a pair of answers."""
        rows = self.rows(conversation)
        if len(rows) > 1:
            raise ValueError("an answer has several turns, of which the template changes the earlier ones")
        return rows[0]

    def prompt(self, text: str, thinks: bool | None) -> str:
        """Return a user's text as a conversation that the assistant continues. Raises `ValueError` with a reason."""
        return self._rendering(None, thinks).text([{"role": "user", "content": text}], prompt=True)

    def end_of_answers(self) -> str:
        """Return the special token with which an answer to a user ends; empty where the template has none."""
        asked = ({"role": "user", "content": "."}, {"role": "assistant", "content": "."})
        try:
            *_, row = self._replace(learn="assistant").rows(Conversation(asked))
        except ValueError:
            return ""
        start, stop = row.learned[-1]
        answer = row.text[start:stop]
        return max((token for token in self.special if answer.endswith(token)), key=len, default="")

    def _rendering(self, tools: Any, thinks: bool | None) -> _Rendering:
        return _Rendering(_compiled(self.template, self.folder, self.names), tools, thinks)

    def _continued(self, prompt: str, completion: str) -> Rendered:
        if not self.end:
            raise ValueError("the tokenizer has no end-of-text token, with which a completion ends")
        if not prompt and not completion:
            raise ValueError("its prompt and its completion are empty")
        begin = "" if prompt.startswith(self.begin) else self.begin
        end = "" if completion.endswith(self.end) else self.end
        text = f"{begin}{prompt}{completion}{end}"
        first = 0 if self.learn == "all" else len(begin) + len(prompt)
        return Rendered(text, ((first, len(text)),))

    def _thinking(self, messages: Sequence[Message]) -> list[bool | None]:
        """Return how to set `enable_thinking`, one after another until the rule holds.

        Without thoughts, an answer must not learn the empty block that stands for them: the prompt has to have it.
        """
        if "enable_thinking" not in self.template:
            return [None]
        return [None, True, False] if any(map(_has_thoughts, messages)) else [False, None, True]

    def _rows(self, messages: Sequence[Message], tools: Any, thinks: bool | None, answered: int) -> list[Rendered]:
        """Return the rows in which the answers after so many messages are learned."""
        rendering = self._rendering(tools, thinks)
        if self.learn == "all":
            text = rendering.text(messages)
            return [Rendered(text, ((0, len(text)),), thinks)]
        left = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        left = [number for number in left if number >= answered]
        if self.learn == "last":
            left = left[-1:]
        rows = []
        while left:
            whole = messages[: left[-1] + 1]
            text = rendering.text(whole)
            start, stop = rendering.span(whole, left[-1], text)
            if not text[start:stop].rstrip().endswith(self.special):
                text += self._next_turn(rendering, messages, left[-1])
            spans = {left[-1]: (start, self._with_end(text, start, stop))}
            for number in left[:-1]:
                with contextlib.suppress(ValueError):
                    start, stop = rendering.span(whole, number, text)
                    spans[number] = start, self._with_end(text, start, stop)
            rows.append(Rendered(text, tuple(sorted(spans.values())), thinks))
            left = [number for number in left if number not in spans]
        return rows[::-1]

    def _next_turn(self, rendering: _Rendering, messages: Sequence[Message], number: int) -> str:
        """Return the special token that begins the turn after an answer, or a user's where it is the last one.

        It is how an answer ends in templates such as GLM-4's. Empty where there is none.
        """
        # Its thoughts, which the template may take out once a turn follows, are no matter here.
        plain = {key: value for key, value in messages[number].items() if key not in THOUGHTS} | {"content": "."}
        following = messages[number + 1] if number + 1 < len(messages) else {"role": "user", "content": "."}
        try:
            before = rendering.text([*messages[:number], plain])
            after = rendering.text([*messages[:number], plain, following])
        except ValueError:
            return ""
        return self._special_at(after, len(before)) if after.startswith(before) else ""

    def _special_at(self, text: str, place: int) -> str:
        """Return the special token at a place in a text; empty where there is none."""
        return next((token for token in self.special if text.startswith(token, place)), "")

    def _with_end(self, text: str, start: int, stop: int) -> int:
        """Return where an answer ends: behind its last special token, without which no end would be learned."""
        answer = text[start:stop].rstrip()
        if answer.endswith(self.special):
            return start + len(answer)
        # Some templates end an answer with the token that begins the next turn.
        following = self._special_at(text, stop)
        if not following:
            raise ValueError(
                f"the answer ends with {answer[-SHOWN:]!r}, which is no special token, so that no model learns to stop"
            )
        return stop + len(following)


class _Rendering(NamedTuple):
    """One way in which a template renders."""

    template: ChatTemplate
    tools: Any
    thinks: bool | None

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        variables = {} if self.thinks is None else {"enable_thinking": self.thinks}
        return self.template.text(messages, prompt, self.tools, **variables)

    def span(self, messages: Sequence[Message], number: int, whole: str) -> tuple[int, int]:
        """Return from and to which character of the whole an answer stands. Raises `ValueError` with a reason."""
        before = self.text(messages[:number], prompt=True)
        through = self.text(messages[: number + 1])
        if not through.startswith(before):
            at = shared_start(before, through)
            raise ValueError(
                f"the template does not continue its prompt, {before[at:][:SHOWN]!r} becomes {through[at:][:SHOWN]!r}"
            )
        if not whole.startswith(through):
            at = shared_start(through, whole)
            if through[at:].strip():
                raise ValueError("a later turn changes it")
            through = through[:at]
        return len(before), len(through)


@lru_cache(maxsize=8)
def _compiled(template: str, folder: str, names: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatText(template, Path(folder), dict(names)).compiled(lambda: DATE)


def _has_thoughts(message: Message) -> bool:
    return message["role"] == "assistant" and (
        any(message.get(key) for key in THOUGHTS) or re.search("</think>", message["content"]) is not None
    )


def _as_given_or_text(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield messages, then those with the arguments of tool calls in the other form: an object, or JSON in a text."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [_other_arguments(message) for message in messages]


def _other_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", {})
        if "arguments" not in function:
            calls.append(call)
            continue
        arguments = function["arguments"]
        with contextlib.suppress(ValueError):
            arguments = parse_json(arguments) if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
