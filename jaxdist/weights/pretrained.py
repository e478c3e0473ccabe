"""The weights of a folder of Hugging Face: to begin a run with, as the base of adapters, and for use without training.

Of the folder that it begins with, a run keeps the small files, and then needs it no more.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxdist.cluster.consensus import leader
from jaxdist.files import write_whole
from jaxdist.huggingface.chat_template import find_chat_template, folder_of, template_folder
from jaxdist.huggingface.folder import ADAPTER_WEIGHTS, KEPT, Folder, open_folder
from jaxdist.huggingface.model_config import maximum_of
from jaxdist.huggingface.peft_reading import PeftAdapter
from jaxdist.huggingface.reading import Keep, as_it_is, read_parameters
from jaxdist.huggingface.safetensors_file import DTYPES, read_header
from jaxdist.huggingface.schema import CONFIG, GENERATION, INDEX, SMALL_FILES, SOURCE, read_content
from jaxdist.huggingface.type_choice import family_of
from jaxdist.models import Params
from jaxdist.sharding import name_of
from jaxdist.training.checkpoint.finite_state import check_loaded
from jaxdist.training.copies import check_weights
from jaxdist.training.forward.step import TrainState
from jaxdist.weights.digests import digest_of_files

if TYPE_CHECKING:
    from jaxdist.training.run import Run


def begin(run: Run, folder: Path, say: Callable[[str], None]) -> TrainState:
    """Return the state before the first step of `run` with these weights; call under `jax.set_mesh`."""
    params = parameters(run, folder, run.engine.abstract_params())
    say(f"weights     from {folder}; the optimizer begins anew, and its warm-up with it")
    return run.engine.begin(params, {})


def restore(run: Run, folder: Path, notes: Sequence[str]) -> Params:
    """Return the weights, and print `notes` on them before they are read; call under `jax.set_mesh`."""
    if leader():
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    return parameters(run, folder, run.engine.abstract_params())


def digest(folder: Path) -> str:
    """Return a digest of the names and contents of the files with weights. All processes call this.

    Raises `RequestError` where one cannot be read.
    """
    return digest_of_files(
        folder, lambda: sorted({str(file.relative_to(folder)) for file in open_folder(folder).files.values()})
    )


def parameters(run: Run, folder: Path, abstract: Params, keep: Keep = as_it_is) -> Params:
    """Return the parameters of the model from a folder, laid out as `abstract`; call under `jax.set_mesh`.

    Each is replaced by what `keep` makes of it before the next one is read.
    Raises `RequestError` before a weight is read, if processes have other weights, or the tensors of the folder are not
    those of the model; and afterwards, if they are not finite.
    """
    model = run.config.model
    held = open_folder(folder)
    check_weights(folder, [folder / INDEX, *sorted(set(held.files.values()))])
    params = read_parameters(folder, model, abstract, keep)
    theirs = {}
    for leaf in family_of(model, held.config.get("model_type")).leaves:
        theirs[leaf.path] = ", ".join(piece.names for piece in leaf.pieces)
    check_loaded(params, f"'{folder}'", "download it again, or name other weights", theirs)
    return params


def adapters(run: Run, folder: Path) -> Params:
    """Return the adapters of a folder of PEFT, as a checkpoint of `run` has them; call under `jax.set_mesh`."""
    check_weights(folder, [folder / ADAPTER_WEIGHTS])
    arrays = PeftAdapter(folder).arrays(run.config.model)

    def placed(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(like.shape, like.sharding, arrays[name_of(path)].__getitem__)

    params = jax.tree.map_with_path(placed, run.engine.abstract_params())
    check_loaded(params, f"'{folder}'", "name other adapters")
    return params


def kept_files(folder: Path) -> dict[str, bytes]:
    """Return the contents, by name, of the small files that a run keeps of a folder, and what an export must know."""
    contents = {name: read_content(folder / name) for name in SMALL_FILES if os.path.lexists(folder / name)}
    return contents | {SOURCE: json.dumps(_source(open_folder(folder))).encode()}


def files_to_keep(beginning: Mapping[str, bytes], tokenizer: Path | None) -> dict[str, bytes]:
    """Return the contents, by name, of the small files that a run keeps: of its `beginning`, and of its tokenizer.

    Conversations are learned with the chat template of the tokenizer, and its files name the tokens in it: they are all
    from the same folder.
    """
    chats = chat_files(tokenizer)
    replaced = SMALL_FILES if chats else ()
    own = {name: content for name, content in beginning.items() if name in (CONFIG, GENERATION) or name not in replaced}
    return own | chats


def chat_files(tokenizer: Path | None) -> dict[str, bytes]:
    """Return the contents, by name, of the files of a tokenizer's folder that has a chat template; else nothing.

    So a run that began with no weights can be talked to, and exported with its template.
    """
    if tokenizer is None or find_chat_template(folder_of(tokenizer)) is None:
        return {}
    source = template_folder(folder_of(tokenizer))
    names = [name for name in SMALL_FILES if name not in (CONFIG, GENERATION)]
    return {name: read_content(source / name) for name in names if os.path.lexists(source / name)}


def keep_files(contents: Mapping[str, bytes], run: Path) -> None:
    """Write the files that a new run keeps of the weights that it begins with, by name, into the folder `run`.

    Files that are there from an earlier start, before the run had a checkpoint, are replaced or removed.
    """
    kept = run / KEPT
    if contents:
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
    return {"path": path, "maximum": maximum_of(folder), "dtype": DTYPES[dtype].name}
