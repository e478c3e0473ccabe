"""Read measured times of steps: of runs (`metrics.jsonl`), and of `bench step --json`."""

from __future__ import annotations

import glob
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import Config, RequestError
from jaxdist.files.json_files import parse_json, read_json, read_text
from jaxdist.mesh import fill, parse_mesh
from jaxdist.request.commandline import STEP_KNOBS
from jaxdist.request.reading import load

WARMUP = 2
"""Lines at the beginning of a run that do not count: their steps compile, or wait for the first rows."""


@dataclass(frozen=True)
class Measured:
    """A step that was measured."""

    name: str
    """The file."""
    config: Config
    """Its mesh is filled, and its precision is not `auto`."""
    seconds: float
    """The median."""
    device: str
    """The kind of its devices, as JAX names it."""


def measured_steps(paths: Iterable[str]) -> list[Measured]:
    """Return the steps that files hold, of which each may be a pattern.

    Raises `RequestError` with a sentence for each file that holds none.
    """
    found: list[Measured] = []
    problems = []
    for path in paths:
        names = sorted(glob.glob(path)) or [path]
        for name in names:
            try:
                found += _read(Path(name))
            except RequestError as error:
                problems += [f"--fit {name}: {problem}" for problem in error.problems]
            except (KeyError, TypeError, ValueError) as error:
                problems.append(f"--fit {name} is neither metrics.jsonl of a run nor of bench step --json: {error!r}")
    if problems:
        raise RequestError(*problems)
    return found


def _read(path: Path) -> Iterator[Measured]:
    """Yield the steps of one file."""
    # The last line of a run that goes on may be half written.
    lines = read_text(path).splitlines(keepends=True)
    whole = [parse_json(line) for line in lines if line.strip() and (line.endswith("\n") or line is lines[0])]
    if path.name == "metrics.jsonl":
        yield _of_run(path, whole)
        return
    for result in whole:
        if "config" not in result:
            raise RequestError("has no `config`: it is from an older bench step; measure anew")
        config = Config.model_validate_json(json.dumps(result["config"]))
        config = _filled(config, result["devices"])
        yield Measured(str(path), config, result["step_seconds"], result["device"])


def _of_run(path: Path, lines: list[dict[str, Any]]) -> Measured:
    """Return the median step of a run, whose folder says how it was split."""
    folder = path.parent
    took = [line["step_seconds"] for line in lines if "step_seconds" in line][WARMUP:]
    if not took:
        raise RequestError(f"has no step after the first {WARMUP}, which compile; train for longer")
    devices = read_json(folder / "environment.json")["devices"]
    config = load(str(folder / "config.toml"), {}, knobs=STEP_KNOBS)
    # `cpu:0 (cpu)`, `cuda:0 (NVIDIA H100 80GB HBM3)`
    kind = devices[0].partition("(")[2].removesuffix(")")
    return Measured(str(path), _filled(config, len(devices)), statistics.median(took), kind)


def _filled(config: Config, devices: int) -> Config:
    """Return a configuration whose mesh has the size of every axis."""
    shape = fill(parse_mesh(config.mesh), devices)
    return config.model_copy(update={"mesh": ",".join(f"{axis}={size}" for axis, size in shape.items())})
