"""Check that a folder holds the tensors of a model, all of them and no others, from the headers of its files alone."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdist.config import ModelConfig, RequestError
from jaxdist.huggingface.families import Family, sizes_of
from jaxdist.huggingface.folder import Folder, predicts_further
from jaxdist.huggingface.mxfp4 import Packed, packed_weights
from jaxdist.huggingface.parts import pieces_of
from jaxdist.huggingface.safetensors_file import DTYPES, Entry, read_header
from jaxdist.huggingface.type_choice import family_of

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer, or of an expert, in the name of a tensor."""

LISTED = 12
"""Tensors that a problem names at most; one that each layer, or each expert, has counts once."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model in a folder, by the names that they have in `families`."""

    path: Path
    """The folder."""
    files: Mapping[str, Path]
    entries: Mapping[str, Entry | Packed]
    copies: Mapping[str, str]
    """Of these tensors, the one that each has to equal."""
    model_type: str | None = None
    """The type that the folder names."""


def check_tensors(folder: Folder, model: ModelConfig) -> Tensors:
    """Return the tensors of `model` in a folder. No weight is read.

    Raises `RequestError` with a sentence for each kind of problem: tensors that are missing, are not used, or have
    another shape or a dtype that is not read.
    """
    model_type = folder.config.get("model_type")
    family = family_of(model, model_type)
    shapes = _shapes(family, model)
    files, headers = _headers(folder)
    packed = packed_weights(headers)
    parts = {part for one in packed.values() for part in (one.blocks, one.scales)}
    entries: dict[str, Entry | Packed] = {name: entry for name, entry in headers.items() if name not in parts}
    entries |= packed
    names = _names(folder, family, shapes, entries)
    unused = [
        name
        for own, name in names.items()
        if own not in shapes and not family.ignored.fullmatch(name) and not predicts_further(folder.config, own)
    ]
    used = {own: name for own, name in names.items() if own in shapes}
    copies = {copy: table for copy, table in family.copies.items() if copy in used}
    problems = _missing(folder, model, [own for own in shapes if own not in used and own not in family.copies])
    if unused:
        problems.append(
            f"'{folder.path}' holds tensors that this model does not use: {_listed(unused)}; its config.json does not "
            f"describe the model that they are of"
        )
    problems += _other_forms(folder, shapes, used, entries, copies)
    if problems:
        raise RequestError(*problems)
    found = Tensors(
        folder.path,
        {own: files[name] for own, name in used.items() if name in files} | {part: files[part] for part in parts},
        {own: entries[name] for own, name in used.items()} | {part: headers[part] for part in parts},
        copies,
        model_type,
    )
    return _parted(found, family, model)


