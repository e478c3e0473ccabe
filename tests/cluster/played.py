"""Slurm's commands, played: shell scripts that note how they were called."""

import os
import subprocess
from pathlib import Path

RECORD = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" $'\\001' >>"$PLAYED/calls"
"""
"""One write for a call: two at once are not mixed."""

PLAYED = {
    "srun": 'env >"$PLAYED/environment"; . "$PLAYED/program"',
    "scontrol": """case "$1" in
        show) cat "$PLAYED/hostnames" 2>/dev/null || echo node7 ;;
        requeue) [ ! -e "$PLAYED/refused" ] ;;
    esac""",
    "sinfo": 'cat "$PLAYED/states"',
    "squeue": 'cat "$PLAYED/refused"',
    "scancel": 'touch "$PLAYED/signalled"',
    "sbatch": 'env >"$PLAYED/environment"; cat >"$PLAYED/script"; . "$PLAYED/program"',
}


class Played:
    """They stand in a folder: each notes how it was called; srun and sbatch then do as `program` says."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, does in PLAYED.items():
            (folder / name).write_text(RECORD + does)
            (folder / name).chmod(0o755)

    def start(self, script: str, program: str, **more: str) -> subprocess.Popen:
        (self.folder / "program").write_text(program)
        (self.folder / "calls").unlink(missing_ok=True)
        (self.folder / "signalled").unlink(missing_ok=True)
        environment = os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PLAYED": str(self.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[7-8]",
        }
        return subprocess.Popen(
            ["bash", "-c", script], env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, script: str, program: str, **more: str) -> tuple[int, str]:
        """(exit code, what was written)."""
        started = self.start(script, program, **more)
        written, _ = started.communicate(timeout=30)
        return started.returncode, written

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        calls = [call.split("\0")[:-1] for call in (self.folder / "calls").read_text().split("\1\0")[:-1]]
        return [arguments for command, *arguments in calls if command == name]

    def seen(self) -> dict[str, str]:
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
