"""The forms in which rows hold conversations, known by their keys; a row becomes messages as chat templates take them.

None of them is a standard. `messages` is that of OpenAI and Hugging Face, the others are called by where they began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.config.text_template import TEXT
from jaxdist.files.json_files import is_unicode, parse_json

Message = dict[str, Any]
"""One turn: its `role`, its `content`, and what else a template may look at, such as `tool_calls`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who speaks, as templates call them."""

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
SHAREGPT_ROLES |= {"function_call": "assistant", "observation": "tool", "function_response": "tool"}
"""What `from` says, where that is no role."""


class Conversation(NamedTuple):
    """What a row holds: turns, or a text and what continues it."""

    messages: tuple[Message, ...] = ()
    tools: list[Any] | None = None
    """What the assistant may call, for the template."""
    continued: tuple[str, str] | None = None
    """A text and what continues it, which no template turns into messages."""
    rejected: Conversation | None = None
    """Of a pair of answers, the same conversation with the worse one."""
    answered: int = 0
    """Of a pair of answers, the number of messages that both answer."""

    def transcript(self) -> str:
        """Return all texts, one after another, as one reads them without a template."""
        if self.rejected:
            return "\n\n".join([self._replace(rejected=None).transcript(), "or, worse:", self.rejected.transcript()])
        if self.continued:
            return "".join(self.continued)
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


class Form(NamedTuple):
    """A form of rows."""

    name: str
    needed: tuple[str, ...]
    """Keys that a row has, by which the form is known."""
    more: tuple[str, ...]
    """Keys that it may have."""
    read: Callable[[Mapping[str, Any]], Conversation]
    """Returns what a row holds. Raises `ValueError` with what is wrong with it, after "the row has"."""


PREFERENCE = "preference"
"""The form of pairs of a better and a worse answer."""

ASSISTANT = "\n\nAssistant:"
"""What precedes an answer in texts with turns, as those of Anthropic are."""


def known_form(keys: Iterable[str]) -> Form | None:
    """Return the form of rows with these keys; None for none."""
    found = set(keys)
    return next((form for form in FORMS.values() if found.issuperset(form.needed)), None)


def form_by_keys(keys: Iterable[str]) -> str:
    """Return the name of the form of rows with these keys; empty for texts, and for none.

    Rows with one of two answers are pairs too: where they are read, it is said what they lack.
    """
    found = set(keys)
    if TEXT in found:
        return ""
    form = known_form(found)
    if form:
        return form.name
    return "" if found.isdisjoint(FORMS[PREFERENCE].needed) else PREFERENCE


def conversation_of(row: Mapping[str, Any], form: Form) -> Conversation:
    """Return what a row holds. Raises `ValueError` with what is wrong with it, after "the row has"."""
    missing = [key for key in form.needed if row.get(key) is None]
    if missing:
        raise ValueError(f'no "{missing[0]}"')
    # Where one row has a key, Parquet gives it to all, and templates ask whether it is there.
    found = form.read({key: without_nulls(row[key]) for key in (*form.needed, *form.more) if row.get(key) is not None})
    if not is_unicode(found.transcript()):
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff), which is not text")
    return found


def called_tools(conversation: Conversation) -> list[str]:
    """Return the names of the tools that the assistant calls."""
    answers = conversation.messages[conversation.answered :]
    calls = [call for message in answers for call in message.get("tool_calls") or []]
    return [str(call["function"]["name"]) for call in calls if "name" in call.get("function", {})]


def without_nulls(value: Any) -> Any:
    """Return a value without keys whose value is null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _messages(row: Mapping[str, Any]) -> Conversation:
    return Conversation(_turns(row["messages"], "messages"), _tools(row))


def _sharegpt(row: Mapping[str, Any]) -> Conversation:
    turns = []
    for turn in _list_of_objects(row["conversations"], "conversations"):
        speaker = turn.get("from")
        role = SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
        message: Message = {"role": role, "content": turn.get("value")}
        if speaker == "function_call":
            message = {"role": role, "content": "", "tool_calls": [_call(turn.get("value"))]}
        turns.append(message)
    return Conversation(_turns([*_system(row), *turns], "conversations"), _tools(row))


def _prompt(row: Mapping[str, Any]) -> Conversation:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(continued=(prompt, completion))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError('a text and a list as its "prompt" and "completion"; make both texts, or both lists')
    return Conversation((*_turns(prompt, "prompt"), *_turns(completion, "completion")), _tools(row))


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    instruction = _string(row["instruction"], "instruction")
    if row.get("input"):
        instruction = f"{instruction}\n\n{_string(row['input'], 'input')}"
    output = _string(row["output"], "output")
    turns = [{"role": "user", "content": instruction}, {"role": "assistant", "content": output}]
    return Conversation(_turns([*_system(row), *turns], "instruction"))


