"""Turn a TOML file and a command line into a checked `Config`; report all problems together. No jax here."""

from jaxdist.request.checks import (
    Enough,
    check_mesh_fits,
    check_output,
    check_output_folder,
    check_picture,
    fits,
    fitting,
    means_folder,
    refilled,
)
from jaxdist.request.commandline import JOB_KNOBS, LAYOUT_KNOBS, STEP_KNOBS, Request, arguments, outcome, run
from jaxdist.request.options import JSON, Extra
from jaxdist.request.reading import DEFAULT, SHIPPED, load, to_toml

__all__ = [
    "DEFAULT",
    "JOB_KNOBS",
    "JSON",
    "LAYOUT_KNOBS",
    "SHIPPED",
    "STEP_KNOBS",
    "Enough",
    "Extra",
    "Request",
    "arguments",
    "check_mesh_fits",
    "check_output",
    "check_output_folder",
    "check_picture",
    "fits",
    "fitting",
    "load",
    "means_folder",
    "outcome",
    "refilled",
    "run",
    "to_toml",
]