def _shapes(family: Family, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the model by its name, with the copies that a file may hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, _, piece, _ in pieces_of(family, sizes_of(model)):
        before = shapes[name][0] if name in shapes else 0
        shapes[name] = (before + piece.shape[0], *piece.shape[1:])
    for copy, table in family.copies.items():
        shapes[copy] = shapes[table]
    return shapes | dict.fromkeys(family.constants_of(model), ())


def _parted(tensors: Tensors, family: Family, model: ModelConfig) -> Tensors:
    """Return the same with the parts of fused tensors, by their names: each is some rows, one run of bytes."""
    files = dict(tensors.files)
    entries = dict(tensors.entries)
    starts: dict[str, int] = {}
    for name, _, piece, place in pieces_of(family, sizes_of(model)):
        own = piece.name(place)
        if own == name:
            continue
        entry = entries[name]
        assert isinstance(entry, Entry), name
        start = starts.get(name, entry.start)
        stop = start + math.prod(piece.shape) * DTYPES[entry.dtype].size
        entries[own] = Entry(entry.dtype, piece.shape, start, stop)
        files[own] = files[name]
        starts[name] = stop
    return replace(tensors, files=files, entries=entries)


def _headers(folder: Folder) -> tuple[dict[str, Path], dict[str, Entry]]:
    """Return (file, entry) of each tensor in the files of a folder. Raises `RequestError` where they contradict."""
    problems = []
    files: dict[str, Path] = {}
    entries: dict[str, Entry] = {}
    for path in sorted(set(folder.files.values())):
        for name, entry in read_header(path).items():
            if name in files:
                problems.append(f"tensor {name} is in '{files[name]}' and in '{path}'; remove one of them")
            files[name] = path
            entries[name] = entry
    absent = [name for name in folder.files if name not in files]
    if absent:
        where = ", ".join(sorted({f"'{folder.files[name]}'" for name in absent}))
        problems.append(
            f"the index of '{folder.path}' names tensors that {where} lacks: {_listed(absent)}; copy it again"
        )
    if problems:
        raise RequestError(*problems)
    return files, entries


def _names(folder: Folder, family: Family, shapes: Mapping[str, object], entries: Iterable[str]) -> dict[str, str]:
    """Return the name in its file of each tensor, by the name that it has in `families`, or in the file."""
    names: dict[str, str] = {}
    for name in entries:
        own = name
        if name not in shapes and family.prefix + name in shapes:
            own = family.prefix + name
        if own in names:
            raise RequestError(f"'{folder.path}' holds both {names[own]} and {name}, which are one; remove one of them")
        names[own] = name
    return names


def _missing(folder: Folder, model: ModelConfig, missing: list[str]) -> list[str]:
    """Return a sentence for tensors that a folder lacks, in a list that may be empty."""
    if not missing:
        return []
    if missing == ["lm_head.weight"]:
        return [
            f"'{folder.path}' lacks lm_head.weight, though its output is not tied; set tie_word_embeddings in "
            f"config.json to true if the model was trained so"
        ]
    return [f"'{folder.path}' lacks tensors of this model: {_listed(missing)}; copy the whole folder"]


def _other_forms(
    folder: Folder,
    shapes: Mapping[str, tuple[int, ...]],
    used: Mapping[str, str],
    entries: Mapping[str, Entry | Packed],
    copies: Mapping[str, str],
) -> list[str]:
    """Return a sentence for tensors of other shapes, and one for dtypes that are not read."""
    reshaped = defaultdict(list)
    unread = defaultdict(list)
    for own, name in used.items():
        entry = entries[name]
        if entry.shape != shapes[own]:
            reshaped[f"{entry.shape} there and {shapes[own]} in this model"].append(name)
        if entry.dtype not in DTYPES:
            unread[entry.dtype].append(name)
    problems = []
    if reshaped:
        each = "; ".join(f"{_listed(names)} is {how}" for how, names in reshaped.items())
        problems.append(
            f"'{folder.path}' holds tensors of other shapes: {each}; its config.json describes another model"
        )
    for dtype, names in unread.items():
        problems.append(
            f"'{folder.path}' holds {_listed(names)} as {dtype}, and only {', '.join(DTYPES)} are read; convert "
            f"quantised weights first"
        )
    for copy, table in copies.items():
        here, there = entries[used[copy]].dtype, entries[used[table]].dtype
        if here != there:
            problems.append(
                f"'{folder.path}' holds {copy} as {here} and {table}, to which it is tied, as {there}; remove {copy}, "
                f"or set tie_word_embeddings in config.json to false if the model was trained so"
            )
    return problems


def _listed(names: Iterable[str]) -> str:
    """Return names as text: those that differ by the numbers of layers and experts as one, `model.layers.{0-27}.x`."""
    alike: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        numbers = tuple(int(number) for number in NUMBER.findall(name))
        alike[tuple(NUMBER.split(name))].append(numbers)
    listed = []
    for parts, found in alike.items():
        for columns in _columns(found):
            texts = [*map(_numbers, columns), ""]
            listed.append("".join(part + text for part, text in zip(parts, texts, strict=True)))
    if len(listed) > LISTED:
        listed[LISTED:] = [f"{len(listed) - LISTED} more"]
    return ", ".join(listed)


def _columns(found: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Return the numbers at each place of names that are alike: all at once, if every combination of them is there.

    Otherwise each combination of numbers after the first (of experts) is by itself.
    """
    columns = [sorted(set(column)) for column in zip(*found, strict=True)]
    if math.prod(len(column) for column in columns) == len(found):
        return [columns]
    layers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for layer, *rest in found:
        layers[tuple(rest)].append(layer)
    return [[numbers, *([number] for number in rest)] for rest, numbers in layers.items()]


def _numbers(numbers: list[int]) -> str:
    """Return numbers of layers as text: `3`, `{0-27}` where none is left out, else `{0,2,5}`."""
    numbers = sorted(numbers)
    first = numbers[0]
    last = numbers[-1]
    if first == last:
        return str(first)
    if numbers == list(range(first, last + 1)):
        return f"{{{first}-{last}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
