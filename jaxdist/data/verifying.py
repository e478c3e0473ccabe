"""Read data whole, and compare them with what is known of them: a start reads samples alone (`data.known`)."""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.naming.paths import open_each
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.data.sources import Source
from jaxdist.data.token_cache import FOLDER_NAME, Damaged, check
from jaxdist.data.token_files import open_token_files
from jaxdist.data.vocabulary import largest_id_of
from jaxdist.files.caches import cache_folder
from jaxdist.huggingface.given_tokenizer import largest_id, read_tokenizer


class Verified(NamedTuple):
    """What reading all of data shows."""

    problems: list[str]
    """A sentence for each file that is not as a run has read it, or has an id that the model does not have."""
    notes: list[str]
    """Sentences about what there was nothing to compare with."""


def verify(config: DataConfig, vocab: int | None = None, progress: Progress = unseen) -> Verified:
    """Read every byte of the data that `config` names, and compare them with what is known of them.

    That is a SHA-256, made at the first start of text, and of tokens when these were first read whole: by this, where a
    start reads samples. Data that no run has read, and files whose time of modification is another one since, have
    none, which is said too. Ids of tokens are compared with `vocab`, the number of ids of a model, or else with those
    of the tokenizer. Raises `RequestError` for data that cannot be read.
    """
    problems: list[str] = []
    notes: list[str] = []
    for name, sources in open_each(config).items():
        for source in sources.all:
            if source.holds_tokens:
                _check_ids(source, config, vocab, progress, problems, notes)
            reading = Pass(progress, f"verifying {source.name}", source.size)
            changed = source.changed_files(reading.read)
            if changed is None and source.by_samples:
                source.digest(reading.read)
                notes.append(f"'{source.name}' was read whole for the first time; the next --verify compares with that")
            elif changed is None:
                problems.append(f"'{name}' was never read, or has changed since; nothing is known to compare it with")
            else:
                problems += [
                    f"'{path}' is not what it was when it was first read, though its size and time are; copy it again"
                    for path in changed
                ]
    return Verified(problems, notes)


def _check_ids(
    source: Source, config: DataConfig, vocab: int | None, progress: Progress, problems: list[str], notes: list[str]
) -> None:
    """Add what is wrong with the ids of files of tokens, or how many a model needs where nothing says how many it has.

    All of them are read.
    """
    given = read_tokenizer(config.tokenizer) if config.tokenizer else None
    if vocab is None and given is not None:
        vocab = largest_id(given.load()) + 1
    if vocab is None:
        needed = largest_id_of(source, config, progress) + 1
        notes.append(f"the token ids of '{source.name}' need a model.vocab of at least {needed}")
        return
    try:
        open_token_files([source], given, vocab, progress, config.dtype, whole=True)
    except RequestError as error:
        problems += error.problems


def verify_cache(progress: Progress = unseen) -> list[str]:
    """Return a sentence for each folder of the cache in which a byte is not as it was written.

    Every byte is read and compared with its XXH3. Folders that are still being filled are left out.
    """
    problems = []
    folder = cache_folder()
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not FOLDER_NAME.fullmatch(place.name) or "." in place.name:
            continue
        try:
            check(place, progress)
        except Damaged as error:
            problems.append(f"the cache is damaged: {error}; remove '{place}', and the next run makes it again")
    return problems
