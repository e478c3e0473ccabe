"""`jaxdist.fit`: the loop of `jaxdist.train` for a module of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from jaxdist.api import Parallel
from jaxdist.api.fit_arguments import check_caller, source_of, whole
from jaxdist.api.fit_options import Options, config_of
from jaxdist.api.fit_parts import Call, Evaluate, validation_of
from jaxdist.api.fitting import Fitting
from jaxdist.config import RequestError
from jaxdist.request.checks.files import path_problem
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run_dir import RunFolder


def fit(
    trainer: Parallel,
    batches: Any,
    *,
    steps: int,
    run_dir: Path | str,
    batch_size: int | None = None,
    seed: int = 0,
    params: Any = None,
    evaluate: Evaluate | None = None,
    callbacks: Sequence[Call] = (),
    **options: Unpack[Options],
) -> TrainState:
    """Train what `parallelize` returned for `steps` steps, as `python -m jaxdist.train` trains; return the last state.

    `run_dir` gets metrics.jsonl, log.txt, TensorBoard files, the loss curve and the checkpoints. The same call goes on
    from the newest of these, on any mesh and number of processes; once the run has ended, it restores and returns the
    last state. After SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C it saves and raises `SystemExit(jaxdist.STOPPED)`, which
    launchers understand. It begins with `trainer.init(seed, params)`. Several processes, started by
    `jaxdist.launch`, all call it alike; call `jaxdist.join()` first.

    `batches` are one of these:

    * a function of the step, from 0, that returns its batch;
    * with `batch_size`, rows with random access: arrays, or a dict or tuple of arrays, that share their rows; or a
      sequence of rows, such as a `grain.MapDataset`, a `datasets.Dataset` or what `jaxdist.data.open` returns. Their
      order is a function of (seed, step); each epoch is another permutation;
    * a sequence of batches, taken in its order, again and again;
    * an iterator that can be told where to go on: by `state_dict` and `load_state_dict`, or `get_state` and
      `set_state`, whose state the checkpoints keep; or by `skip(n)`. What can only be iterated over, such as a
      generator, trains, but a run with it cannot be resumed.

    A thread makes them ahead of the steps. With several processes each gives the same batches, or all give global
    arrays, as in `Parallel.step`.

    `evaluate` is a batch, a list of batches, or a function of the state that returns a dict with "loss". It is called
    every `validation_every` steps and at the end; the state with the lowest loss is kept in `run_dir`/checkpoints/best.

    `callbacks` are called with (step, state, metrics) after each step, and before its checkpoint. `metrics` has "loss",
    "grad_norm" and the further means of the step, as arrays of JAX: to read one waits for the step. After a validation
    it has its figures too, such as "validation_loss". A callback that returns True ends the run there. The next step
    uses the memory of `state` again: keep no reference. With several processes all of them call the callbacks, which
    must return the same in all.

    `options` are knobs of train, with an underscore for the dot: `log_every=1` is `--log.every 1`.
    `fit_options.Options` lists them. Others of train are not there for a reason: `train.spike` keeps what is usual in
    the state, and `log.norms` adds to the step, and both state and step are made by `parallelize` before `fit` has
    them; `data.skip`, and with it `fault.rollbacks`, need an order that `fit` makes, and batches may come in yours.

    Raises `ValueError` or `RequestError` for what cannot be run, or is not the run in `run_dir`; `Diverged` where the
    run is not finite any more.
    """
    config = config_of(options)
    check_caller(trainer, callbacks)
    steps = whole("steps", steps, 1)
    seed = whole("seed", seed, 0)
    batch_size = None if batch_size is None else whole("batch_size", batch_size, 1)
    source = source_of(batches, batch_size, seed)
    folder = RunFolder(Path(run_dir))
    problem = path_problem(folder.path)
    if problem:
        raise RequestError(f"run_dir '{folder.path}' {problem}; name another")
    if evaluate is None and config.validation.every and "validation_every" in options:
        raise ValueError(f"validation_every is {config.validation.every}, but there is no evaluate; give both or none")
    trainer._check_arguments({"value"})
    validation = None if evaluate is None else validation_of(trainer, evaluate, config.validation.every)
    return Fitting(trainer, source, steps, folder, seed, params, config).run(validation, callbacks)
