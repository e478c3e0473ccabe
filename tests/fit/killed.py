"""`python -m tests.fit.killed FOLDER FORM MESH [STEP DELAY]`: a run that dies DELAY seconds after the end of STEP."""

import os
import signal
import sys
import threading
import time

import jax


def main(folder: str, form: str, mesh: str, at: int, delay: float) -> None:
    from tests.fit.conftest import fit, trainer
    from tests.fit.forms import FORMS, OF_GRAIN

    def die(step, state, metrics):
        if step == at:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(0.02)

    make, options = (FORMS | OF_GRAIN)[form]
    fit(folder, make(), trainer(mesh), steps=30, callbacks=[die], **options)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main(*sys.argv[1:4], *([int(sys.argv[4]), float(sys.argv[5])] if sys.argv[4:] else [0, 0.0]))
