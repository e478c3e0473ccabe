"""What a run takes over from the weights that it begins with, and what they refuse, before any is read. No jax here."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from jaxdist.config import Config, RequestError
from jaxdist.data.naming.training_paths import training_tokens
from jaxdist.huggingface.folder import open_folder
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, read_tokenizer
from jaxdist.huggingface.schema import TOKENIZER
from jaxdist.request.checks.adapters import check_has_base
from jaxdist.request.checks.experts import check_upcycling, is_upcycled
from jaxdist.training.run_dir import RunFolder
from jaxdist.weights.named import no_weights


def from_nothing(config: Config) -> Config:
    """Return `config`, whose weights are drawn. Raises `RequestError` where something must stand beside given ones."""
    check_has_base(config.model)
    return config


def from_folder(folder: Path, config: Config) -> Config:
    """Return `config`, which has the model and the tokenizer of a folder of Hugging Face already.

    The folder must hold the tensors of the model. Raises `RequestError`.
    """
    # It imports numpy, which most commands that look into the folder of a run do not need.
    from jaxdist.huggingface.tensor_checks import check_tensors

    check_tensors(open_folder(folder), config.model)
    check_tokenizer(folder, config.data.tokenizer)
    return config


def from_run(path: Path, config: Config) -> Config:
    """Return `config` with the tokenizer of the run at `path`, or of the run whose step that is.

    Raises `RequestError` where `config` cannot begin with its weights.
    """
    source, _ = checkpoint_of(path)
    theirs = source.own_config().model
    if theirs.frozen:
        raise RequestError(
            f"init_from {path} is a LoRA run, whose checkpoints hold adapters alone; merge them into the "
            f"weights by: jaxdist checkpoints {source.path} --export FOLDER/, and begin with that folder"
        )
    if is_upcycled(config.model, theirs):
        if config.model.frozen:
            raise RequestError(
                f"init_from {path} is a dense run, of which model.family {config.model.family} would make new "
                f"experts, and {config.model.frozen_by} freezes them; set model.lora_rank to 0"
            )
        check_upcycling(config.model, theirs, source.path)
    data = config.data
    if config.model.images or training_tokens(data):
        return config
    tokenizer = source.load_tokenizer()
    if not data.tokenizer:
        return config.with_knobs({"data.tokenizer": source.tokenizer_source})
    _check_same(data.tokenizer, tokenizer, source.path)
    return config


def checkpoint_of(path: Path) -> tuple[RunFolder, str]:
    """Return the run, and which checkpoint of it, that `--init-from` names. Raises `RequestError` if it names none."""
    if RunFolder(path).config.is_file():
        return opened(path), "latest"
    run = path.parent.parent
    if RunFolder(run).config.is_file() and path.parent.name == "checkpoints":
        return opened(run), path.name
    raise no_weights(path)


def opened(path: Path) -> RunFolder:
    """Return the folder of a run. Raises `RequestError` where a file or a folder in it is something else."""
    run = RunFolder(path)
    run.check_layout()
    return run


def own_tokenizer(run: Path) -> GivenTokenizer | None:
    """Return the tokenizer in the folder of a run; None where its data came as tokens."""
    own = RunFolder(run).tokenizer_source
    return read_tokenizer(own) if own.exists() else None


def checked_tokenizer(folder: Path, named: Path | None) -> GivenTokenizer | None:
    """Return the tokenizer at `named`; None where it names none. Raises `RequestError` as `check_tokenizer` does."""
    check_tokenizer(folder, named)
    return read_tokenizer(named) if named else None


def check_tokenizer(folder: Path, tokenizer: Path | None) -> None:
    """Refuse a tokenizer that is not the one of a folder of Hugging Face, where the folder has one."""
    if tokenizer and tokenizer != folder and (folder / TOKENIZER).is_file():
        _check_same(tokenizer, read_tokenizer(folder).load(), folder)


def _check_same(path: Path, tokenizer: Tokenizer, source: Path) -> None:
    """Refuse the tokenizer at `path` if it has other tokens than `tokenizer`, which is that of `source`."""
    if read_tokenizer(path).load().get_vocab() != tokenizer.get_vocab():
        raise RequestError(
            f"data.tokenizer {path} is not the one of {source}, whose weights know its tokens alone; leave it out"
        )
