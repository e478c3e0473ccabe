"""What a run takes from a folder of Hugging Face: the weights that it begins with, and the small files that it keeps.

A run that goes on needs that folder no more.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.files import write_whole
from jaxdist.huggingface.families import family_of
from jaxdist.huggingface.folder import KEPT, Folder, is_folder, open_folder
from jaxdist.huggingface.model_config import maximum_of
from jaxdist.huggingface.reading import read_parameters
from jaxdist.huggingface.safetensors_file import read_header
from jaxdist.huggingface.schema import INDEX, SMALL_FILES, SOURCE, read_content
from jaxdist.models import Params
from jaxdist.training.checkpoint.finite_state import check_loaded
from jaxdist.training.copies import check_weights

if TYPE_CHECKING:
    from jaxdist.training.run import Run

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes of weights, by their names in a safetensors file."""


def parameters(run: Run, folder: Path) -> Params:
    """Return the parameters of the model from a folder, as a checkpoint has them; call under `jax.set_mesh`.

    Raises `RequestError` before a weight is read, if processes have other weights, or the tensors of the folder are not
    those of the model; and afterwards, if they are not finite.
    """
    model = run.config.model
    check_weights(folder, [folder / INDEX, *sorted(set(open_folder(folder).files.values()))])
    params = read_parameters(folder, model, run.abstract_base())
    theirs = {}
    for leaf in family_of(model).leaves:
        theirs[leaf.path] = ", ".join(piece.name.format(layer="*", expert="*") for piece in leaf.pieces)
    check_loaded(params, f"'{folder}'", "download it again, or name other weights", theirs)
    return params


def keep_files(init_from: Path | None, run: Path) -> None:
    """Copy the small files of the folder that a new run begins with, if it does, into the folder of the run.

    Files that are there from an earlier start, before the run had a checkpoint, are replaced or removed.
    """
    kept = run / KEPT
    contents: dict[str, bytes] = {}
    if init_from and is_folder(init_from):
        names = [name for name in SMALL_FILES if os.path.lexists(init_from / name)]
        contents = {name: read_content(init_from / name) for name in names}
        contents[SOURCE] = json.dumps(_source(open_folder(init_from))).encode()
        kept.mkdir(parents=True, exist_ok=True)
    for name in (*SMALL_FILES, SOURCE):
        if name in contents:
            write_whole(kept / name, contents[name])
        else:
            (kept / name).unlink(missing_ok=True)


def _source(folder: Folder) -> dict[str, object]:
    """Return what an export must know of the folder: the dtype is the one that most of its tensors have."""
    headers = [read_header(path) for path in sorted(set(folder.files.values()))]
    dtypes = Counter(entry.dtype for header in headers for entry in header.values())
    dtype, _ = dtypes.most_common(1)[0]
    # A path that is not UTF-8 is for people only.
    path = str(folder.path.resolve()).encode(errors="replace").decode()
    return {"path": path, "maximum": maximum_of(folder), "dtype": DTYPES[dtype]}
