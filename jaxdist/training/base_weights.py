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
from jaxdist.files import checksums
from jaxdist.files.json_files import is_unicode
from jaxdist.huggingface.folder import is_folder, open_folder
from jaxdist.huggingface.folder_arrays import folder_arrays
from jaxdist.huggingface.readable import Readable
from jaxdist.models import Params
from jaxdist.training import pretrained
from jaxdist.training.checkpoint.finite_state import check_loaded
from jaxdist.training.checkpoint.manager import BEST, Checkpoints, Found
from jaxdist.training.checkpoint.step_dir import BASE_FACT
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
    if not is_unicode(str(path)):
        raise RequestError(f"'{path}' is not UTF-8, and a checkpoint of a LoRA run names its base; rename the folder")
    if is_folder(path):
        return Base(path, _hexadecimal(agreed(lambda: _digest_of_folder(path))))
    run, which = checkpoint_of(path)
    with Checkpoints(run.path, keep=None) as checkpoints:
        found = checkpoints.find(which)
    # One stands in for the other where that is damaged.
    name = BEST if found.store.step_dir.folder.name == BEST else str(found.step)
    # The latest step of a run changes as it goes on.
    path = Path(os.path.abspath(run.path)) / "checkpoints" / name
    return Base(path, _hexadecimal(agreed(lambda: _digest_of_step(found))))


def base_for(config: Config, facts: Mapping[str, Any] | None, resumes: bool = False) -> Base | None:
    """Return the base of a LoRA run; None for any other run. All processes call this.

    `facts` are those of the checkpoint with its adapters, beside which no other base will do; None for a new run. A run
    that `resumes` may name by `init_from` where its base is now; other commands look there if the base is not where it
    was. Raises `RequestError` for another base, or where it is missing.
    """
    if not config.model.lora_rank:
        return None
    assert config.init_from, "a check has refused a LoRA run without a base"
    if facts is None:
        return base_of(config.init_from)
    recorded = recorded_base(config, facts)
    named = Path(os.path.abspath(config.init_from))
    where = _where(recorded.path, named, resumes)
    trained = f"the adapters were trained beside {recorded.path} of digest {recorded.digest}"
    remedy = (
        f"put the same weights back there, or resume the run with --init-from and their new place (or write it as "
        f"init_from into {config.folder / 'config.toml'})"
    )
    if not agreed(lambda: int(where.exists())):
        raise RequestError(f"{trained}, but there is nothing at {where}; {remedy}")
    found = base_of(where)
    if found.digest != recorded.digest:
        raise RequestError(f"{trained}, but {where} has digest {found.digest}; {remedy}")
    return found


def recorded_base(config: Config, facts: Mapping[str, Any]) -> Base:
    """Return the base that a checkpoint names. Raises `RequestError` where it names none."""
    fact: Any = facts.get(BASE)
    if not BASE_FACT.holds(fact):
        raise RequestError(
            f"step {facts['step']} of {config.folder} does not say beside which weights its adapters were trained, as "
            f"model.lora_rank {config.model.lora_rank} needs; choose another step, or name another run folder"
        )
    return Base(Path(fact["path"]), fact["digest"])


def _where(recorded: Path, named: Path, resumes: bool) -> Path:
    """Return where to look for the base: it was `recorded` there, and `init_from` is `named` now."""
    if resumes:
        # A run is named as a whole, and its latest step is another after it has gone on.
        return recorded if recorded.parent == named / "checkpoints" else named
    moved = agreed(lambda: int(named.exists() and not recorded.exists()))
    return named if moved else recorded


def read_base(run: Run, base: Base) -> Params:
    """Return the frozen parameters, as a checkpoint has them; call under `jax.set_mesh`."""
    if is_folder(base.path):
        return pretrained.parameters(run, base.path)
    folder, which = checkpoint_of(base.path)
    with Checkpoints(folder.path, keep=None) as checkpoints:
        params, _ = checkpoints.restore_params(run.abstract_base(), {}, checkpoints.find(which))
    check_loaded(params, f"the base {base.path}", "name another step as --init-from, in a new run")
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
    """Return a digest of the names and contents of the files with weights. Raises `RequestError`."""
    files = sorted(set(open_folder(path).files.values()))
    try:
        # A cache of Hugging Face holds links to files that are named by their content.
        sums = checksums([file.resolve() for file in files])
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be read ({error.strerror}); make it readable") from error
    return _digest({file.name: digest for file, (_, digest) in zip(files, sums, strict=True)})


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
