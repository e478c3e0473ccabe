"""What a request learns of the weights that it names by `init_from`, before any of them is read. No jax here."""

from __future__ import annotations

from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.files import read_toml
from jaxdist.huggingface.folder import KEPT, base_of_adapters, is_adapters, is_folder, other_form


def model_folder(init_from: Path | None, run: Path | None = None) -> Path | None:
    """Return the folder of Hugging Face that gives the model of a request; None where the request itself does.

    Where that folder is there no more, it is what the `run` that began with it keeps of it. Of adapters of PEFT it is
    that of their base.
    """
    if init_from is None:
        return None
    if run and not init_from.exists() and _began_with(run, init_from) and is_folder(run / KEPT):
        return run / KEPT
    if is_adapters(init_from):
        return base_of_adapters(init_from)
    return init_from if is_folder(init_from) else None


def small_files(path: Path) -> Path:
    """Return the folder with the small files of Hugging Face that belong to the weights at `path`."""
    return model_folder(path) or path / KEPT


def needs_tokenizer(init_from: Path | None) -> str:
    """Return why no tokenizer can be trained for these weights; empty where one can."""
    folder = model_folder(init_from)
    if folder is None:
        return ""
    return (
        f"'{folder}' has no tokenizer.json, and its weights know the tokens of one tokenizer alone; give "
        f"that one as data.tokenizer, or data that are tokens already (.bin)"
    )


def check_described(init_from: Path | None) -> None:
    """Raise `RequestError` for a run: commands that only describe one take the model of a folder, and no weights."""
    if init_from is None or model_folder(init_from):
        return
    if not any((run / "config.toml").is_file() for run in (init_from, init_from.parent.parent)):
        raise no_weights(init_from)
    raise RequestError(
        f"init_from '{init_from}' is not a folder of Hugging Face with a config.json, and only the model of "
        f"such a folder has an effect on this command; leave it out, and name the config.toml of a run as CONFIG"
    )


def no_weights(init_from: Path) -> RequestError:
    """Return the error for an `init_from` that is nothing with which a run could begin."""
    return RequestError(
        other_form(init_from)
        or f"init_from {init_from} is neither the folder of a run nor a checkpoint in one, nor a folder of Hugging "
        f"Face with a config.json; name one, such as runs/gpt_tiny, or runs/gpt_tiny/checkpoints/best"
    )


def _began_with(run: Path, init_from: Path) -> bool:
    """Return whether the run in this folder began with `init_from`."""
    try:
        return read_toml(run / "config.toml").get("init_from") == str(init_from)
    except (OSError, ValueError):
        return False
