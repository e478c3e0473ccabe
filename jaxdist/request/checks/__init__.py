"""Check what a single knob cannot: whether knobs fit each other, the files of this machine, and the mesh."""

from jaxdist.request.checks import (
    adapters,
    crossing,
    experts,
    files,
    float8,
    mesh,
    model,
    pipeline,
    preferences,
    scaled_loss,
    sequence,
    training,
)
from jaxdist.request.checks.files import check_output, check_output_folder, check_picture, means_folder
from jaxdist.request.checks.mesh import Enough, check_mesh_fits, fits, fitting, refilled
from jaxdist.request.checks.registry import CHECKS, problems

__all__ = [
    "CHECKS",
    "Enough",
    "adapters",
    "check_mesh_fits",
    "check_output",
    "check_output_folder",
    "check_picture",
    "crossing",
    "experts",
    "files",
    "fits",
    "fitting",
    "float8",
    "means_folder",
    "mesh",
    "model",
    "pipeline",
    "preferences",
    "problems",
    "refilled",
    "scaled_loss",
    "sequence",
    "training",
]
