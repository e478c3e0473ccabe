"""Check machines, network and folders before a run, in all of its processes: `python -m jaxdist.doctor [CONFIG]`.

`python -m jaxdist.doctor RUN` shows which processes of a run are slow or unresponsive.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jaxdist.cluster.process_env import ProcessEnv, find
from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.doctor import findings, machine, software, watching
from jaxdist.doctor.findings import Finding, Here, unchecked, warning, wrong
from jaxdist.doctor.naming import name_hosts, named
from jaxdist.process.exit_codes import DONE, REFUSED
from jaxdist.request import JSON, arguments, run
from jaxdist.request.options import Scan
from jaxdist.request.own_runs import is_of_fit

if TYPE_CHECKING:
    import jax

DESCRIPTION = (
    "Check this machine, or all machines of a run, before it starts: give the options of the run, and start the doctor "
    "as the run is started, under srun or with --cluster options. With the folder of a RUN in place of CONFIG: show "
    "which processes are slow or unresponsive. Exit code 2 when something is wrong."
)

PATIENCE = 120.0
"""Seconds that devices may take to start, or an all-reduce to come back."""

Check = Callable[[Here], Iterable[Finding]]

BEFORE: list[tuple[str, Check]] = [
    ("versions", software.versions),
    ("XLA_FLAGS", software.xla_flags),
    ("memory", software.memory),
    ("driver", machine.driver),
    ("limits", machine.limits),
    ("cache", machine.caches),
]
"""Checks that need no JAX. They unset broken settings in the environment of this process, so that later checks run."""


def main(argv: list[str] | None = None) -> int:
    """Check a run before it starts, or the folder of one that has started, and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    words = Scan.of(argv, [JSON]).positionals
    if words and words[0] and (os.path.isfile(os.path.join(words[0], "config.toml")) or is_of_fit(Path(words[0]))):
        return _watch(argv, Path(words[0]))
    request = arguments(argv, "doctor", DESCRIPTION, extras=[JSON])
    found = []
    try:
        env = find(request.config.cluster)
    except RequestError as error:
        # The checks of this machine are still worth making.
        env = ProcessEnv()
        found = [wrong("processes", problem, "") for problem in error.problems]
    # `env` stands for these options from here on.
    config = request.config.model_copy(update={"cluster": ClusterConfig()})
    verify = shlex.join(["python", "-m", "jaxdist.train", *(word for word in argv if word != "--json"), "--verify"])
    return Doctor(Here(config, env, verify=verify), request.extras["json"], found).examine()


def _watch(argv: list[str], folder: Path) -> int:
    """Print the state of the processes of a run."""
    request = arguments(argv, "doctor", DESCRIPTION, positional="RUN", extras=[JSON], knobs=(), of_fit=True)
    result = watching.watch(folder)
    before = named(folder)
    new = {host: reason for host, reason in result["bad_hosts"].items() if host not in before}
    result["named"] = name_hosts(folder, new)
    if request.extras["json"]:
        print(json.dumps(result))
    else:
        print("\n".join(watching.lines(result)))
    return _exit_code(result["healthy"])


def _exit_code(healthy: bool) -> int:
    if healthy:
        return DONE
    return REFUSED


