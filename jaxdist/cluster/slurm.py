"""A run as a Slurm job: the sbatch script that starts it, passes signals on, requeues it, and knows when to stop.

The values stand at the top of the script, each quoted; the text of `slurm_text` that follows is the same for every run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdist.cluster.address import NUMBER
from jaxdist.cluster.local import PATIENCE, PAUSE
from jaxdist.cluster.slurm_text import (
    AGAIN,
    BODY,
    CHOOSE,
    CHOOSE_COORDINATOR,
    GO_BACK,
    NODES,
    ONWARD,
    OWN_SCRIPT,
    RESUME,
    TRAIN,
)
from jaxdist.cluster.slurm_values import node_counts
from jaxdist.config import RequestError, nearest
from jaxdist.output.units import counted
from jaxdist.process.exit_codes import BUSY, DONE, REFUSED, STOPPED
from jaxdist.process.stop_signals import GRACE

MARGIN = 30
"""Seconds, beyond the grace period of the run, by which the signal to stop precedes the time limit."""

LAST_WORDS = 30
"""Seconds in which the other tasks may end by themselves, with their own exit code, when one has ended."""

FOLDER = "slurm"
"""Folder in the run folder with the logs of its jobs, and with how often they have failed."""

PRESETS = {
    # From CSCS's documentation, "NCCL" (docs.cscs.ch/software/communication/nccl). The first makes a missing plug-in an
    # error, where NCCL would fall back to TCP; the last but one is its advice against deadlocks with MPI.
    "alps": {
        "NCCL_NET": "AWS Libfabric",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_CROSS_NIC": "1",
        "NCCL_PROTO": "^LL128",
        "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_CXI_DEFAULT_TX_SIZE": "16384",
        "FI_CXI_DISABLE_HOST_REGISTER": "1",
        "FI_CXI_RX_MATCH_MODE": "software",
        "FI_MR_CACHE_MONITOR": "userfaultfd",
        "MPICH_GPU_SUPPORT_ENABLED": "0",
        "NCCL_DEBUG": "WARN",
    },
    # From NCCL's documentation, "Environment Variables". NCCL finds the adapters itself; with the name of the network a
    # missing one is an error.
    "infiniband": {"NCCL_NET": "IB", "NCCL_DEBUG": "WARN"},
    "ethernet": {"NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"},
}
"""Environment variables for a network: Slingshot 11 with libfabric and aws-ofi-nccl; InfiniBand or RoCE; TCP."""

INHERITED = (
    "CUDA_VISIBLE_DEVICES",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
"""Variables that Slurm passes from the login shell to the job, where they would contradict the job."""


@dataclass(frozen=True)
class Script:
    """The values of a job script; `text` returns the script."""

    program: Sequence[str]
    """What follows `python`; for train without `--run-dir` and `--resume`, which the script adds."""
    run_dir: Path
    nodes: str
    """Number of nodes, or a range: `4`, `2-4`."""
    tasks_per_node: int
    time: str
    """Time limit, as Slurm writes it."""
    grace: float
    """Seconds from a signal to the end of the run."""
    python: str
    home: Path
    """Folder in which the job runs; relative paths start there."""
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    """0 leaves it to Slurm."""
    name: str = ""
    """Name of the job; empty for that of the run folder."""
    partition: str = ""
    account: str = ""
    container: str = ""
    """An image for pyxis, or the .toml file of an EDF; empty to run without a container."""
    reads: Sequence[Path] = ()
    """Paths besides the run folder that a container must have."""
    environment: str = ""
    """One of `PRESETS`, or a file of shell commands; empty for neither."""
    spares: int = 0
    """Nodes that wait, beyond those of the run, to take the place of a lost one."""
    restarts: int = 3
    """How often in a row the job may fail without a new checkpoint."""
    resume: str = "auto"
    is_train: bool = True
    """Whether the program is jaxdist.train; a program of the user's gets only the options that it is given."""
    rolls_back: bool = False
    """Whether a run that repeated spikes have ended goes back before them."""
    newest: int = 0
    """Step of the newest checkpoint at present."""
    pause: int = PAUSE
    """Seconds after which a run folder that is in use is tried again."""
    patience: int = PATIENCE
    """Seconds after which a run folder that is in use is given up."""

    @property
    def logs(self) -> Path:
        """Folder of the job's logs."""
        return self.run_dir / FOLDER

    def text(self) -> str:
        """Return the script. Raises `RequestError` if a value cannot be written into it."""
        python = self.python
        if self.container:
            python = "python"
        values = {
            "run": shlex.quote(operand(self.run_dir)),
            "tasks": str(self.tasks_per_node),
            "fewest": f"{node_counts(self.nodes)[0]} # nodes on which the run can be",
            "spares": f"{self.spares} # further nodes, which wait",
            "restarts": f"{self.restarts} # at most so many in a row that bring no new checkpoint",
            "rolls_back": f"{str(self.rolls_back).lower()} # whether a run that has diverged goes back by itself",
            "pause": f"{self.pause} # seconds until a run folder that is in use is tried again",
            "patience": f"{self.patience} # seconds for which it is tried again, at most",
            "srun": f"({shlex.join(self._srun())})",
            "program": f"({shlex.join([python, *self.program])})",
        }
        kind = TRAIN if self.is_train else OWN_SCRIPT
        blocks = {
            "where": ONWARD if self.is_train else "",
            "nodes": NODES,
            "coordinator": CHOOSE_COORDINATOR if self.container else "",
            "choose": CHOOSE if self.spares else "",
            "again": AGAIN if self.spares else "",
        }
        parts = {
            "inherited": " ".join(INHERITED),
            "environment": self._environment(),
            "resume": self._resume() if self.is_train else "",
            "last_words": str(LAST_WORDS),
            "busy": str(BUSY),
            "done": str(DONE),
            "refused": str(REFUSED),
            "stopped": str(STOPPED),
            "grace": f"{GRACE}={self.grace:g}",
        }
        # In one pass, so that what looks like a name within a value is left alone.
        names = "|".join(parts)
        body = BODY
        for name, text in (blocks | kind._asdict()).items():
            body = body.replace("{" + name + "}", text)
        body = re.sub("{(" + names + ")}", lambda match: parts[match[1]], body)
        return "\n".join(
            [
                "#!/bin/bash",
                *self._directives(),
                "",
                "# Written by python -m jaxdist.launch slurm (docs/how-to/slurm.md). The folder of the log must exist.",
                *(f"{name}={value}" for name, value in values.items()),
                body,
            ]
        )

    def _directives(self) -> list[str]:
        """Return the lines of options that sbatch reads."""
        log = str(self.logs).replace("%", "%%") + "/%j.log"
        if "\\" in log:
            raise RequestError(f"run folder {self.run_dir} has a backslash, which Slurm takes away; name another")
        options = {
            "job-name": self.name or self.run_dir.name,
            "partition": self.partition,
            "account": self.account,
            "chdir": str(self.home),
            "output": log,
            "open-mode": "append",
            "nodes": self._allocated(),
            **self._tasks(),
            "gpus-per-node": str(self.gpus_per_node or ""),
            "cpus-per-task": str(self.cpus_per_task or ""),
            "time": self.time,
            "signal": f"B:USR1@{warning(self.grace)}",
        }
        lines = [f"#SBATCH --{option}={directive(option, value)}" for option, value in options.items() if value]
        if self.spares:
            # Otherwise Slurm ends a job that loses a node, and takes the spare ones with it.
            lines.append("#SBATCH --no-kill")
        return [*lines, "#SBATCH --requeue"]

    def _allocated(self) -> str:
        """Return the number of nodes of the job, or the range of it, with the spares."""
        if not self.spares:
            return self.nodes
        fewest, most = (count + self.spares for count in node_counts(self.nodes))
        return str(most) if fewest == most else f"{fewest}-{most}"

    def _tasks(self) -> dict[str, str]:
        """Return the option for the tasks on a node."""
        fewest, most = node_counts(self.nodes)
        if fewest == most:
            return {"ntasks-per-node": str(self.tasks_per_node)}
        # For a range of nodes the cores of the tasks are requested: given tasks, Slurm takes no more nodes than the
        # lower bound needs.
        return {"mincpus": str(self.tasks_per_node * (self.cpus_per_task or 1))}

    def _srun(self) -> list[str]:
        """Return the options of srun beyond those that all runs have."""
        options = []
        if self.cpus_per_task:
            # srun does not take it over from sbatch.
            options.append(f"--cpus-per-task={self.cpus_per_task}")
        if not self.container:
            return options
        if self.container.endswith(".toml"):
            # CSCS's container engine: the file says what is mounted, and where the job starts.
            return [*options, f"--environment={Path(self.container).absolute()}"]
        # The folder in which the job runs, and what it needs outside of it.
        others = {self.home / path for path in (self.run_dir, *self.reads)}
        mounts = [str(self.home), *sorted(str(path) for path in others if not path.is_relative_to(self.home))]
        wrong = [path for path in mounts if set(path) & set(",:")]
        if wrong:
            raise RequestError(f"{wrong[0]} cannot be mounted in a container: its name has a comma or a colon")
        mounted = ",".join(f"{path}:{path}" for path in mounts)
        return [
            *options,
            f"--container-image={self.container}",
            f"--container-mounts={mounted}",
            f"--container-workdir={self.home}",
        ]

    def _environment(self) -> str:
        """Return the shell lines that set up the network."""
        if not self.environment:
            return ""
        preset = PRESETS.get(self.environment)
        if preset is None:
            return f". {shlex.quote(str(Path(self.environment).absolute()))} || exit {REFUSED}\n"
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in preset.items())

    def _resume(self) -> str:
        """Return the shell lines that choose the checkpoint to resume from."""
        if not self.resume.isdecimal():
            return RESUME[self.resume]
        if int(self.resume) == self.newest:
            return RESUME["auto"]
        return GO_BACK.replace("{step}", self.resume).replace("{newest}", str(self.newest))


