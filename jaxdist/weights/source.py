"""Where weights come from: a folder of Hugging Face, a run or one of its steps, or nowhere, and then they are drawn.

A path becomes a source by `source_of`, and what differs from one kind to another is a question to the source; what a
request asks, before it is complete, is in `weights.named`. Modules that read arrays with jax are imported by the
methods that need them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.huggingface.folder import layers_left_out, twofold
from jaxdist.weights import inheriting
from jaxdist.weights.named import model_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from jaxdist.huggingface.given_tokenizer import GivenTokenizer
    from jaxdist.huggingface.readable import Readable
    from jaxdist.huggingface.special_tokens import SpecialTokens
    from jaxdist.models import Params
    from jaxdist.training.forward.step import TrainState
    from jaxdist.training.run import Run
    from jaxdist.weights.quantized_base import Holding


class Restored(NamedTuple):
    """Weights for use without training, as a checkpoint has them."""

    step: int | None
    """None for a folder of Hugging Face, which has no steps."""
    params: Params
    variables: Params
    facts: Mapping[str, Any]
    """Those of the step; {} for a folder."""


class Source(ABC):
    """Weights that a run begins with."""

    def notes(self) -> list[str]:
        """Return sentences on how these weights are understood."""
        return []

    def kept_files(self) -> dict[str, bytes]:
        """Return the contents, by name, of the small files that a run keeps of its beginning."""
        return {}

    @abstractmethod
    def inherit(self, config: Config) -> Config:
        """Return `config` with the tokenizer that these weights know, and refuse another one.

        Data that are already tokens cannot be checked. Raises `RequestError` where the run cannot begin with them.
        """

    def trained(self, run: Run) -> Params | None:
        """Return the parameters that are trained beside frozen ones; None for new ones.

        Call under `jax.set_mesh`.
        """
        return None

    @abstractmethod
    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state before the first step, and `say` where the weights are from; call under `jax.set_mesh`."""


class New(Source):
    """No weights: new ones are drawn."""

    def inherit(self, config: Config) -> Config:
        """Return `config`; refuse adapters, which have nothing to stand beside."""
        return inheriting.from_nothing(config)

    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state with new weights."""
        return run.engine.init()


@dataclass(frozen=True)
class Stored(Source):
    """Weights on disk."""

    path: Path

    @abstractmethod
    def lasting(self) -> tuple[Path, str]:
        """Return the path by which they are found again, and their digest. All processes call this.

        Raises `RequestError` where there are none.
        """

    @abstractmethod
    def frozen(self, holding: Holding) -> Params:
        """Return the parameters that stand frozen beside the adapters of a run, as it holds them.

        Call under `jax.set_mesh`.
        """

    @abstractmethod
    def arrays(self, model: ModelConfig) -> AbstractContextManager[Mapping[str, Readable]]:
        """Open the parameters by name, unread, on one machine."""

    @abstractmethod
    def check_step(self, which: str) -> None:
        """Raise `RequestError` where they have no step `which` ("latest", "best" or a number) to be used."""

    @abstractmethod
    def restore(self, run: Run, which: str) -> Restored:
        """Return the weights of step `which` for use without training; call under `jax.set_mesh`."""

    @abstractmethod
    def tokenizer(self) -> tuple[Tokenizer, SpecialTokens]:
        """Return their tokenizer and its special tokens. Raises `RequestError`."""

    @abstractmethod
    def given_tokenizer(self, named: Path | None) -> GivenTokenizer | None:
        """Return the tokenizer that they know, or else the one at `named`; None where there is neither.

        Raises `RequestError` where `named` is another one.
        """


class Pretrained(Stored):
    """A folder of Hugging Face."""

    def notes(self) -> list[str]:
        """Return which weights count, where the folder holds them twice, and which are left out."""
        return [note for note in (twofold(self.path), layers_left_out(self.path)) if note]

    def kept_files(self) -> dict[str, bytes]:
        """Return the small files of the folder, and what an export must know of it."""
        from jaxdist.weights import pretrained

        return pretrained.kept_files(self.path)

    def inherit(self, config: Config) -> Config:
        """Return `config`, which has the model and the tokenizer of the folder already; check its tensors."""
        return inheriting.from_folder(self.path, config)

    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state with the weights of the folder."""
        from jaxdist.weights import pretrained

        return pretrained.begin(run, self.path, say)

    def lasting(self) -> tuple[Path, str]:
        """Return the folder and a digest of its files with weights."""
        from jaxdist.weights import pretrained

        return self.path, pretrained.digest(self.path)

    def frozen(self, holding: Holding) -> Params:
        """Return the parameters of the folder."""
        from jaxdist.weights import pretrained

        return pretrained.parameters(holding.run, self.path, holding.to_read, holding.hold)

    def arrays(self, model: ModelConfig) -> AbstractContextManager[Mapping[str, Readable]]:
        """Open the tensors of the folder as parameters of `model`."""
        from jaxdist.huggingface.folder_arrays import folder_arrays

        return folder_arrays(self.path, model)

    def check_step(self, which: str) -> None:
        """Refuse any step but the default: the folder has none."""
        if which != "latest":
            raise RequestError(f"'{self.path}' is a folder of Hugging Face, without steps; leave --checkpoint out")

    def restore(self, run: Run, which: str) -> Restored:
        """Return the parameters of the folder."""
        from jaxdist.weights import pretrained

        return Restored(None, pretrained.restore(run, self.path, self.notes()), {}, {})

    def tokenizer(self) -> tuple[Tokenizer, SpecialTokens]:
        """Return the tokenizer of the folder."""
        from jaxdist.huggingface.given_tokenizer import read_tokenizer

        given = read_tokenizer(self.path)
        return given.load(), given.special

    def given_tokenizer(self, named: Path | None) -> GivenTokenizer | None:
        """Return the tokenizer at `named`, which a request takes from the folder where it gives no other."""
        return inheriting.checked_tokenizer(self.path, named)


