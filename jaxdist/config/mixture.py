"""What `data.mixture` says: sources with weights, and phases in which the weights are others.

In a TOML file it is a table. Its keys are paths, as data.path takes them, with weights, which need not add up to 1:

    [data.mixture]
    "web.jsonl" = 0.7
    code = {path = "src/**/*.py", weight = 0.3}     # with a name, by which metrics and phases call it
    wiki = {path = "wiki", weight = 0.1, text = "content"}  # where the text of its rows is, as data.text says of others

    [[data.mixture.phase]]
    from = 0.9                                      # of the steps of the run; or after a number of steps, such as 9000
    "web.jsonl" = 0.2
    code = 0.8

On the command line it is a text, "web.jsonl*0.7,src*0.3", without phases.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.text_template import parse as parse_text

PHASE = "phase"
FROM = "from"

SMALLEST_SHARE = Fraction(1, 10**6)
"""Shares are rounded to millionths."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"

WEIGHTED = re.compile(rf"(?P<path>.*\S)\s*\*\s*(?P<weight>{NUMBER})", re.IGNORECASE)
"""A path with a weight, in the short form."""

WEIGHTED_OTHERWISE = re.compile(
    rf"(?P<path>.*[^\s:=*])\s*[:=*]\s*(?P<weight>{NUMBER})\s*%?|(?P<before>{NUMBER})\s*\*\s*(?P<behind>\S.*)",
    re.IGNORECASE,
)
"""A path with a weight as other programs write it, or with a sign of per cent."""

NAMED = '{path = "a.jsonl", weight = 0.5}'
"""A source with a name."""

LISTED = 6
"""Sources of a phase that a sentence names at most."""


class MixtureSource(NamedTuple):
    """One of the sources that are mixed."""

    name: str
    path: str
    """What names its files, as data.path."""
    text: str | None = None
    """Where the text of its rows is; None where data.text says it."""


class MixturePhase(NamedTuple):
    """Weights that hold from a part of the run on."""

    begins: float
    """The number of steps before it; below 1 a fraction of the steps of the run."""
    weights: tuple[float, ...]
    """Of each source."""


class MixtureConfig(NamedTuple):
    """Sources that are mixed by weight."""

    sources: tuple[MixtureSource, ...]
    phases: tuple[MixturePhase, ...]
    """The first one begins at 0."""

    def weights(self, phase: MixturePhase) -> dict[str, float]:
        """Return the weights in a phase by the names of the sources."""
        return {source.name: weight for source, weight in zip(self.sources, phase.weights, strict=True)}

    def steps_before(self, phase: MixturePhase, steps: int) -> int:
        """Return the number of steps before a phase in a run of `steps`."""
        return int(phase.begins) if phase.begins >= 1 else round(Fraction(str(phase.begins)) * steps)

    def problems(self, steps: int) -> Iterator[str]:
        """Yield a sentence for each phase that begins too early or too late in a run of `steps`."""
        before = 0
        for phase in self.phases[1:]:
            first = self.steps_before(phase, steps)
            if first >= steps:
                yield (
                    f"a phase of data.mixture begins after {first} steps, and the run has {steps} (train.steps); begin "
                    "it earlier, or leave it out"
                )
            elif first <= before:
                yield (
                    f"a phase of data.mixture begins after {first} steps, and the one before it after {before}; put "
                    "them in order, at least a step apart"
                )
            before = first

    def __str__(self) -> str:
        texts = []
        for number, phase in enumerate(self.phases):
            shares = describe_shares(self.weights(phase))
            texts.append(f"from {phase.begins:g} on {shares}" if number else shares)
        return "; ".join(texts)

    def table(self) -> dict[str, Any]:
        """Return it as `parse` takes it."""
        table: dict[str, Any] = {}
        for source, weight in zip(self.sources, self.phases[0].weights, strict=True):
            if source == MixtureSource(source.path, source.path):
                table[source.name] = weight
            else:
                own = {"text": source.text} if source.text else {}
                table[source.name] = {"path": source.path, "weight": weight, **own}
        later = [{FROM: phase.begins, **self.weights(phase)} for phase in self.phases[1:]]
        return {**table, PHASE: later} if later else table

    def toml(self) -> str:
        """Return it as a value of TOML, in one line."""
        return _toml(self.table())


def parse(value: object) -> MixtureConfig:
    """Return the mixture that a table or a short text says. Raises `ValueError` with the reason if it says none."""
    if isinstance(value, MixtureConfig):
        return value
    if isinstance(value, str):
        return of_parts(value.split(","))
    if not isinstance(value, Mapping):
        raise ValueError('must be a table of sources with weights, or a text such as "web.jsonl*0.7,code*0.3"')
    table = dict(value)
    later = table.pop(PHASE) if isinstance(table.get(PHASE), list) else []
    sources = []
    weights = []
    for name, said in table.items():
        source, weight = _source(name, said)
        sources.append(source)
        weights.append(weight)
    names = [source.name for source in sources]
    phases = [MixturePhase(0, tuple(weights)), *(_phase(number, said, names) for number, said in enumerate(later, 2))]
    return _checked(MixtureConfig(tuple(sources), tuple(phases)))


