"""The frozen weights beside which a LoRA run trains its adapters: where they are, and that they are still the same.

A checkpoint of such a run holds the adapters, and of the base its path and a digest: XXH3 of every file with weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from jaxdist.cluster.consensus import agreed
from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.files import checksum
from jaxdist.huggingface.folder import is_folder, open_folder
from jaxdist.huggingface.folder_arrays import folder_arrays
from jaxdist.huggingface.readable import Readable
from jaxdist.huggingface.reading import read_parameters
from jaxdist.models import Params
from jaxdist.training.checkpoint.manager import BEST, Checkpoints, Found
from jaxdist.training.run_dir import checkpoint_of

if TYPE_CHECKING:
    from jaxdist.training.run import Run

BASE = "base"
"""The fact of a checkpoint that names the base."""


class Base(NamedTuple):
    """The weights beside which adapters are trained."""

    path: Path
    """The folder of Hugging Face, or of a step of a run."""
    digest: str

    def fact(self) -> dict[str, str]:
        """Return what a checkpoint keeps of it."""
        return {"path": str(self.path), "digest": self.digest}


def base_of(init_from: Path) -> Base:
    """Return the base that a run begins with; all processes call this, and the leader reads the files.

    Raises `RequestError` where there is none.
    """
    path = Path(os.path.abspath(init_from))
    if is_folder(path):
        return Base(path, _hexadecimal(agreed(lambda: _digest_of_folder(path))))
    run, which = checkpoint_of(path)
    with Checkpoints(run.path, keep=None) as checkpoints:
        found = checkpoints.find(which)
    name = BEST if which == BEST else str(found.step)
    # The latest step of a run changes as it goes on.
    path = Path(os.path.abspath(run.path)) / "checkpoints" / name
    return Base(path, _hexadecimal(agreed(lambda: _digest_of_step(found))))


def base_for(config: Config, facts: Mapping[str, Any] | None, moved: bool = False) -> Base | None:
    """Return the base of a LoRA run; None for any other run. All processes call this.

    `facts` are those of the checkpoint with its adapters, beside which no other base will do; None for a new run. The
    base is where it was then, or, if it may have `moved`, where `init_from` says. Raises `RequestError` for another
    base, or where it is missing.
    """
    if not config.model.lora_rank:
        return None
    assert config.init_from, "a check has refused a LoRA run without a base"
    if facts is None:
        return base_of(config.init_from)
    recorded = Base(Path(facts[BASE]["path"]), facts[BASE]["digest"])
    where = config.init_from if moved else recorded.path
    trained = f"the adapters were trained beside {recorded.path} of digest {recorded.digest}"
    if not where.exists():
        raise RequestError(f"{trained}, but there is nothing at {where}; put these weights back there")
    found = base_of(where)
    if found.digest != recorded.digest:
        raise RequestError(f"{trained}, but {where} has digest {found.digest}; put the same weights back there")
    return found


def read_base(run: Run, base: Base) -> Params:
    """Return the frozen parameters, as a checkpoint has them; call under `jax.set_mesh`."""
    if is_folder(base.path):
        return read_parameters(base.path, run.config.model, run.abstract_base())
    folder, which = checkpoint_of(base.path)
    with Checkpoints(folder.path, keep=None) as checkpoints:
        params, _ = checkpoints.restore_params(run.abstract_base(), {}, checkpoints.find(which))
    return params


@contextmanager
def base_arrays(base: Base, model: ModelConfig) -> Iterator[Mapping[str, Readable]]:
    """Open the frozen parameters by name, unread, on one machine."""
    if is_folder(base.path):
        with folder_arrays(base.path, model) as arrays:
            yield arrays
        return
    folder, which = checkpoint_of(base.path)
    with Checkpoints(folder.path, keep=None) as checkpoints:
        yield checkpoints.arrays(checkpoints.find(which), "params")


def _digest_of_folder(path: Path) -> int:
    """Return a digest of the names and contents of the files with weights."""
    # A cache of Hugging Face holds links to files that are named by their content.
    return _digest({file.name: checksum(file.resolve())[1] for file in set(open_folder(path).files.values())})


def _digest_of_step(found: Found) -> int:
    """Return a digest of the checksums of the parameters in a step, which was read through when it was found.

    Raises `RequestError` where it has none.
    """
    seal = found.store.step_dir.seal_of(found.step)
    if seal is None:
        raise RequestError(
            f"{found.store.step_dir.path(found.step)} has no checksums, by which a LoRA run would know its base again; "
            f"begin with another step"
        )
    return _digest({name: value for name, (_, value) in seal.files.items() if name.startswith("params/")})


def _digest(checksums: Mapping[str, str]) -> int:
    text = "\n".join(f"{name} {value}" for name, value in sorted(checksums.items()))
    return xxhash.xxh3_64(text.encode()).intdigest()


def _hexadecimal(digest: int) -> str:
    return f"{digest:016x}"