@dataclass(frozen=True)
class Peft(Pretrained):
    """Adapters of PEFT, and as `path` the folder of their base."""

    adapters: Path

    def trained(self, run: Run) -> Params | None:
        """Return these adapters."""
        from jaxdist.weights import pretrained

        return pretrained.adapters(run, self.adapters)


class Step(Stored):
    """A run, of which the latest step counts, or one step in its folder."""

    def inherit(self, config: Config) -> Config:
        """Return `config` with the tokenizer of the run; refuse adapters, and a dense run that cannot be upcycled."""
        return inheriting.from_run(self.path, config)

    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state with the weights of the step."""
        from jaxdist.weights import steps

        return steps.begin(run, self.path, say)

    def lasting(self) -> tuple[Path, str]:
        """Return the step by its number, since a run goes on, and a digest of its parameters."""
        from jaxdist.weights import steps

        return steps.lasting(self.path)

    def frozen(self, holding: Holding) -> Params:
        """Return the parameters of the step."""
        from jaxdist.weights import steps

        return steps.frozen(holding, self.path)

    def arrays(self, model: ModelConfig) -> AbstractContextManager[Mapping[str, Readable]]:
        """Open the parameters of the step."""
        from jaxdist.weights import steps

        return steps.arrays(self.path)

    def check_step(self, which: str) -> None:
        """Check the files of the run; its steps are looked at by those who read one."""
        inheriting.opened(self.path)

    def restore(self, run: Run, which: str) -> Restored:
        """Return the weights of the step: of a LoRA run the adapters alone."""
        from jaxdist.weights import steps

        return Restored(*steps.restore(run, self.path, which))

    def tokenizer(self) -> tuple[Tokenizer, SpecialTokens]:
        """Return the tokenizer of the run."""
        run = inheriting.opened(self.path)
        tokenizer = run.load_tokenizer()
        return tokenizer, run.load_special_tokens(tokenizer)

    def given_tokenizer(self, named: Path | None) -> GivenTokenizer | None:
        """Return the tokenizer of the run, where it has one."""
        return inheriting.own_tokenizer(self.path) or inheriting.checked_tokenizer(self.path, named)


def source_of(path: Path | None) -> Source:
    """Return the source that `init_from` names."""
    return New() if path is None else stored_at(path)


def stored_at(path: Path) -> Stored:
    """Return the source that lies, or should lie, at `path`."""
    base = model_folder(path)
    if base and base != path:
        return Peft(base, path)
    return Pretrained(path) if model_folder(path) else Step(path)