def operand(path: Path) -> str:
    """Return a path that no command takes for an option, whatever its name begins with."""
    if str(path).startswith("-"):
        return f"./{path}"
    return str(path)


def warning(grace: float) -> int:
    """Return how many seconds before its time limit a job is asked to stop."""
    return int(grace) + MARGIN


def directive(option: str, value: str) -> str:
    """Return a value quoted for a `#SBATCH` line, whose syntax differs from the shell's.

    sbatch knows quotes, backslashes inside and outside of them, and comments, and expands nothing. Raises
    `RequestError` for a value that no line can hold.
    """
    if not value.isprintable():
        raise RequestError(f"--{option} of the job would be {value!r}, which does not fit into a line; choose another")
    if re.fullmatch(r"[\w./%:@,+=-]+", value, re.ASCII):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def make_logs(folder: Path) -> None:
    """Make the folder of the logs: Slurm silently ends a job that cannot write its log.

    `RunFolder.check_layout` has refused a link in its place. Raises `RequestError` if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be made ({error.strerror}); name another --run-dir") from error


def submit(script: str) -> str:
    """Submit a script with sbatch, and return the number of the job. Raises `RequestError` if Slurm refuses it."""
    # sbatch would pass on the variables of an allocation that this process may run in.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    conf = os.environ.get("SLURM_CONF")
    if conf:
        environment["SLURM_CONF"] = conf
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise RequestError("sbatch is not found here; submit on a login node of the cluster") from error
    if done.returncode:
        raise RequestError(f"Slurm does not take the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def check_container(image: str) -> None:
    """Raise `RequestError` if `--container` is an Apptainer image, which pyxis does not take."""
    if Path(image).suffix == ".sif":
        raise RequestError(
            f"--container '{image}' is an image of Apptainer's, which pyxis does not take: give a .sqsh file (enroot "
            f"import makes one) or the name of an image in a registry, such as nvcr.io#nvidia/jax:25.10-py3"
        )


def check_partition(name: str, nodes: str, spares: int) -> None:
    """Raise `RequestError` if a job asks for more nodes than its partition has or allows: it would wait forever.

    It asks for `nodes`, and for `spares` further ones.

    Without a `name` it is the default partition. Of several names, separated by commas, one with enough nodes suffices.
    If Slurm is not here, or does not say, nothing is refused.
    """
    try:
        command = ["scontrol", "--oneliner", "show", "partition"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return
    rows = [dict(word.partition("=")[::2] for word in line.split()) for line in done.stdout.splitlines()]
    if name:
        requested = [row for row in rows if row.get("PartitionName") in name.split(",")]
    else:
        requested = [row for row in rows if row.get("Default") == "YES"]
    most = {row["PartitionName"]: _most_nodes(row) for row in requested}
    fewest, _ = node_counts(nodes)
    known = [count for count in most.values() if count is not None]
    if not most or len(known) < len(most) or max(known) >= fewest + spares:
        return
    limits = ", ".join(f"{partition} takes {count}" for partition, count in most.items())
    asked = f"{nodes} with {counted(spares, 'spare')}" if spares else nodes
    raise RequestError(
        f"--nodes {asked} is more than a job can have: partition {limits}; ask for fewer, or for another"
    )


def _most_nodes(row: dict[str, str]) -> int | None:
    """Return the most nodes of a job in a partition, from its row of `scontrol show partition`; None if unknown."""
    counts = [row[key] for key in ("TotalNodes", "MaxNodes") if NUMBER.fullmatch(row.get(key, ""))]
    return min(map(int, counts), default=None)


def check_environment(name: str) -> None:
    """Raise `RequestError` if `--env` names neither a preset nor a file."""
    if name and name not in PRESETS and not Path(name).is_file():
        raise RequestError(f"--env is '{name}', neither a file nor a preset; {nearest(name, PRESETS)}")
