"""The files that a request names as data: which they are, and why one of them cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import magics
from jaxdist.data.readers import holds_tokens, reader_of
from jaxdist.data.readers.raw_tokens import RAW_TOKENS
from jaxdist.data.readers.reader import reading
from jaxdist.data.sources import Source, Sources
from jaxdist.huggingface.tokenizer import folder_problem

ONE_FILE = "one file is read, so join the texts first, in one .txt or in one .jsonl with a line for each text"


def open_sources(config: DataConfig) -> Sources:
    """Return the data that `config` names.

    Reads only the first bytes of a file. Raises `RequestError` with every path that does not exist, is not a file, is
    empty, or is of the wrong kind or format.
    """
    problems = [_file_problem("data.path", config.path), _tokenizer_problem(config.tokenizer)]
    if config.path:
        problems.append(_foreign("data.path", config.path))
    held_out = paths_of(config.validation_path)
    found = [problem for problem in problems if problem]
    found += held_out_problems(held_out)
    found += _pair_problems(config, held_out)
    source = Source.of(*([config.path] if config.path else []))
    if not source.files:
        found.append(f"'{source.root}' holds no source files of Python's library; set data.path to a text file")
    if found:
        raise RequestError(*found)
    return Sources(source, Source.of(*held_out) if held_out else None, config.validation_fraction)


def paths_of(path: Path | None) -> tuple[Path, ...]:
    """Return the files that data.validation_path names: one, or several with commas between them; none for None."""
    if path is None:
        return ()
    if "," not in str(path) or path.exists():
        return (path,)
    return tuple(Path(name.strip()) for name in str(path).split(",") if name.strip())


def held_out_problems(paths: Iterable[Path]) -> list[str]:
    """Return a sentence for each of these files of data.validation_path that cannot be read, by itself."""
    problems = []
    for path in paths:
        problems += [_file_problem("data.validation_path", path), _foreign("data.validation_path", path)]
    return [problem for problem in problems if problem]


def _pair_problems(config: DataConfig, held_out: tuple[Path, ...]) -> list[str]:
    """Return a sentence for each reason why the training and the validation data do not belong together."""
    if not held_out:
        return []
    if config.path is None:
        return [
            f"data.validation_path is '{config.validation_path}' but data.path is not set; set data.path to data of "
            "the same kind, or leave out data.validation_path to hold out a part of Python's own library"
        ]
    problems = []
    reader = reader_of(config.path)
    if holds_tokens(config.path) and len(held_out) > 1:
        # What has a header or an index cannot be joined by hand.
        remedy = f"join them, such as cat {' '.join(map(str, held_out))} > all.bin"
        if reader != RAW_TOKENS:
            remedy = "name one of them"
        problems.append(
            f"data.validation_path names {len(held_out)} files of {reader.name}, of which training takes one; {remedy}"
        )
    foreign = any(_foreign("data", path) for path in (config.path, *held_out))
    for path in held_out:
        # A foreign format is reported instead, because a name such as a.txt.gz does not show the kind.
        if reader_of(path) != reader and not foreign:
            problems.append(
                f"data.path '{config.path}' is {reader.name} but data.validation_path '{path}' is "
                f"{reader_of(path).name}; give files of one kind"
            )
        elif config.path.is_file() and path.is_file() and config.path.samefile(path):
            problems.append(
                f"data.path and data.validation_path are the same file, '{config.path}'; leave out "
                "data.validation_path to hold out a part of it"
            )
    return problems


def _tokenizer_problem(path: Path | None) -> str | None:
    if path and path.is_dir():
        return folder_problem(path)
    return _file_problem("data.tokenizer", path)


def _file_problem(knob: str, path: Path | None) -> str | None:
    if path is None:
        return None
    if not path.exists():
        return f"{knob} '{path}' {_absent(path)}"
    if path.is_dir():
        return f"{knob} '{path}' is a folder; {ONE_FILE}, such as cat {path}/*.txt > all.txt"
    if not path.is_file():
        return f"{knob} '{path}' is not a regular file, and it is read more than once; copy it into one"
    if path.stat().st_size == 0:
        return f"{knob} '{path}' is empty; give a file with content"
    return None


def _absent(path: Path) -> str:
    """Return what is wrong with a path where no file is, and what to do; users often name several files."""
    names = [name.strip(" '\"") for name in str(path).strip("[]").split(",")]
    if len(names) > 1 and all(Path(name).exists() for name in names):
        return (
            f"is a list of {len(names)} files; {ONE_FILE}, such as cat {' '.join(names)} > all{Path(names[0]).suffix}"
        )
    if any(sign in path.name for sign in "*?[") and any(path.parent.glob(path.name)):
        return f"is a pattern of names; {ONE_FILE}, such as cat {path} > all{path.suffix}"
    return "does not exist; give the path of a file"


def _foreign(knob: str, path: Path) -> str | None:
    """Return what is wrong with a file in a format that jaxdist does not read; None for other files, and if absent."""
    if not path.is_file():
        return None
    with reading(path):
        known = magics.foreign(path)
    if known is None:
        return None
    return f"{knob} '{path}' {known}"
