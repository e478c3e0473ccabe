"""What single knobs cannot say: whether they fit each other, this machine's files, and the mesh. A file per story."""

from jaxdist.request.checks import files, mesh, model, pipeline, training
from jaxdist.request.checks.files import check_output, check_picture
from jaxdist.request.checks.mesh import Enough, check_mesh_fits, fits, fitting
from jaxdist.request.checks.registry import CHECKS, problems

__all__ = [
    "CHECKS",
    "Enough",
    "check_mesh_fits",
    "check_output",
    "check_picture",
    "files",
    "fits",
    "fitting",
    "mesh",
    "model",
    "pipeline",
    "problems",
    "training",
]