def _preference(row: Mapping[str, Any]) -> Conversation:
    better, worse = row["chosen"], row["rejected"]
    if isinstance(better, str) != isinstance(worse, str):
        raise ValueError('a text and a list as its "chosen" and "rejected"; make both texts, or both lists')
    if better == worse:
        raise ValueError('the same answer as its "chosen" and as its "rejected"')
    prompt = row.get("prompt")
    if isinstance(better, str) and not isinstance(prompt, list):
        return _pair_of_texts(_string(prompt, "prompt") if prompt is not None else None, better, worse)
    tools = _tools(row)
    before: tuple[Message, ...] = ()
    if isinstance(prompt, list):
        before = _turns(prompt, "prompt")
    elif prompt:
        before = (_turn({"role": "user", "content": _string(prompt, "prompt")}, "prompt"),)
    answers = [_answer(answer, key) for answer, key in ((better, "chosen"), (worse, "rejected"))]
    if before and all(answer[0]["role"] == "assistant" for answer in answers):
        answers = [(*before, *answer) for answer in answers]
    shared = shared_start(*answers)
    if not shared:
        raise ValueError('nothing that its "chosen" and "rejected" share, and both answer; give it as "prompt"')
    if any(all(turn["role"] != "assistant" for turn in answer[shared:]) for answer in answers):
        raise ValueError('a "chosen" or "rejected" without an answer after what both share')
    chosen, rejected = (Conversation(answer, tools, answered=shared) for answer in answers)
    return chosen._replace(rejected=rejected)


def _pair_of_texts(prompt: str | None, better: str, worse: str) -> Conversation:
    """Return a pair of texts that continue a prompt, or that share a beginning up to an answer."""
    if prompt is None:
        end = better.rfind(ASSISTANT, 0, shared_start(better, worse)) + len(ASSISTANT)
        prompt, better, worse = better[:end], better[end:], worse[end:]
        if not prompt.endswith(ASSISTANT):
            raise ValueError(
                'texts as its "chosen" and "rejected" that share no beginning up to an "Assistant:"; give what both '
                'answer as "prompt"'
            )
    if not prompt or not better or not worse:
        raise ValueError('an empty "prompt", "chosen" or "rejected"')
    return Conversation(continued=(prompt, better), rejected=Conversation(continued=(prompt, worse)))


def _answer(value: Any, key: str) -> tuple[Message, ...]:
    """Return the turns of an answer, which may be its text alone."""
    return _turns([{"role": "assistant", "content": value}] if isinstance(value, str) else value, key)


def shared_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _system(row: Mapping[str, Any]) -> list[Message]:
    """Return the message of a row's own system text, if it has one."""
    return [{"role": "system", "content": _string(row["system"], "system")}] if row.get("system") else []


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a row, which some write as JSON into a text; None for none."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        tools = _of_json(tools, "tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError('no list as its "tools"')
    return tools


def _call(value: Any) -> dict[str, Any]:
    """Return the call of a tool that ShareGPT writes as JSON."""
    call = _of_json(value, "function_call") if isinstance(value, str) else value
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('a function_call that is no object with a "name" and "arguments"')
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def _turns(value: Any, key: str) -> tuple[Message, ...]:
    """Return messages, each with a role and a text."""
    return tuple(_turn(turn, key) for turn in _list_of_objects(value, key))


def _turn(turn: Message, key: str) -> Message:
    role = turn.get("role")
    if role not in ROLES:
        raise ValueError(f'a turn in its "{key}" whose role is {role!r:.40}, none of {", ".join(ROLES)}')
    content = turn.get("content")
    _check_calls(turn.get("tool_calls") or [], key)
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, key) for part in content)
    if not isinstance(content, str):
        raise ValueError(f'a turn in its "{key}" whose content is no text')
    return {**turn, "content": content}


def _check_calls(calls: Any, key: str) -> None:
    """Raise `ValueError` if the calls of a turn are no list of objects."""
    objects = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    )
    if not objects:
        raise ValueError(f'a turn in its "{key}" whose tool_calls are no list of objects with a function, an object')


def _part(part: Any, key: str) -> str:
    """Return the text of a part of a content."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f'a turn in its "{key}" with a part {kind!r:.40}, and only texts are learned')


def _list_of_objects(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ValueError(f'no list of turns as its "{key}"')
    return value


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'no text as its "{key}"')
    return value


def _of_json(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f'a text as its "{key}" that is not JSON') from error


FORMS = {
    form.name: form
    for form in (
        Form(PREFERENCE, ("chosen", "rejected"), ("prompt", "tools"), _preference),
        Form("messages", ("messages",), ("tools",), _messages),
        Form("sharegpt", ("conversations",), ("system", "tools"), _sharegpt),
        Form("prompt", ("prompt", "completion"), ("tools",), _prompt),
        Form("alpaca", ("instruction", "output"), ("input", "system"), _alpaca),
    )
}
"""The forms by their names; a row with the keys of several has the first of them."""
