"""The weights of a run's checkpoint, on a mesh of today: for evaluation, generation and other uses without training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from tokenizers import Tokenizer

from jaxdist.cluster.consensus import leader
from jaxdist.cluster.runtime import check_computes
from jaxdist.config import Config, RequestError
from jaxdist.huggingface.folder import is_folder, twofold
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, read_tokenizer
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.models import Params
from jaxdist.parallel.partial_trees import joined
from jaxdist.training import pretrained
from jaxdist.training.base_weights import base_for, read_base
from jaxdist.training.checkpoint.finite_state import check_loaded
from jaxdist.training.checkpoint.manager import LATEST, Checkpoints
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder, check_tokenizer


class Trained(NamedTuple):
    """The weights of a run's checkpoint, and the run that they belong to."""

    run: Run
    step: int | None
    """None for the weights of a folder of Hugging Face."""
    params: Params
    variables: Params
    data: str | None
    """Fingerprint of the data that they were trained on; None where nobody knows it."""


def restore(
    config: Config, which: str, batch: bool = True, check: Callable[[Run], object] = lambda run: None
) -> Trained:
    """Return the parameters of step `which` ("latest", "best" or a number) of the run in `config.run_dir`.

    They are the weights themselves where that is a folder of Hugging Face, which has no steps. `check` gets the run
    before any weight is read.
    """
    if is_folder(config.folder):
        return _pretrained(config, which, batch, check)
    RunFolder(config.folder).check_layout()
    # The optimizer state, which may rest in the host's memory, is not read.
    without_offload = config.parallel.model_copy(update={"offload": "none"})
    run = Run(config.model_copy(update={"parallel": without_offload}), batch=batch)
    check_computes(run.mesh)
    check(run)
    with jax.set_mesh(run.mesh), Checkpoints(config.folder, keep=None) as checkpoints:
        found = checkpoints.find(which)
        for note in checkpoints.notes:
            print(f"note: {note}", file=sys.stderr)
        state = run.abstract_logical()
        params, variables = checkpoints.restore_params(state.params, state.variables, found)
        check_loaded(params, f"step {found.step} of {config.folder}", "name another one by --checkpoint")
        facts = checkpoints.facts(found)
        base = base_for(config, facts)
        if base:
            params = joined(read_base(run, base), params)
        return Trained(run, found.step, run.step.folded(params), variables, facts["data"])


def tokenizer_of(folder: Path) -> tuple[Tokenizer, SpecialTokens]:
    """Return the tokenizer of a run, or of a folder of Hugging Face, and its special tokens. Raises `RequestError`."""
    if is_folder(folder):
        given = read_tokenizer(folder)
        return given.load(), given.special
    run = RunFolder(folder)
    run.check_layout()
    tokenizer = run.load_tokenizer()
    return tokenizer, run.load_special_tokens(tokenizer)


def given_tokenizer(config: Config) -> GivenTokenizer | None:
    """Return the tokenizer that the weights in `config.run_dir` know; None where nobody says which one it is.

    It is that of the run, or of the folder of Hugging Face, or else what `config` names. Raises `RequestError`.
    """
    own = RunFolder(config.folder).tokenizer_source
    if not is_folder(config.folder) and own.exists():
        return read_tokenizer(own)
    check_tokenizer(config.folder, config.data.tokenizer)
    return read_tokenizer(config.data.tokenizer) if config.data.tokenizer else None


def _pretrained(config: Config, which: str, batch: bool, check: Callable[[Run], object]) -> Trained:
    """Return the parameters of the folder of Hugging Face at `config.run_dir`."""
    if which != LATEST:
        raise RequestError(f"'{config.folder}' is a folder of Hugging Face, without steps; leave --checkpoint out")
    run = Run(config, batch=batch)
    check_computes(run.mesh)
    check(run)
    if leader() and twofold(config.folder):
        print(f"note: {twofold(config.folder)}", file=sys.stderr)
    with jax.set_mesh(run.mesh):
        params = run.step.folded(pretrained.parameters(run, config.folder))
        return Trained(run, None, params, {}, None)