class Doctor:
    """Makes the checks of one process, in order, and prints the report of all processes."""

    def __init__(self, here: Here, as_json: bool, found: list[Finding]):
        """Start with what was `found` wrong with the processes, if anything."""
        self.here = here
        self.as_json = as_json
        self.found = found
        self.host = socket.gethostname()

    def examine(self) -> int:
        """Make all checks that can be made, print one report, and return the exit code."""
        no_processes = bool(self.found)
        for name, check in BEFORE:
            self._note(name, check, self.here)
        try:
            # Imported here, as below, because an installation in which JAX does not start is a finding too.
            from jaxdist.doctor import network
        except Exception as error:
            self.found.append(wrong("jax", f"cannot be imported: {error}".splitlines()[0], "see versions"))
            return self._print(self.found)
        if no_processes:
            self.found.append(unchecked("network", "the processes do not know who they are"))
            return self._print(self.found)
        self._note("compiler", software.options, self.here)
        self._note("proxies", network.proxies, self.here)
        self._note("own name", network.own_name, self.here)
        if not self._meet():
            return self._print(self.found)
        from jaxdist.cluster import faults, kv_store

        with faults.ending_all(self.here.env):
            return self._end(self._check_together(kv_store.gather))

    def _note(self, name: str, check: Callable[..., Iterable[Finding]], *arguments: object) -> None:
        """Add what a check finds; a check that fails itself is reported as not made."""
        try:
            # A check is a generator: it runs here, and what it has yielded before it fails is kept.
            self.found += check(*arguments)
        except Exception as error:
            self.found.append(unchecked(name, f"the check failed with {type(error).__name__}: {error}"))

    def _meet(self) -> bool:
        """Meet the other processes, and return whether that succeeded."""
        from jaxdist.cluster import listening, rendezvous

        env = self.here.env
        if env.alone:
            return True
        try:
            if env.leader:
                bind, _ = listening.bind_address(env.coordinator)
                listening.check_free(bind)
        except RequestError as error:
            self.found.append(findings.refused("processes", error))
            return False
        # Unchecked, because what `rendezvous.join` refuses is reported by checks of the doctor.
        rendezvous.meet_unchecked(env, self.here.config.fault, self._end_incomplete)
        self.found.append(findings.ok("processes", f"all {env.processes} have met at {env.coordinator}"))
        return True

    def _end_incomplete(self) -> NoReturn:
        """End because the other processes have not come to the rendezvous."""
        from jaxdist.cluster import rendezvous

        env = self.here.env
        seconds = self.here.config.fault.start_seconds
        text = f"after {seconds} s not all {env.processes} processes have met at {env.coordinator}"
        self._give_up(wrong("processes", text, rendezvous.why_incomplete(env)))

    def _give_up(self, finding: Finding) -> NoReturn:
        """Print what is known, and end the process, from a thread while the main one hangs."""
        code = self._print([*self.found, finding])
        sys.stdout.flush()
        # The main thread may hang in C++, where no exception reaches it.
        os._exit(code)

    def _check_together(self, gather: Callable[..., list]) -> list[Finding]:
        """Make the checks that involve all processes, and return what every process has found."""
        from jaxdist.doctor import network, sites

        self._note("hosts", network.hosts, self.here)
        self._note("sites", sites.named, self.here)
        self._note("clocks", network.clocks, self.here)
        # All processes must take the same branch, because the checks of devices are collective.
        bad = any(one.state == findings.WRONG and one.check in ("hosts", "own name") for one in self.found)
        if any(gather("doctor/network", bad)):
            why = "devices could not talk over this network"
            self._note("run folder", self._check_run_folder, None)
            self.found += findings.for_all(unchecked(name, why) for name in ("devices", "all-reduce", "NCCL"))
        else:
            self._note("sites", sites.link, self.here)
            self._check_devices()
        everyone = gather("doctor/found", [vars(one) for one in findings.at(self.host, self.found)])
        reported = [Finding(**one) for process in everyone for one in process or ()]
        silent = [
            wrong("processes", f"process {number} went silent", "see what it says itself")
            for number, process in enumerate(everyone)
            if process is None
        ]
        return [*reported, *findings.at(self.host, silent)]

    def _check_run_folder(self, size: int | None) -> list[Finding]:
        from jaxdist.doctor import network

        return findings.for_all(network.folder(self.here, size))

    def _check_devices(self) -> None:
        """Start the devices, and make the checks that use them."""
        from jaxdist.cluster import kv_store
        from jaxdist.doctor import devices

        hosts = kv_store.gather("doctor/host of process", self.host)
        # Before the devices start, because NCCL reads its environment then.
        log = devices.listen_to_nccl(self.here)
        with self._patience("devices", "they have not started"):
            mesh, size = self._start_mesh()
        self._note("run folder", self._check_run_folder, size)
        if mesh is None:
            self.found.append(unchecked("all-reduce", "there is no mesh"))
            return
        self._note("devices", devices.seen, self.here)
        with self._patience("all-reduce", "it has not come back"):
            self._note("all-reduce", devices.reductions, self.here, mesh, hosts)
        self._note("NCCL", devices.nccl, self.here, log)
        if self.here.env.leader:
            self.found += findings.for_all(devices.numbers(self.here, mesh))

    def _start_mesh(self) -> tuple[jax.sharding.Mesh, int] | tuple[None, None]:
        """Return the mesh of the run and the bytes of a checkpoint; None for both if the request does not fit."""
        import jax

        from jaxdist.cluster import runtime
        from jaxdist.mesh import AUTO, parse_mesh
        from jaxdist.training.run import Run

        try:
            config = self.here.config
            if config.mesh == AUTO:
                # Any mesh of all devices will do.
                config = config.model_copy(update={"mesh": Config().mesh})
            # Over all devices, although a run may have no use for some of them.
            mesh = runtime.start(parse_mesh(config.mesh))
            made = Run(config, batch=False, devices=list(mesh.devices.flat))
            with jax.set_mesh(mesh):
                return mesh, made.engine.checkpoint_bytes
        except RequestError as error:
            self.found += [wrong("mesh", problem, "") for problem in error.problems]
        except Exception as error:
            text = f"JAX does not start them: {error}".splitlines()[0]
            self.found.append(wrong("devices", text, "see driver", of_node=True))
        return None, None

    def _patience(self, name: str, what: str) -> Patience:
        """Return a context that gives up after `PATIENCE`; `what` says what has not happened by then."""
        finding = wrong(name, f"{what} after {PATIENCE:g} s", "see hosts, driver, NCCL")
        return Patience(partial(self._give_up, finding))

    def _print(self, found: list[Finding]) -> int:
        """Print the report, and return the exit code."""
        result = findings.report(findings.at(self.host, found), self.here.env.processes)
        if self.as_json:
            print(json.dumps(result), flush=True)
        else:
            print("\n".join(findings.as_text(result)), flush=True)
        return _exit_code(result["healthy"])

    def _name_bad_hosts(self, found: Sequence[Finding]) -> Iterator[Finding]:
        """Name the hosts that alone are bad in the folder of the run, if there is one; yield findings that say so."""
        for line in name_hosts(self.here.config.folder, findings.bad_hosts(found)):
            yield from findings.for_all([warning("nodes", line, "see the check that is wrong there")])

    def _end(self, found: list[Finding]) -> int:
        """Print the report in process 0, and exit with the same code in all processes."""
        env = self.here.env
        if env.leader:
            self._print([*found, *self._name_bad_hosts(found)])
        code = _exit_code(findings.report(found, env.processes)["healthy"])
        if not env.alone:
            import jax

            from jaxdist.cluster import faults

            # The report is printed: an error at the end would say nothing more.
            with suppress(Exception):
                jax.distributed.shutdown()
            faults.leave(ProcessEnv(), code)
        return code


class Patience:
    """A context manager that calls `then`, in a thread, if its block takes longer than `PATIENCE`."""

    def __init__(self, then: Callable[[], None]):
        self._timer = threading.Timer(PATIENCE, then)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


if __name__ == "__main__":
    run(main)
