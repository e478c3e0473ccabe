"""A real Slurm of several nodes on one machine: munged, slurmctld, and one slurmd on each of `Hosts`. No systemd."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.cluster.hosts import Hosts

GPUS = 4
"""Pretended ones on each node, for what only counts them."""

CONFIG = """
ClusterName=test
SlurmctldHost=ctl(10.77.0.1)
SlurmctldPort=17300
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
TopologyPlugin=topology/tree
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=2,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
PlugStackConfig=/dev/null
ReturnToService=2
SlurmdTimeout=10
KillWait=30
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
MailProg=/bin/true
"""
"""Debian's slurmd may run many times on a machine; it counts processes by /proc, and needs no cgroups."""

NOISE = re.compile(r".*(pmix|mpi/).*\n", re.IGNORECASE)


def cannot() -> str:
    """Why there is no Slurm to be had here; empty where there is."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(name)]
    return f"no {', '.join(missing)} here (Debian's slurm-wlm and munge)" if missing else ""


class Slurm:
    """Commands run on the host `ctl`. A context manager. Half of the hosts are below the switch `west`, half `east`."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        for name in ("munge", "state", "log", "spool", "run", "dev"):
            (folder / name).mkdir(parents=True)
            (folder / name).chmod(0o755)
        nodes = f"n[0-{hosts.count - 1}]"
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={hosts.address(name)} Port=17310 "
            f"CPUs=8 RealMemory=20000 Gres=gpu:{GPUS} State=UNKNOWN"
            for name in hosts.names
        ]
        lines.append(f"PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP")
        self.config = folder / "slurm.conf"
        self.config.write_text(CONFIG.format(folder=folder) + "\n".join(lines) + "\n")
        half = hosts.count // 2
        (folder / "topology.conf").write_text(
            f"SwitchName=root Switches=west,east\nSwitchName=west Nodes=n[0-{half - 1}]\n"
            f"SwitchName=east Nodes=n[{half}-{hosts.count - 1}]\n"
        )
        for gpu in range(GPUS):
            os.mknod(folder / f"dev/gpu{gpu}", 0o20666, os.makedev(1, 3))  # as /dev/null is
        (folder / "gres.conf").write_text(f"NodeName={nodes} Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}]\n")
        (folder / "munge/key").write_bytes(os.urandom(128))
        (folder / "munge/key").chmod(0o400)

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        munge = self.folder / "munge"
        places = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # By force: a test's folder is its owner's alone, and munged likes its socket to be everybody's.
        self._check(["munged", "--force", *(f"--{option}={munge / name}" for option, name in places.items())])
        self._check(self.hosts.on("ctl", "slurmctld", "-c", "-f", self.config))
        for name in self.hosts.names:
            self._check(self.hosts.on(name, "slurmd", "-N", name, "-f", self.config))
        self.until(lambda: self.nodes("idle") == self.hosts.count, 30, "its nodes")

    def __exit__(self, *_: object) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--full", "--user=root", seconds=10)
            self.until(lambda: not self.run("squeue", "-h"), 20, "its jobs to end")
        files = [*(self.folder / "run").glob("*.pid"), *(self.folder / "munge").glob("pid")]
        pids = [int(file.read_text()) for file in files]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with suppress(AssertionError):
            self.until(lambda: not any(map(_lives, pids)), 20, "its daemons to end")
        for pid in [*filter(_lives, pids), *self._step_daemons()]:  # on a busy machine one may wait for the other
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.until(lambda: not any(map(_lives, pids)), 20, "its daemons to end")

    def _step_daemons(self) -> list[int]:
        """Those of job steps that have not ended with their job."""
        own = f"SLURM_CONF={self.config}"
        found = [file.parent for file in Path("/proc").glob("[0-9]*/comm") if _told(file).startswith("slurmstepd")]
        return [int(folder.name) for folder in found if own in _told(folder / "environ").split("\0")]

    def run(self, *command: str | Path, seconds: float = 120, code: int = 0, **variables: str) -> str:
        """What a command says. AssertionError if it ends with another `code`."""
        done = subprocess.run(
            self.argv(*command),
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        said = NOISE.sub("", done.stdout + done.stderr)
        assert done.returncode == code, f"{command} ended with {done.returncode}: {said}"
        return said

    def argv(self, *command: str | Path) -> list[str]:
        return self.hosts.on("ctl", *command)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config)}

    def submit(self, *words: str | Path, **variables: str) -> str:
        """The number of the job that `sbatch` makes of it."""
        return self.run("sbatch", "--parsable", *words, **variables).strip()

    def nodes(self, state: str) -> int:
        return len(self.run("sinfo", "-h", "-N", "-t", state, seconds=10).splitlines())

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ..."""
        said = self.run("scontrol", "show", "job", number, seconds=10)
        return dict(word.partition("=")[::2] for word in said.split())

    def wait(self, number: str, states: str | Iterable[str], seconds: float, log: Path | None = None) -> dict[str, str]:
        """Until the job is in one of these states. A requeued one need not wait for its two minutes."""
        wanted, found = {states} if isinstance(states, str) else set(states), {}

        def there() -> bool:
            found.update(self.job(number))
            return found["JobState"] in wanted

        said = lambda: log.read_text(errors="replace") if log and log.exists() else ""
        self.until(there, seconds, lambda: f"{' or '.join(wanted)} of {found}\n{said()}")
        return found

    def at_once(self, number: str) -> None:
        """A requeued job waits two minutes for its turn; not here. But in the second in which it ended, its nodes take
        what would start it for the start that is over ("Job credential revoked")."""
        time.sleep(2)
        self.run("scontrol", "update", f"jobid={number}", "StartTime=now")

    @staticmethod
    def until(true, seconds: float, what) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"waited {seconds} s for {what() if callable(what) else what}"
            time.sleep(0.1)

    @staticmethod
    def _check(command: list[str]) -> None:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
        assert not done.returncode, f"{command}: {done.stderr}"


def _lives(pid: int) -> bool:
    told = _told(Path(f"/proc/{pid}/stat")).split()
    return bool(told) and told[2] != "Z"


def _told(file: Path) -> str:
    """What /proc has there; nothing of a process that has ended."""
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""
