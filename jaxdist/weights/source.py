"""Where weights come from: a folder of Hugging Face, a run or one of its steps, or nowhere, and then they are drawn.

A path becomes a source by `source_of`, and what differs from one kind to another is a question to the source. A request
gets its answers without jax; modules that read arrays are imported by the methods that need them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.files import read_toml
from jaxdist.huggingface.folder import KEPT, adapter_problem, is_folder, twofold

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from jaxdist.huggingface.given_tokenizer import GivenTokenizer
    from jaxdist.huggingface.readable import Readable
    from jaxdist.huggingface.special_tokens import SpecialTokens
    from jaxdist.models import Params
    from jaxdist.training.forward.step import TrainState
    from jaxdist.training.run import Run
    from jaxdist.weights.base import Base


class Restored(NamedTuple):
    """Weights for use without training, as a checkpoint has them."""

    step: int | None
    """None for a folder of Hugging Face, which has no steps."""
    params: Params
    variables: Params
    data: str | None
    """Fingerprint of the data that they were trained on; None where it is not known."""


class Source(ABC):
    """Weights that a run begins with."""

    in_checkpoints = False
    """Whether they lie in checkpoints, whose library has limits of its own for paths."""

    @property
    def model_folder(self) -> Path | None:
        """The folder of Hugging Face that gives the model of a request; None where the request itself does."""
        return None

    def needs_tokenizer(self) -> str:
        """Return why no tokenizer can be trained for these weights; empty where one can."""
        return ""

    def check_described(self) -> None:
        """Raise `RequestError` where commands that only describe a run take nothing from these weights."""
        return

    def check_beginning(self, config: Config) -> None:
        """Refuse what `inherit` refuses, where no weight has to be there. Raises `RequestError`."""
        return

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

    @abstractmethod
    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state before the first step, and `say` where the weights are from; call under `jax.set_mesh`."""


class New(Source):
    """No weights: new ones are drawn."""

    def inherit(self, config: Config) -> Config:
        """Return `config`; refuse adapters, which have nothing to stand beside."""
        if config.model.frozen:
            raise RequestError(
                f"model.lora_rank is {config.model.lora_rank}, but there are no weights for adapters to stand beside; "
                f"name a run or a folder of Hugging Face by --init-from, or set model.lora_rank to 0"
            )
        return config

    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state with new weights."""
        return run.init()


@dataclass(frozen=True)
class Stored(Source):
    """Weights on disk."""

    path: Path

    @property
    @abstractmethod
    def small_files(self) -> Path:
        """The folder with the small files of Hugging Face that belong to them."""

    @abstractmethod
    def base(self) -> Base:
        """Return them as the base of adapters, found again by its digest. All processes call this.

        Raises `RequestError` where there is none.
        """

    @abstractmethod
    def frozen(self, run: Run) -> Params:
        """Return the parameters that stand frozen beside the adapters of `run`; call under `jax.set_mesh`."""

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

    @property
    def model_folder(self) -> Path:
        """The folder itself."""
        return self.path

    @property
    def small_files(self) -> Path:
        """The folder itself."""
        return self.path

    def needs_tokenizer(self) -> str:
        """Return that its weights know one tokenizer, and that it is missing."""
        return (
            f"'{self.path}' has no tokenizer.json, and its weights know the tokens of one tokenizer alone; give "
            f"that one as data.tokenizer, or data that are tokens already (.bin)"
        )

    def notes(self) -> list[str]:
        """Return which weights count, where the folder holds them twice."""
        note = twofold(self.path)
        return [note] if note else []

    def kept_files(self) -> dict[str, bytes]:
        """Return the small files of the folder, and what an export must know of it."""
        from jaxdist.weights import pretrained

        return pretrained.kept_files(self.path)

    def inherit(self, config: Config) -> Config:
        """Return `config`, which has the model and the tokenizer of the folder already; check its tensors."""
        from jaxdist.weights import inheriting

        return inheriting.from_folder(self.path, config)

    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state with the weights of the folder."""
        from jaxdist.weights import pretrained

        return pretrained.begin(run, self.path, say)

    def base(self) -> Base:
        """Return the folder and a digest of its files with weights."""
        from jaxdist.weights import pretrained

        return pretrained.base(self.path)

    def frozen(self, run: Run) -> Params:
        """Return the parameters of the folder."""
        from jaxdist.weights import pretrained

        return pretrained.parameters(run, self.path, run.abstract_frozen())

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

        return pretrained.restore(run, self.path, self.notes())

    def tokenizer(self) -> tuple[Tokenizer, SpecialTokens]:
        """Return the tokenizer of the folder."""
        from jaxdist.huggingface.given_tokenizer import read_tokenizer

        given = read_tokenizer(self.path)
        return given.load(), given.special

    def given_tokenizer(self, named: Path | None) -> GivenTokenizer | None:
        """Return the tokenizer at `named`, which a request takes from the folder where it gives no other."""
        from jaxdist.weights import inheriting

        return inheriting.checked_tokenizer(self.path, named)


