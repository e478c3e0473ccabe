"""The texts that a request gives to `generate`: on the command line, or in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import RequestError
from jaxdist.files import open_regular
from jaxdist.files.json_files import parse_json
from jaxdist.files.reasons import reason
from jaxdist.request.knobs import shown

USUAL_PROMPT = "def "

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of files with a JSON object on each line."""

LARGEST = 1 << 20
"""Bytes of the largest file of prompts that is read: several processes send it to each other, to compare it."""


def given_prompts(extras: Mapping[str, Any], alone: bool) -> list[str] | None:
    """Return the texts to continue; None for a conversation. `alone` says that this is the only process.

    Raises `RequestError` with a sentence for all that does not go together.
    """
    given = extras["prompt"] is not None or extras["prompts"] is not None
    problems: list[str] = []
    if extras["prompt"] is not None and extras["prompts"] is not None:
        problems.append("--prompt and --prompts both give texts to continue; leave one of them out")
    if extras["system"] is not None and not extras["chat"]:
        problems.append(
            f"--system is {shown(extras['system'])}, which has an effect with --chat only; add --chat, or leave it out"
        )
    if extras["thinking"] != "template" and not extras["chat"]:
        problems.append(
            f"--thinking is {extras['thinking']}, which has an effect with --chat only; add --chat, or leave it out"
        )
    if extras["chat"] and not given:
        problems += _problems_of_conversation(extras, alone)
    if problems:
        raise RequestError(*problems)
    if extras["prompts"] is not None:
        return read_prompts(extras["prompts"])
    if extras["chat"] and not given:
        return None
    return [extras["prompt"] or USUAL_PROMPT]


def _problems_of_conversation(extras: Mapping[str, Any], alone: bool) -> list[str]:
    """Return a sentence for all that a conversation cannot have."""
    remedy = "give a --prompt to answer"
    problems: list[str] = []
    if extras["samples"] > 1:
        problems.append(f"a conversation goes on from one answer, and --samples is {extras['samples']}; {remedy}")
    if extras["json"]:
        problems.append(f"--json prints one object at the end, and a conversation answers line by line; {remedy}")
    if not alone:
        problems.append(f"a conversation needs one process, and this is one of several; {remedy}")
    return problems


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or of `JSON_LINES` the `prompt` of each line. Raises `RequestError`."""
    try:
        with open_regular(path, links=True) as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise RequestError(f"--prompts '{path}' cannot be read: {reason(error)}") from error
    if len(content) > LARGEST:
        raise RequestError(f"--prompts '{path}' is larger than {LARGEST >> 20} MiB; split it")
    try:
        # Some editors put a byte-order mark at the start of a file; where files were joined it begins a later line.
        lines = [line.removeprefix("\ufeff") for line in content.decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompts '{path}' is not UTF-8 text; convert it") from error
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise RequestError(f"--prompts '{path}' holds no prompt; write one a line")
    if path.suffix.lower() in JSON_LINES:
        return [_of_json(path, number, line) for number, line in numbered]
    return [line for _, line in numbered]


def _of_json(path: Path, number: int, line: str) -> str:
    """Return the `prompt` of a line of JSON."""
    try:
        prompt = parse_json(line)["prompt"]
    except ValueError as error:
        raise RequestError(
            f'--prompts \'{path}\' line {number} is not JSON ({error}); write {{"prompt": "..."}} on each line'
        ) from error
    except (KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise RequestError(
            f"--prompts '{path}' line {number} is not a JSON object with the text of a prompt; "
            f'write {{"prompt": "..."}}'
        )
    return prompt
