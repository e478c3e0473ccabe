"""The chat template of a folder: Jinja text that writes a conversation as one prompt, as transformers renders it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from jaxdist.config import RequestError
from jaxdist.files.json_files import is_unicode, read_text
from jaxdist.huggingface.folder import KEPT
from jaxdist.huggingface.schema import JINJA_TEMPLATE, JSON_TEMPLATE, TOKENIZER_CONFIG, read_if_there
from jaxdist.huggingface.tokenizer import token_names

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]
"""One turn of a conversation: its `role` (system, user, assistant or tool) and its `content`."""

THINKING = "enable_thinking"
"""The variable by which templates of some models are told whether to think first."""


class ChatText(NamedTuple):
    """The text of a template and the special tokens that it may name."""

    jinja: str
    folder: Path
    """The folder that it is from, for messages."""
    names: Mapping[str, str]
    """The special tokens, such as `bos_token`, by the names that a template uses."""

    def compiled(self, now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
        """Return the template, which takes the date from `now`.

        Raises `RequestError` where it is no template, and without jinja2.
        """
        environment = make_environment(now)
        try:
            compiled = environment.from_string(self.jinja)
        except Exception as error:  # Jinja raises no narrower exception for all that can be wrong
            raise RequestError(
                f"the chat template of '{self.folder}' is not a Jinja template ({_first_line(error)}); copy it again"
            ) from error
        return ChatTemplate(compiled, self.folder, self.names, THINKING in self.jinja)


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may name."""

    compiled: Template
    folder: Path
    """The folder that it is from, for messages."""
    names: Mapping[str, str]
    """The special tokens, such as `bos_token`, by the names that a template uses."""
    asks_to_think: bool
    """Whether it looks at `THINKING`."""

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the conversation as a prompt that the assistant continues; `variables` are further ones.

        Raises `RequestError` where the template refuses the conversation, or fails.
        """
        try:
            return self.text(messages, prompt=True, **variables)
        except ValueError as error:
            raise RequestError(
                f"the chat template of '{self.folder}' does not take this conversation: {error}; "
                f"write it another way, or leave --chat out"
            ) from error

    def text(self, messages: Sequence[Message], prompt: bool, tools: Any = None, **variables: Any) -> str:
        """Return the conversation as text, with `prompt` followed by what makes the assistant answer.

        `variables` are further ones of the template. Raises `ValueError` with a reason where the template refuses the
        conversation, or fails.
        """
        conversation = [dict(message) for message in messages]
        try:
            text = self.compiled.render(
                **self.names,
                messages=conversation,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **variables,
            )
        except Exception as error:  # a template can raise anything, a TypeError too
            raise ValueError(_first_line(error)) from error
        if not is_unicode(text):
            raise ValueError("it writes half a character, an escape from \\ud800 to \\udfff by itself")
        return text


def read_chat_template(folder: Path) -> ChatTemplate:
    """Return the chat template of a run, or of a folder of a tokenizer.

    Raises `RequestError` where there is none, where it is no template, and without jinja2.
    """
    found = find_chat_template(folder)
    if found is None:
        source = template_folder(folder)
        raise RequestError(
            f"'{folder}' has no chat template: '{source}' has neither a {JINJA_TEMPLATE} nor a chat_template in its "
            f"{TOKENIZER_CONFIG}; leave --chat out, or copy the template there"
        )
    return found.compiled()


def find_chat_template(folder: Path) -> ChatText | None:
    """Return the text of the chat template of a run, or of a folder of a tokenizer; None where there is none."""
    source = template_folder(folder)
    text = _jinja_file(source / JINJA_TEMPLATE)
    text = text or _in_json(source / TOKENIZER_CONFIG) or _in_json(source / JSON_TEMPLATE)
    return ChatText(text, source, token_names(source)) if text else None


def folder_of(tokenizer: Path) -> Path:
    """Return the folder of a tokenizer, which may be given as its file; the template lies beside it."""
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def template_folder(folder: Path) -> Path:
    """Return where the template of a run, or of a folder of a tokenizer, is."""
    return folder / KEPT if (folder / "config.toml").exists() else folder


def make_environment(now: Callable[[], datetime] = datetime.now) -> Any:
    """Return what compiles templates: a sandbox, with the functions that templates of Hugging Face call."""
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise RequestError(
            "chat templates need jinja2, which is not installed; run pip install 'jaxdist[chat]'"
        ) from error

    class Generation(Extension):
        """Reads `{% generation %}`, which marks for training what the assistant says, as if it were not there."""

        tags = {"generation"}  # noqa: RUF012  # as the class above says

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own filter would escape the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _jinja_file(path: Path) -> str:
    """Return the content of a template's file; nothing where it is absent. Raises `RequestError`."""
    return read_text(path) if os.path.lexists(path) else ""


def _in_json(path: Path) -> str:
    """Return the `chat_template` in a JSON file, the default one of several; nothing where there is none."""
    found = read_if_there(path).get("chat_template") or ""
    if isinstance(found, str):
        return found
    templates = {one["name"]: one["template"] for one in found}
    return templates.get("default", "")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