def of_parts(parts: Sequence[str]) -> MixtureConfig:
    """Return the mixture of the parts of a short text, such as "web.jsonl*0.7". Raises `ValueError`."""
    sources = []
    weights = []
    for part in parts:
        said = WEIGHTED.fullmatch(part.strip())
        if not said:
            raise ValueError(f"'{part.strip()}' has no weight; end each part with one, such as '{part.strip()}*0.5'")
        path = str(Path(said["path"]))
        sources.append(MixtureSource(path, path))
        weights.append(_weight(path, float(said["weight"])))
    return _checked(MixtureConfig(tuple(sources), (MixturePhase(0, tuple(weights)),)))


def otherwise(part: str) -> str:
    """Return the form that data.path has for a path with a weight that is written otherwise; empty for other texts."""
    said = WEIGHTED_OTHERWISE.fullmatch(part.strip())
    return f"{said['path'] or said['behind']}*{said['weight'] or said['before']}" if said else ""


def describe_shares(weights: Mapping[str, float]) -> str:
    """Return the shares of the sources that have one, the largest first."""
    total = sum(weights.values())
    shares = sorted(((weight / total, name) for name, weight in weights.items() if weight), key=lambda one: -one[0])
    named = [f"{name} {100 * share:.4g} %" for share, name in shares[:LISTED]]
    return ", ".join([*named, *([f"and {len(shares) - LISTED} more"] if len(shares) > LISTED else [])])


def _source(name: str, said: object) -> tuple[MixtureSource, float]:
    """Return a source and its weight."""
    if not name or "\0" in name:
        raise ValueError("a source has no name; give its path")
    if not isinstance(said, Mapping):
        return MixtureSource(name, str(Path(name))), _weight(name, said)
    if set(said) - {"text"} != {"path", "weight"} or not isinstance(said["path"], str) or not said["path"]:
        raise ValueError(f"'{name}' must be a weight, or have both a path and a weight: {NAMED}")
    return MixtureSource(name, str(Path(said["path"])), _text(name, said.get("text"))), _weight(name, said["weight"])


def _text(name: str, said: object) -> str | None:
    """Return where the text of the rows of a source is, if it says so."""
    if said is None:
        return None
    if not isinstance(said, str):
        raise ValueError(f"the text of '{name}' is {json.dumps(said, default=str)}; name a key, such as \"content\"")
    try:
        parse_text(said)
    except ValueError as error:
        raise ValueError(f"the text of '{name}' is {json.dumps(said)}: {error}") from None
    return said


def _weight(name: str, said: object) -> float:
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise ValueError(f"the weight of '{name}' is {json.dumps(said, default=str)}; give a number")
    if not math.isfinite(said) or said < 0:
        raise ValueError(f"the weight of '{name}' is {said}; give a finite number, 0 or more")
    return said


def _phase(number: int, said: object, names: Sequence[str]) -> MixturePhase:
    """Return a phase that a table says; `number` counts the phases from 1."""
    if not isinstance(said, Mapping) or FROM not in said:
        raise ValueError(f"phase {number} does not say where it begins; add from = 0.9, or from = 9000 (steps)")
    begins = said[FROM]
    whole = isinstance(begins, int) and not isinstance(begins, bool) and begins >= 1
    if not whole and not (isinstance(begins, float) and 0 < begins < 1):
        raise ValueError(
            f"phase {number} begins from {begins}; give a part of the run, such as 0.9, or a whole number of steps"
        )
    unknown = [name for name in said if name != FROM and name not in names]
    if unknown:
        raise ValueError(
            f"phase {number} has a weight of '{unknown[0]}', which is no source of the mixture; add it to the mixture, "
            "with a weight of 0 if it begins later"
        )
    return MixturePhase(begins, tuple(_weight(name, said.get(name, 0)) for name in names))


def _checked(mixture: MixtureConfig) -> MixtureConfig:
    """Return the mixture. Raises `ValueError` where it makes no sense whatever the data are."""
    if not mixture.sources:
        raise ValueError("it has no sources; give a path and a weight for each")
    paths = [source.path for source in mixture.sources]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise ValueError(f"it names '{twice}' {paths.count(twice)} times; give one weight to it")
    for number, phase in enumerate(mixture.phases, 1):
        total = sum(Fraction(str(weight)) for weight in phase.weights)
        if not total:
            raise ValueError(f"{_of_phase(mixture, number)} are all 0; give one of them more")
        for source, weight in zip(mixture.sources, phase.weights, strict=True):
            if 0 < Fraction(str(weight)) < SMALLEST_SHARE * total:
                raise ValueError(
                    f"the weight of '{source.name}' is less than a millionth of all, and gives no row; raise it, or "
                    "leave it out"
                )
    for source, *of_source in zip(mixture.sources, *(phase.weights for phase in mixture.phases), strict=True):
        if not any(of_source):
            raise ValueError(f"'{source.name}' has a weight of 0 in every phase; raise it, or leave it out")
    for earlier, later in zip(mixture.phases[1:], mixture.phases[2:], strict=False):
        if (earlier.begins < 1) == (later.begins < 1) and earlier.begins >= later.begins:
            raise ValueError(
                f"a phase from {later.begins:g} on follows one from {earlier.begins:g} on; put them in order"
            )
    return mixture


def _of_phase(mixture: MixtureConfig, number: int) -> str:
    return f"the weights of phase {number}" if len(mixture.phases) > 1 else "the weights"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        entries = (f"{json.dumps(key, ensure_ascii=False)} = {_toml(one)}" for key, one in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
