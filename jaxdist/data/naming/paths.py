"""The data that a request names: its sources, and why one of its files cannot be read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from jaxdist.config import DataConfig, RequestError, listed
from jaxdist.config.mixture import otherwise
from jaxdist.config.text_template import TEXT
from jaxdist.data.known import MANY, known
from jaxdist.data.naming import magics
from jaxdist.data.naming.addresses import elsewhere
from jaxdist.data.naming.named_files import LISTS, NamedFiles, by_their_names, named_by, parts
from jaxdist.data.readers import is_token_file, reader_of
from jaxdist.data.readers.megatron import index_of
from jaxdist.data.readers.reader import TextReader
from jaxdist.data.sources import Source, Sources
from jaxdist.data.token_samples import OF_MIXTURE
from jaxdist.files import digest
from jaxdist.files.reasons import reading, reason
from jaxdist.huggingface.tokenizer import folder_problem

QUOTES = "[]'\" "


def open_sources(config: DataConfig) -> Sources:
    """Return the data that `config` names.

    Reads only the first bytes of a file, and lists of files. Raises `RequestError` with every path that does not exist,
    is not a file, is empty, or is of the wrong kind or format.
    """
    sources = _found(config, "data.path")
    unused = _without_effect(config, [sources])
    if unused:
        raise RequestError(*unused)
    return sources


def open_each(config: DataConfig) -> dict[str, Sources]:
    """Return the data of each source by its name, of a mixture or of the only one. Raises as these two do."""
    if config.mixture:
        return open_mixture(config)
    sources = open_sources(config)
    return {sources.name: sources}


def open_mixture(config: DataConfig) -> dict[str, Sources]:
    """Return the data of each source of the mixture that `config` names, by the names of the sources.

    Raises `RequestError` as `open_sources` does, and for a file that two sources name.
    """
    assert config.mixture, "no mixture"
    found: dict[str, Sources] = {}
    problems: dict[str, None] = {}
    for source in config.mixture.sources:
        try:
            sources = _found(config.of_source(source), "data.mixture")
            found[source.name] = _asked_alone(sources)
            if source.text and not any(one.keyed for one in sources.all):
                raise RequestError(
                    f"data.mixture says a text of '{source.name}', none of whose files have keys; leave it out"
                )
        except RequestError as error:
            problems |= dict.fromkeys(error.problems)
    if not problems:
        problems |= dict.fromkeys([*_in_two(found), *_without_effect(config, list(found.values()))])
    if problems:
        raise RequestError(*listed(iter(problems), len(problems), "such problems of data.mixture"))
    return found


def _in_two(found: Mapping[str, Sources]) -> Iterator[str]:
    """Yield a sentence for each source that names a file of another one."""
    whose: dict[str, str] = {}
    for name, sources in found.items():
        for source in sources.all:
            for path, _ in source.files:
                other = whose.setdefault(os.path.realpath(path), name)
                if other != name:
                    yield f"data.mixture has '{path}' in '{other}' and in '{name}'; leave it out of one of them"
                    break


def _found(config: DataConfig, knob: str) -> Sources:
    """Return the data whose files `config.path` names, as `knob` of the request."""
    training, by_name = by_their_names(config.path, _named(knob, config.path, config.text))
    held_out = _named("data.validation_path", config.validation_path, config.text)
    found = _problems(knob, config.path, training)
    tokenizer = _tokenizer_problem(config.tokenizer)
    if tokenizer:
        found.append(tokenizer)
    found += _problems("data.validation_path", config.validation_path, held_out)
    if held_out.files:
        training = training._replace(left_out=training.left_out + by_name.files)
    elif by_name.files:
        found += _problems(knob, config.path, by_name)
    found += _together(knob, config.path, training.files)
    found += _together("data.validation_path", config.validation_path, held_out.files)
    found += _pair_problems(config, training.files, held_out.files)
    if found:
        raise RequestError(*found)
    source = _source(config.path, training, config) or Source.library()
    if not source.files:
        raise RequestError(f"'{source.name}' holds no source files of Python's library; set data.path to a text file")
    # Validation that is named is read instead of what is called so.
    validation = _source(config.validation_path, held_out, config) or _source(None, by_name, config)
    return Sources(source, validation, config.validation_fraction)


def _without_effect(config: DataConfig, found: Sequence[Sources]) -> list[str]:
    """Return a sentence for each knob that none of these data use."""
    problems = []
    if config.text != TEXT and not any(one.keyed for sources in found for one in sources.all):
        problems.append(
            f"data.text is '{config.text}', but none of the data are JSON lines (.jsonl, .ndjson), Parquet or Arrow, "
            "which alone have keys; leave it out"
        )
    if config.skips and not any(one.keyed for sources in found for one in sources.all):
        problems.append(
            "data.on_error is skip, but none of the data are JSON lines (.jsonl, .ndjson), Parquet or Arrow, which "
            "alone have rows; leave it out"
        )
    if not any(one.chats for sources in found for one in sources.all):
        for knob in ("learn", "long"):
            value = getattr(config, knob)
            if value != DataConfig.model_fields[knob].default:
                problems.append(
                    f"data.{knob} is {value}, but the rows of none of the data are conversations; leave it out, or say "
                    "by data.form what they are"
                )
    sources = found[0]
    if config.dtype != "auto" and not any(one.training.holds_tokens for one in found):
        problems.append(
            f"data.dtype is {config.dtype}, but '{sources.name}' is text, whose tokens have the type that model.vocab "
            "needs; leave it out"
        )
    default = DataConfig.model_fields["validation_fraction"].default
    by_name = all(one.held_out for one in found) and not config.validation_path
    if sources.held_out and by_name and config.validation_fraction != default:
        problems.append(
            f"data.validation_fraction is {config.validation_fraction:g}, but '{sources.held_out.name}' is the "
            "validation data by its name; leave it out, or name the files to train on with commas between them"
        )
    return problems


def _asked_alone(sources: Sources) -> Sources:
    """Return one source of a mixture as it would be asked for alone: without the knobs of rows where it has none.

    Less is read of it, whatever other sources there are, so that they change nothing about it.
    """
    training, *others = (one if one.keyed else replace(one, text=TEXT, skips=False) for one in sources.all)
    return replace(sources, training=training, held_out=others[0] if others else None).one_of(OF_MIXTURE)


def paths_of(text: str | None, key: str = TEXT) -> tuple[Path, ...]:
    """Return the files that data.path or data.validation_path names; none for None. `key` is data.text."""
    return named_by(text, key).files


def places_of(text: str | None) -> tuple[Path, ...]:
    """Return the files, and the folders instead of their files, that such a text names: what a job has to see."""
    places: list[Path] = []
    for part in parts(text):
        places.append(Path(part))
        if not os.path.isdir(part):
            for path in paths_of(part):
                places += [path, *index_of(path)]
    return tuple(dict.fromkeys(path for path in places if path.exists()))


def held_out_problems(text: str | None) -> list[str]:
    """Return a sentence for each file of data.validation_path that cannot be read, by itself."""
    return _problems("data.validation_path", text, _named("data.validation_path", text))


def _named(knob: str, text: str | None, key: str = TEXT) -> NamedFiles:
    try:
        return named_by(text, key)
    except OSError as error:
        raise RequestError(f"{knob} '{text}' cannot be read ({reason(error)}); make it readable") from error


def _source(name: str | None, named: NamedFiles, config: DataConfig) -> Source | None:
    if not named.files:
        return None
    return Source.of(
        *named.files, name=name, left_out=named.others, text=config.text, skips=config.skips, form=config.form
    )


def _problems(knob: str, text: str | None, named: NamedFiles) -> list[str]:
    """Return a sentence for each reason why the files of a knob cannot be read."""
    if text is None:
        return []
    weighted = [otherwise(part) for part in parts(text)]
    if weighted and all(weighted) and not any(path.exists() for path in named.files):
        return [f"{knob} '{text}' does not exist; to mix sources by weight, write '{','.join(weighted)}'"]
    if not named.files:
        return [f"{knob} '{text}' {_without_files(text, named)}"]
    none_foreign = _none_foreign(named.files)
    wrong = []
    for path in named.files:
        problem = _file_problem(knob, path) or _foreign(knob, path, looks=not none_foreign)
        if problem:
            wrong.append(problem)
    return list(listed(iter(wrong), len(wrong), f"such files of {knob}"))


def _none_foreign(files: Sequence[Path]) -> bool:
    """Return whether many files are known to be in no foreign format; False for a few, which are quickly looked at."""
    if len(files) < MANY:
        return False
    question = digest("no foreign format", magics.VERSION)
    try:
        return known(question, files, lambda: all(magics.foreign(path) is None for path in files))
    except RequestError:
        # What is wrong is said for each file.
        return False


def _together(knob: str, text: str | None, files: tuple[Path, ...]) -> list[str]:
    """Return a sentence for each reason why these files of a knob cannot be read as one source."""
    if len(files) < 2:
        return []
    found = []
    twice, count = Counter(map(os.path.realpath, files)).most_common(1)[0]
    if count > 1:
        found.append(f"{knob} '{text}' names the file '{twice}' {count} times; name it once")
    tokens = [path for path in files if is_token_file(path)]
    if tokens and len(tokens) < len(files):
        other = next(path for path in files if path not in tokens)
        found.append(f"{knob} '{text}' names tokens, '{tokens[0]}', and text, '{other}'; give files of one kind")
    return found


def _without_files(text: str, named: NamedFiles) -> str:
    """Return what is wrong with a text that names no file."""
    other = elsewhere(text)
    if other:
        return other
    if text.startswith(LISTS):
        return f"is a list in brackets; write {','.join(name.strip(QUOTES) for name in text.split(','))}"
    if named.left_out:
        return f"names only files that are empty ({named.others}); give files with content"
    if os.path.isdir(text):
        return "is a folder without files; give one with texts in it"
    return "is a pattern that no file has; give the path of a file"


def _pair_problems(config: DataConfig, training: tuple[Path, ...], held_out: tuple[Path, ...]) -> list[str]:
    """Return a sentence for each reason why the training and the validation data do not belong together."""
    if not held_out:
        return []
    if config.path is None:
        return [
            f"data.validation_path is '{config.validation_path}' but data.path is not set; set data.path to data of "
            "the same kind, or leave out data.validation_path to hold out a part of Python's own library"
        ]
    # A foreign format is reported instead, because a name such as a.txt.lz4 does not show the kind.
    if not training or any(_foreign("data", path) for path in (training[0], *held_out)):
        return []
    problems = []
    for path in held_out:
        if is_token_file(path) != is_token_file(training[0]):
            problems.append(
                f"data.path '{config.path}' is {reader_of(training[0]).name} but data.validation_path '{path}' is "
                f"{reader_of(path).name}; give both as text, or both as tokens"
            )
    both = _real(training) & _real(held_out)
    for path in held_out:
        if os.path.realpath(path) in both:
            problems.append(
                f"data.path and data.validation_path are the same file, '{path}'; leave out data.validation_path to "
                "hold out a part of it"
            )
    return list(listed(iter(problems), len(problems), "such files of data.validation_path"))


def _real(paths: Iterable[Path]) -> set[str]:
    return {os.path.realpath(path) for path in paths if path.is_file()}


def _tokenizer_problem(path: Path | None) -> str | None:
    if path and path.is_dir():
        return folder_problem(path)
    return _file_problem("data.tokenizer", path) if path else None


def _file_problem(knob: str, path: Path) -> str | None:
    if not path.exists():
        return f"{knob} '{path}' {elsewhere(str(path)) or 'does not exist; give the path of a file'}"
    if not path.is_file():
        return f"{knob} '{path}' is not a regular file, and it is read more than once; copy it into one"
    if path.stat().st_size == 0:
        return f"{knob} '{path}' is empty; give a file with content"
    return None


def _foreign(knob: str, path: Path, looks: bool = True) -> str | None:
    """Return what is wrong with a file in a format that jaxdist does not read; None for other files, and if absent.

    Unless it `looks`, the file is none of those formats.
    """
    if not path.is_file():
        return None
    try:
        with reading(path):
            words = (magics.foreign(path) if looks else None) or _missing_package(path)
    except RequestError as error:
        return str(error)
    if words is None:
        return None
    return f"{knob} '{path}' {words}"


def _missing_package(path: Path) -> str | None:
    """Return what to install for a file, without importing it."""
    reader = reader_of(path)
    if not isinstance(reader, TextReader) or not reader.needs or find_spec(reader.needs):
        return None
    return f"is {reader.name}, and {reader.needs}, which reads it, is not installed; pip install 'jaxdist[data]'"