class Step(Stored):
    """A run, of which the latest step counts, or one step in its folder."""

    in_checkpoints = True

    @property
    def small_files(self) -> Path:
        """What the run keeps of the folder that it began with."""
        return self.path / KEPT

    def check_described(self) -> None:
        """Refuse a run: only the model of a folder of Hugging Face has an effect."""
        if not any((run / "config.toml").is_file() for run in (self.path, self.path.parent.parent)):
            raise no_weights(self.path)
        raise RequestError(
            f"init_from '{self.path}' is not a folder of Hugging Face with a config.json, and only the model of "
            f"such a folder has an effect on this command; leave it out, and name the config.toml of a run as CONFIG"
        )

    def check_beginning(self, config: Config) -> None:
        """Refuse what `inherit` refuses."""
        self.inherit(config)

    def inherit(self, config: Config) -> Config:
        """Return `config` with the tokenizer of the run; refuse adapters, and a dense run that cannot be upcycled."""
        from jaxdist.weights import inheriting

        return inheriting.from_run(self.path, config)

    def begin(self, run: Run, say: Callable[[str], None]) -> TrainState:
        """Return the state with the weights of the step."""
        from jaxdist.weights import steps

        return steps.begin(run, self.path, say)

    def base(self) -> Base:
        """Return the step by its number, since a run goes on, and a digest of its parameters."""
        from jaxdist.weights import steps

        return steps.base(self.path)

    def frozen(self, run: Run) -> Params:
        """Return the parameters of the step."""
        from jaxdist.weights import steps

        return steps.frozen(run, self.path)

    def arrays(self, model: ModelConfig) -> AbstractContextManager[Mapping[str, Readable]]:
        """Open the parameters of the step."""
        from jaxdist.weights import steps

        return steps.arrays(self.path)

    def check_step(self, which: str) -> None:
        """Check the files of the run; its steps are looked at by those who read one."""
        from jaxdist.weights import inheriting

        inheriting.opened(self.path)

    def restore(self, run: Run, which: str) -> Restored:
        """Return the weights of the step, with its adapters beside their base."""
        from jaxdist.weights import steps

        return steps.restore(run, self.path, which)

    def tokenizer(self) -> tuple[Tokenizer, SpecialTokens]:
        """Return the tokenizer of the run."""
        from jaxdist.weights import inheriting

        run = inheriting.opened(self.path)
        tokenizer = run.load_tokenizer()
        return tokenizer, run.load_special_tokens(tokenizer)

    def given_tokenizer(self, named: Path | None) -> GivenTokenizer | None:
        """Return the tokenizer of the run, where it has one."""
        from jaxdist.weights import inheriting

        return inheriting.own_tokenizer(self.path) or inheriting.checked_tokenizer(self.path, named)


@dataclass(frozen=True)
class Gone(Step):
    """A folder of Hugging Face that is not there any more, of which the run that began with it keeps small files."""

    kept: Path

    @property
    def model_folder(self) -> Path:
        """The folder with what the run keeps."""
        return self.kept

    def check_beginning(self, config: Config) -> None:
        """Refuse nothing: the run has begun."""


def source_of(path: Path | None) -> Source:
    """Return the source that `init_from` names."""
    return New() if path is None else stored_at(path)


def stored_at(path: Path) -> Stored:
    """Return the source that lies, or should lie, at `path`."""
    return Pretrained(path) if is_folder(path) else Step(path)


def begun_with(init_from: Path | None, run: Path) -> Source:
    """Return the source that `init_from` names in a request for the run in the folder `run`, which may have begun."""
    if init_from is None:
        return New()
    kept = run / KEPT
    if not init_from.exists() and _began_with(run, init_from) and is_folder(kept):
        return Gone(init_from, kept)
    return stored_at(init_from)


def no_weights(init_from: Path) -> RequestError:
    """Return the error for an `init_from` that is nothing with which a run could begin."""
    return RequestError(
        adapter_problem(init_from)
        or f"init_from {init_from} is neither the folder of a run nor a checkpoint in one, nor a folder of Hugging "
        f"Face with a config.json; name one, such as runs/gpt_tiny, or runs/gpt_tiny/checkpoints/best"
    )


def _began_with(run: Path, init_from: Path) -> bool:
    """Return whether the run in this folder began with `init_from`."""
    try:
        return read_toml(run / "config.toml").get("init_from") == str(init_from)
    except (OSError, ValueError):
        return False
