"""`python -m jaxdist.lab NAME`: run one of the labs; without a name, list them."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, Protocol

from jaxdist.config import RequestError, nearest
from jaxdist.request import Extra, arguments, run

LABS = {
    "fsdp-walkthrough": "one step of fully sharded training, phase by phase: what moves and what every device holds",
    "model-parallel": "one layer on each of two devices: the same result, and a device that always waits",
}
"""Name -> what it shows. Its module, of the same name, has a `measure()` that returns a `Result`."""

JSON = Extra("json", False, "Print one JSON object on standard output, and nothing else.")


class Result(Protocol):
    passed: bool
    """Whether everything that the lab claims was seen."""

    def json(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]:
        """The same for a person."""
        ...


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m jaxdist.lab NAME [--json]\n\nlabs:")
        print("\n".join(f"  {name:<18}{line}" for name, line in LABS.items()))
        return 0
    name, *rest = argv
    if name not in LABS:
        raise RequestError(f"there is no lab '{name}'; {nearest(name, LABS)}")
    asked = arguments(rest, f"lab {name}", f"Shows {LABS[name]}.", positional=None, extras=[JSON], knobs=())
    result: Result = importlib.import_module(f"jaxdist.lab.{name.replace('-', '_')}").measure()
    print(json.dumps(result.json()) if asked.extras["json"] else "\n".join(result.lines()))
    return 0 if result.passed else 1


if __name__ == "__main__":
    run(main)
