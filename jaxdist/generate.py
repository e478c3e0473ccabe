"""`python -m jaxdist.generate RUN`: generate text from a run's checkpoint, or from pretrained weights, on any mesh."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from jaxdist.cluster.process_env import find
from jaxdist.config import RequestError
from jaxdist.config.values import (
    Checkpoint,
    CountOrZero,
    FilePath,
    NonNegativeFloat32,
    PositiveFloat32,
    Prompt,
    Samples,
    Seed,
    StopTexts,
    Tokens,
    TopP,
    stop_texts,
)
from jaxdist.files import digest
from jaxdist.files.json_files import is_unicode
from jaxdist.huggingface.schema import GENERATION
from jaxdist.request import JOB_KNOBS, LAYOUT_KNOBS, Enough, Extra, Request, arguments, run
from jaxdist.request.prompts import USUAL_PROMPT, given_prompts
from jaxdist.request.sampling import Sampling, sampling
from jaxdist.weights.source import stored_at

if TYPE_CHECKING:
    from jaxdist.cluster.job import Job
    from jaxdist.huggingface.chat_template import ChatTemplate
    from jaxdist.training.continuation import Continuation
    from jaxdist.training.generation import Prompter, Writer
    from jaxdist.training.run import Run

DESCRIPTION = (
    "Generate text from a run's checkpoint. Needs only the run folder; all devices of the mesh take part. RUN may also "
    "be a folder of Hugging Face, with config.json and *.safetensors, into which nothing is written; the model then "
    "sees --model.sequence tokens. With --chat and without a prompt it holds a conversation, one line at a time."
)
EXTRAS = [
    Extra("checkpoint", "latest", "Step to use: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("prompt", None, f"Text to continue; without it and without --prompts it is '{USUAL_PROMPT}'.", Prompt),
    Extra("prompts", None, "File of texts to continue, one a line; of a .jsonl, the prompt of each line.", FilePath),
    Extra("chat", False, "Answer the prompt, written as the run's chat template says, and print the answer alone."),
    Extra("system", None, "With --chat: the system message, which says how to answer.", Prompt),
    Extra(
        "thinking",
        "template",
        "With --chat: whether to think first, of templates that have enable_thinking; template: as it does.",
        Literal["template", "on", "off"],
    ),
    Extra("tokens", 100, "Tokens to generate, at most.", Tokens),
    Extra("samples", 1, "Texts to generate for each prompt.", Samples),
    Extra("stop", None, "Words before which a text ends; several as a JSON list.", StopTexts),
    Extra(
        "temperature",
        None,
        "Divisor of the logits; 0: always take the most likely token; none: as generation_config.json says, else 0.8.",
        NonNegativeFloat32,
    ),
    Extra("top_k", None, "Sample from this many most likely tokens; 0: all; none: as that file, else 50.", CountOrZero),
    Extra(
        "top_p",
        None,
        "Sample from the fewest most likely tokens that together are this likely; 1: all; none: as that file, else 1.",
        TopP,
    ),
    Extra(
        "repetition_penalty",
        None,
        "Make tokens that a text has already less likely (CTRL); 1: do not; none: as that file, else 1.",
        PositiveFloat32,
    ),
    Extra("seed", None, "Seed of the sampling; none: 0.", Seed),
    Extra("json", False, "Print one JSON object, with the tokens and why each text ended."),
]


def main(argv: list[str] | None = None) -> int:
    """Print texts sampled from a checkpoint. Return the exit code."""
    knobs = (*LAYOUT_KNOBS, *JOB_KNOBS)
    request = arguments(argv, "generate", DESCRIPTION, positional="RUN", extras=EXTRAS, knobs=knobs, pretrained=True)
    config = request.config
    if config.model.images:
        raise RequestError(f"the run has model.family {config.model.family}, which generates no text; name another run")
    place = find(config.cluster)
    texts = given_prompts(request.extras, alone=place.alone)
    draws, line = sampling(request.extras, config.folder)

    # jax is imported only now, so that problems of the request are reported at once.
    from jaxdist.cluster.consensus import check_alike, check_request
    from jaxdist.cluster.job import Job
    from jaxdist.training.copies import check_named

    with Job(place, config, enough=Enough(config)) as job:
        check_request(request.text)
        check_named(config, reads_run=True)
        request.tell_unused(job.env.processes)
        check_alike("prompts", "\n".join(texts or []), "let all processes read the same file")
        check_alike("sampling", str(draws), f"let all processes read the same {GENERATION}")
        if line and job.env.leader:
            print(line, file=sys.stderr)
        job.keep_programs()
        generate(request, texts, draws, job)
        return job.end(0)


def generate(request: Request, texts: Sequence[str] | None, draws: Sampling, job: Job) -> None:
    """Continue the texts, or hold a conversation where there are none."""
    from jaxdist.cluster.consensus import check_alike
    from jaxdist.cluster.heartbeat import STEPPING
    from jaxdist.huggingface.chat_template import read_chat_template
    from jaxdist.huggingface.given_tokenizer import largest_id
    from jaxdist.training.continuation import Ending
    from jaxdist.training.decoding import Choice, Decoding, check_fits, room_for
    from jaxdist.training.generation import Prompter, Writer
    from jaxdist.training.restore import restore

    config = request.config
    extras = request.extras
    tokenizer, special = stored_at(config.folder).tokenizer()
    template = read_chat_template(config.folder) if extras["chat"] else None
    stops = () if extras["stop"] is None else stop_texts(extras["stop"])
    ending = Ending(extras["tokens"], config.model.sequence, special.stops, stops)
    variables = _thinking(template, extras["thinking"])
    prompter = Prompter(tokenizer, special, ending, template, extras["system"], variables)
    # Before the weights are read, which takes longer.
    prompts = [prompter.of_text(text) for text in texts or []]
    # A template may write the time of day.
    check_alike("rendering of the prompts", digest(*map(str, prompts)), "use a template that always writes the same")
    note = prompter.note()
    if note and job.env.leader:
        print(f"note: {note}", file=sys.stderr)

    def check(run: Run) -> None:
        # How long a conversation gets is not known yet.
        room = room_for(run, prompts, extras["tokens"]) if prompts else None
        check_fits(run, max(1, len(prompts) * extras["samples"]), room)

    trained = restore(config, extras["checkpoint"], batch=False, check=check)
    choice = Choice(draws.temperature, draws.top_k, draws.top_p, largest_id(tokenizer) + 1, draws.repetition_penalty)
    step = trained.step
    decoding = Decoding(trained.run, trained.params)
    # The cache may need the memory of the parameters.
    del trained
    writer = Writer(decoding, choice, extras["seed"] or 0, partial(job.note, STEPPING))
    if texts is None:
        converse(writer, prompter, job)
        return
    found = [prompter.begin(prompt) for prompt in prompts for _ in range(extras["samples"])]
    begun = [text for text in texts for _ in range(extras["samples"])]
    if extras["json"]:
        writer.write(found)
        if job.env.leader:
            print_json(step, draws, begun, found)
    else:
        # An answer is printed alone, and a continuation behind the text that it continues.
        print_texts(writer, [""] * len(begun) if template else begun, found, job.env.leader)


def _thinking(template: ChatTemplate | None, asked: str) -> dict[str, bool]:
    """Return the variable that tells a template what --thinking asks. Raises `RequestError` if it has none."""
    from jaxdist.huggingface.chat_template import THINKING

    if template is None or asked == "template":
        return {}
    if not template.asks_to_think:
        raise RequestError(
            f"--thinking is {asked}, but the chat template of '{template.folder}' has no {THINKING}; leave it out"
        )
    return {THINKING: asked == "on"}


def print_texts(writer: Writer, begun: Sequence[str], found: Sequence[Continuation], leader: bool) -> None:
    """Write the texts, and print each behind its beginning: one alone as it comes, several when they are complete.

    All processes have the texts; the leader prints them.
    """
    if not leader:
        writer.write(found)
        return
    if len(found) == 1:
        show(begun[0])
        try:
            writer.write(found, show)
        finally:
            print()
    else:
        writer.write(found)
        for number, (beginning, text) in enumerate(zip(begun, found, strict=True), start=1):
            print(f"--- {number}")
            print(beginning + text.text)
    note_full(found)


def show(text: str) -> None:
    """Print a part of a line at once."""
    print(text, end="", flush=True)


def note_full(found: Sequence[Continuation]) -> None:
    """Say on standard error that texts ended because the model sees no more tokens."""
    from jaxdist.training.continuation import SEQUENCE

    full = sum(text.ended == SEQUENCE for text in found)
    if full:
        which = "the text" if len(found) == 1 else f"{full} of {len(found)} texts"
        sequence = found[0].ending.sequence
        print(f"note: {which} ended at model.sequence {sequence}: the model sees no more tokens", file=sys.stderr)


def print_json(step: int | None, draws: Sampling, begun: Sequence[str], found: Sequence[Continuation]) -> None:
    """Print one JSON object with every text."""
    texts = [
        {"prompt": beginning, "text": text.text, "tokens": text.ids, "ended": text.ended}
        for beginning, text in zip(begun, found, strict=True)
    ]
    print(json.dumps({"step": step, "sampling": draws._asdict(), "texts": texts}, ensure_ascii=False, allow_nan=False))


def converse(writer: Writer, prompter: Prompter, job: Job) -> None:
    """Answer the lines of standard input, each in the light of all before it, until its end."""
    messages = [*prompter.opening]
    for turn, line in enumerate(lines_of_person(job)):
        messages.append({"role": "user", "content": line})
        answer = prompter.begin(prompter.of_messages(messages))
        writer.write([answer], show, turn)
        print(flush=True)
        note_full([answer])
        messages.append({"role": "assistant", "content": answer.text})


NOT_UTF_8 = "a line of standard input is not UTF-8 text; convert it, or set the terminal to UTF-8"


def lines_of_person(job: Job) -> Iterator[str]:
    """Yield the lines of standard input that are not empty; at a terminal, ask for each.

    Raises `RequestError` for a line that is not text.
    """
    from jaxdist.cluster.heartbeat import LISTENING

    ask = ""
    if sys.stdin.isatty():
        # Importing it lets a person edit the line, and go back to earlier ones.
        with suppress(ImportError):
            import readline  # noqa: F401
        ask = "> "
    while True:
        job.note(LISTENING)
        try:
            line = input(ask).strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise RequestError(NOT_UTF_8) from None
        except OSError as error:
            # So a terminal says that it was closed.
            if error.errno != errno.EIO:
                raise
            return
        if not is_unicode(line):
            # In the locale C, Python reads a byte that is no text as half a character.
            raise RequestError(NOT_UTF_8)
        if line:
            yield line


if __name__ == "__main__":
    run(main)
