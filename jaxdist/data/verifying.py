"""Read data whole, and compare them with what is known of them: a start reads samples alone (`data.known`)."""

from __future__ import annotations

from jaxdist.config import DataConfig
from jaxdist.data.naming.paths import open_each
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.data.token_cache import FOLDER_NAME, Damaged, check
from jaxdist.files.caches import cache_folder


def verify(config: DataConfig, progress: Progress = unseen) -> list[str]:
    """Return a sentence for each file of the data that `config` names which is not as a run has read it.

    Every byte of them is read, and compared with the SHA-256 that was made at the first start; data that no run has
    read, and files whose time of modification is another one since, have none, which is said too. The next start reads
    such files whole, and a run that began with others refuses to resume with them. Raises `RequestError` for data that
    cannot be read.
    """
    problems = []
    for name, sources in open_each(config).items():
        for source in sources.all:
            changed = source.changed_files(Pass(progress, f"verifying {source.name}", source.size).read)
            if changed is None:
                problems.append(f"'{name}' was never read, or has changed since; nothing is known to compare it with")
            else:
                problems += [
                    f"'{path}' is not what it was when it was first read, though its size and time are; copy it again"
                    for path in changed
                ]
    return problems


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
