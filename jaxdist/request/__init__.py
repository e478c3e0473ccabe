"""From what a person asks for to a checked `Config`: TOML file, command line, every mistake at once. No jax here."""

from jaxdist.request.checks import Enough, check_mesh_fits, check_output, check_picture, fits, fitting
from jaxdist.request.commandline import (
    DONE,
    FAILED,
    JOB_KNOBS,
    LAYOUT_KNOBS,
    STEP_KNOBS,
    Asked,
    Extra,
    arguments,
    outcome,
    run,
)
from jaxdist.request.reading import DEFAULT, SHIPPED, load, to_toml

__all__ = [
    "DEFAULT",
    "DONE",
    "FAILED",
    "JOB_KNOBS",
    "LAYOUT_KNOBS",
    "SHIPPED",
    "STEP_KNOBS",
    "Asked",
    "Enough",
    "Extra",
    "arguments",
    "check_mesh_fits",
    "check_output",
    "check_picture",
    "fits",
    "fitting",
    "load",
    "outcome",
    "run",
    "to_toml",
]
