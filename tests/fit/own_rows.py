"""`... -- tests/fit/own_rows.py FOLDER STEP`: two processes, each with an iterator of its own; one dies at STEP.

Process 1 dies where no file FOLDER.died says that it has died before.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

import jaxdist

place = jaxdist.join()

from tests.fit.conftest import DATA, Net, fit, loss_fn  # noqa: E402  # after the others are met


class OwnRows:
    """Draws rows for this process, and makes its part of the global array."""

    def __init__(self, sharding):
        self.rng = np.random.default_rng(place.process)
        self.sharding = sharding

    def __next__(self):
        rows = self.rng.integers(0, 20, 4) + 20 * place.process
        return {name: jax.make_array_from_process_local_data(self.sharding, a[rows]) for name, a in DATA.items()}

    def __iter__(self):
        return self

    def state_dict(self):
        return self.rng.bit_generator.state

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state


def main(folder: Path, at: int) -> None:
    import optax

    died = folder.with_suffix(".died")

    def die(step, state, metrics):
        if step == at and place.process == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = jaxdist.parallelize(Net, loss_fn, optax.adam(1e-2), mesh="4x1x1", zero=1)
    fit(folder, OwnRows(trainer.batch_sharding), trainer, callbacks=[die])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
