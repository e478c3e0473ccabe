"""Whether all processes read the same files: each host may have a copy of its own at the same path.

What every process reads for itself is compared, so that no run computes with the weights of two models: those who read
weights call `check_weights` first, and each command `check_named`, which finds every path of its configuration. Data
are compared by the fingerprint of what was read, and the folder into which a run writes by `cluster.preflight`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from jaxdist.cluster import kv_store
from jaxdist.cluster.consensus import LEADER_SPEAKS
from jaxdist.cluster.rendezvous import members
from jaxdist.config import Config, RequestError, leaves
from jaxdist.huggingface.file_digests import ABSENT, SMALL, SMALL_PART, FileDigest, digests_of
from jaxdist.huggingface.folder import KEPT
from jaxdist.huggingface.schema import FILES

ELSEWHERE = {"data.path", "data.validation_path", "run_dir"}
"""Paths of a configuration that something else compares."""

OF_FOLDER = ("config.toml", *FILES, *(f"{KEPT}/{name}" for name in FILES))
"""Files that are read beside the weights in a folder: that of a run, of Hugging Face, or of a tokenizer."""

LISTED = 8
"""Processes that a sentence names at most."""

DIGITS = 4
"""Digits of the digest of a tensor that suffice to name it, once it is known that some tensor differs."""

Brief = Mapping[str, tuple[str, str]]
"""Of each file the digest of the whole, and the first `DIGITS` of the digest of each tensor."""

_comparisons = itertools.count()
"""Numbers them: every process makes the same ones, in the same order."""


class Difference(NamedTuple):
    """The first file in which a process differs from the leader."""

    file: str
    how: str
    """Whether the process `lacks` the file, `adds` it, or `changes` it."""
    tensors: str
    """Which tensors differ, in words, where that is known."""


def check_named(config: Config, reads_run: bool = False) -> None:
    """Compare the small files of all folders and files that a configuration names: tokenizer, template, `config.json`.

    With `reads_run` also those of the folder of the run itself, into which nothing is written. Raises as
    `check_copies`.
    """
    paths = [path for name, path in paths_in(config).items() if name not in ELSEWHERE]
    if reads_run:
        paths.append(config.folder)
    check_copies({str(file): file for path in paths for file in small_files(path)}, SMALL)


def paths_in(config: Config) -> dict[str, Path]:
    """Return the knobs that are paths, by name."""
    return {name: value for name, value in leaves(config).items() if isinstance(value, Path)}


def small_files(path: Path) -> list[Path]:
    """Return the files that are read of a path beside weights and steps; they need not be there.

    It names a file, a folder, or the folder of a step in that of a run.
    """
    if path.is_file():
        return [path]
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    return [folder / name for name in OF_FOLDER]


def check_weights(folder: Path, files: Iterable[Path]) -> None:
    """Compare parts of weights in a folder, which processes may know by other paths. Raises as `check_copies`."""
    check_copies({str(file.relative_to(folder)): file for file in files}, SMALL_PART)


def check_copies(files: Mapping[str, Path], small: int) -> None:
    """Raise `RequestError`, in all processes, where these files are not the same in all of them.

    All processes call it, in the same order, each with its own path of each file, which need not be there. Of files of
    more than `small` bytes only samples are compared. Does not start JAX's devices.
    """
    if kv_store.processes() == 1:
        return
    digests = digests_of(files.values(), small)
    found = {name: digests[path] for name, path in files.items()}
    number = next(_comparisons)
    if len(set(kv_store.gather(f"copies/{number}", _digest(found), kv_store.WEEK))) == 1:
        return
    # Only now what is in them crosses: it has a part for each tensor.
    if kv_store.process() == 0:
        kv_store.post(f"copies of the leader/{number}", json.dumps(brief(found)))
    there = json.loads(kv_store.read(f"copies of the leader/{number}"))
    differences = kv_store.gather(f"differences/{number}", difference(found, there), kv_store.WEEK)
    hosts = {member.process: member.host for member in members()}
    if kv_store.process() != 0:
        time.sleep(LEADER_SPEAKS)
        raise RequestError("process 0 has refused the request, and says why")
    raise RequestError(*refusals(differences, files, hosts))


def brief(found: Mapping[str, FileDigest]) -> Brief:
    """Return what the others need to see where their files differ."""
    return {
        name: (digest.whole, "".join(one[:DIGITS] for one in digest.tensors.values())) for name, digest in found.items()
    }


def difference(found: Mapping[str, FileDigest], there: Brief) -> Difference | None:
    """Return the first file that differs here from that of the leader, and how; None where all are the same."""
    for name in sorted({*found, *there}):
        here = found.get(name, FileDigest(ABSENT))
        whole, tensors = there.get(name, (ABSENT, ""))
        if here.whole != whole:
            # Where the headers differ, the tensors may be others.
            return Difference(name, {here.whole: "lacks", whole: "adds"}.get(ABSENT, "changes"), "")
        theirs = [tensors[at : at + DIGITS] for at in range(0, len(tensors), DIGITS)]
        differing = [of for (of, mine), its in zip(here.tensors.items(), theirs, strict=True) if mine[:DIGITS] != its]
        if differing:
            return Difference(name, "changes", f"{len(differing)} of {len(theirs)} tensors, first {differing[0]}")
    return None


def refusals(
    differences: Sequence[Sequence[str] | None], files: Mapping[str, Path], hosts: Mapping[int, str]
) -> list[str]:
    """Return a sentence for each difference from the leader, whose `files` these are, with its processes."""
    processes: dict[Difference, list[int]] = defaultdict(list)
    for process, found in enumerate(differences):
        if found:
            processes[Difference(*found)].append(process)
    leader = _named([0], hosts)
    sentences = []
    for different, having in processes.items():
        file = f"'{files.get(different.file, different.file)}'"
        has = "has" if len(having) == 1 else "have"
        if different.how == "lacks":
            what = f"{has} no {file}, which {leader} has"
        elif different.how == "adds":
            what = f"{has} {file}, which {leader} has not"
        else:
            what = f"{has} another {file} than {leader}"
        if different.tensors:
            what += f" (other numbers in {different.tensors})"
        sentences.append(
            f"{_named(having, hosts)} {what}; copy the same files to all hosts, or name those of a file system that "
            f"they share"
        )
    return sentences


def _named(processes: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return the names of processes, of not too many."""
    names = [f"process {process} on {hosts.get(process, 'an unknown host')}" for process in processes[:LISTED]]
    if len(processes) > LISTED:
        names.append(f"{len(processes) - LISTED} more")
    return " and ".join(names)


def _digest(found: Mapping[str, FileDigest]) -> str:
    text = json.dumps([[name, digest.whole, *digest.tensors.values()] for name, digest in sorted(found.items())])
    return xxhash.xxh3_64_hexdigest(text.encode())
