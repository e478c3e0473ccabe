"""The further options of `jaxdist.fit`: knobs of train, with an underscore for the dot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from pydantic import ValidationError

from jaxdist.config import Config, RequestError, nearest
from jaxdist.request import checks
from jaxdist.request.knobs import KNOBS, nest, sentence


class Options(TypedDict, total=False):
    """What `fit` takes of the knobs of train, which say what they mean and what they are by default."""

    resume: str | int
    log_every: int
    log_tensorboard: bool
    log_wandb: str
    checkpoint_every: int
    checkpoint_minutes: float
    checkpoint_keep: int
    checkpoint_keep_every: int
    validation_every: int
    profile_steps: str
    fault_hang_seconds: float
    fault_heartbeat_seconds: int
    fault_compare: int
    data_prefetch: int
    train_max_skipped: int


NAMES = {option: option.replace("_", ".", 1) for option in Options.__annotations__}
"""The knob that each option is."""


def config_of(options: Mapping[str, Any]) -> Config:
    """Return a configuration with these options; of it only the knobs in `NAMES` count. Raises `RequestError`."""
    unknown = [name for name in options if name not in NAMES]
    if unknown:
        raise RequestError(*(f"fit has no option '{name}'; {nearest(name, NAMES)}" for name in unknown))
    values = {NAMES[name]: value for name, value in options.items()}
    if isinstance(values.get("resume"), int):
        values["resume"] = str(values["resume"])
    try:
        config = Config.model_validate(nest(values))
    except ValidationError as error:
        problems = []
        for one in error.errors():
            name = ".".join(map(str, one["loc"]))
            field = KNOBS.get(name)
            problems.append(sentence(name.replace(".", "_"), one["input"], one, field.annotation if field else None))
        raise RequestError(*problems) from error
    wrong = checks.problems(config, NAMES.values())
    if wrong:
        raise RequestError(*wrong)
    return config
