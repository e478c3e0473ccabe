"""The parameters of the base of a LoRA run, read a part at a time: those of a folder, or of a step of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxdist.config import ModelConfig
from jaxdist.huggingface.folder import is_folder
from jaxdist.huggingface.folder_arrays import folder_arrays
from jaxdist.huggingface.readable import Readable
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.run_dir import checkpoint_of


@contextmanager
def base_arrays(path: Path, model: ModelConfig) -> Iterator[Mapping[str, Readable]]:
    """Open the parameters of `model` that `path`, as an `init_from`, stands for, and yield them by name, unread.

    Raises `RequestError` where they are not there, or are those of another model.
    """
    if is_folder(path):
        with folder_arrays(path, model) as arrays:
            yield arrays
        return
    run, which = checkpoint_of(path)
    with Checkpoints(run.path, keep=None) as checkpoints:
        yield checkpoints.arrays(checkpoints.find(which), "params")
