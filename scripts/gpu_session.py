"""What `scripts/gpu_session.sh` does: install from carried wheels, measure in the background, wait, collect the result.

It needs nothing but Python and `packaging`, or the carried wheel of that, before it has installed the rest.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

OF_IMAGE = ("jax", "jaxlib", "numpy", "scipy", "opt_einsum")
"""Distributions that an image for JAX on GPUs has, and that must fit its CUDA: they are not carried."""

UNUSED = ("hf_xet", "huggingface_hub", "fonttools")
"""Large dependencies of dependencies that jaxdist never imports: for downloads, and for figures as PDF."""

CARRIED = 64 * 2**20
"""Bytes that may be carried to the machine."""

POLL_SECONDS = 0.5

REFUSED = 2
"""Exit code of `bench gpu` for a mistake in the request."""

STILL_RUNNING = 3
"""Exit code where the measurement goes on in the background, and the same command waits for more of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpu_session.sh",
        usage="%(prog)s [wheels] [options]",
        description=__doc__,
        epilog="Other options are those of `python -m jaxdist.bench gpu`.",
        allow_abbrev=False,
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "gpu_wheels", help="folder of wheels")
    parser.add_argument("--python-version", default="3.12", help="wheels: Python of the machine with the GPU")
    parser.add_argument("--state", type=Path, default=ROOT / "gpu_session", help="folder of all that is made")
    parser.add_argument("--out", type=Path, help="folder into which result, tables and log are copied")
    parser.add_argument("--wait", type=float, default=540, help="seconds after which this command ends")
    parser.add_argument("--seconds", type=int, default=1500, help="seconds that all measurements may take")
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["wheels"]:
        options = parser.parse_args(words[1:])
        return download(options.wheels, options.python_version)
    options, others = parser.parse_known_args(words)
    options.state.mkdir(parents=True, exist_ok=True)
    site = options.state.absolute() / "site"
    for line in install(options.wheels, site):
        print(line, flush=True)
    session = Session(options.state.absolute(), site, options.out)
    session.start(options.seconds, others)
    return session.wait(options.wait)


def download(wheels: Path, python: str) -> int:
    """Download the wheels of jaxdist's dependencies, but for those of every image; returns the exit code."""
    wheels.mkdir(parents=True, exist_ok=True)
    # pip takes each of these as it is, and none that is older.
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux2014", *(f"manylinux_2_{n}" for n in (17, 27, 28)))]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *platforms]
    subprocess.run([*command, f"--python-version={python}", f"--dest={wheels}", *requirements()], check=True)
    for wheel in wheels.glob("*.whl"):
        if name_of(wheel) in OF_IMAGE + UNUSED:
            wheel.unlink()
    size = sum(wheel.stat().st_size for wheel in wheels.glob("*.whl"))
    print(f"{wheels}: {len(list(wheels.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB")
    return 0 if size <= CARRIED else 1


def requirements() -> list[str]:
    """Return jaxdist's dependencies as pip reads them."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def name_of(wheel: Path) -> str:
    """Return the name of the distribution of a wheel."""
    return plain(wheel.name.split("-")[0])


def install(wheels: Path, site: Path) -> list[str]:
    """Unpack the wheels of what is missing, or too old, into `site`; return a line on each.

    What an unpacked wheel needs is looked at as what jaxdist needs is. A wheel is a zip file whose content is imported
    as it is. It needs no pip, which an image may lack too.
    """
    if importlib.util.find_spec("packaging") is None:
        # Python imports from a wheel as from a folder.
        sys.path += map(str, wheels.glob("packaging-*.whl"))
    from packaging.requirements import Requirement

    carried = {name_of(wheel): wheel for wheel in sorted(wheels.glob("*.whl"))}
    taken = set()
    lines = []
    needed = [Requirement(text) for text in requirements()]
    while needed:
        requirement = needed.pop()
        name = plain(requirement.name)
        there = version_of(requirement.name)
        fine = there and requirement.specifier.contains(there, prereleases=True)
        if fine or name in taken or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        taken.add(name)
        wheel = carried.get(name)
        if wheel is None:
            if name not in UNUSED:
                lines.append(f"{requirement} is needed, {there or 'no version'} is installed, and no wheel is carried")
            continue
        if not for_this_python(wheel):
            lines.append(f"{wheel.name} is for another Python than {sys.version.split()[0]}")
            continue
        with zipfile.ZipFile(wheel) as archive:
            if not (site / f"{wheel.name}.unpacked").exists():
                site.mkdir(parents=True, exist_ok=True)
                archive.extractall(site)
                (site / f"{wheel.name}.unpacked").touch()
                lines.append(f"{wheel.name} unpacked; {there or 'no version'} is installed")
            (described,) = (member for member in archive.namelist() if member.endswith(".dist-info/METADATA"))
            description = email.message_from_bytes(archive.read(described))
        needed += [Requirement(text) for text in description.get_all("Requires-Dist", [])]
    return lines


def plain(distribution: str) -> str:
    """Return the name of a distribution, as file names of wheels have it."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


def version_of(distribution: str) -> str:
    """Return the installed version; empty if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def for_this_python(wheel: Path) -> bool:
    """Return whether this interpreter can import a wheel: by the tags in its name."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    _, _, _, tags = parse_wheel_filename(wheel.name)
    return not tags.isdisjoint(sys_tags())


class Session:
    """The measurement in the background: its process, which may be of an earlier call, and its files."""

    def __init__(self, state: Path, site: Path, out: Path | None):
        """`state` is the folder of its files, `site` that of the unpacked wheels."""
        self.result = state / "gpu.json"
        self.tables = state / "gpu.md"
        self.log = state / "log.txt"
        self.pid = state / "pid"
        self.site = site
        self.out = out
        self.process: subprocess.Popen | None = None

    def start(self, seconds: int, others: Sequence[str]) -> None:
        """Start it, unless it runs: with what is left of `seconds`, and other options of `bench gpu`."""
        if self.running():
            print("the measurement runs in the background", flush=True)
            return
        spent = 0.0
        if self.result.exists():
            spent = json.loads(self.result.read_text())["seconds"]
        command = [sys.executable, "-m", "jaxdist.bench", "gpu", f"--out={self.result}", *others]
        command.append(f"--seconds={max(1, int(seconds - spent))}")
        paths = [str(self.site), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self.log.open("ab") as log:
            # A session of its own outlives the call that has started it.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.pid.write_text(str(self.process.pid))

    def running(self) -> bool:
        """Return whether the measurement runs, also where another call has started it."""
        if self.process is not None:
            return self.process.poll() is None
        if not self.pid.exists():
            return False
        try:
            # A number may be another process's by now; one that has ended, and is not waited for, has no command.
            return str(self.result) in Path(f"/proc/{self.pid.read_text()}/cmdline").read_text()
        except OSError:
            return False

    def wait(self, seconds: float) -> int:
        """Wait for its end, or so many seconds; print and copy what there is. Returns the exit code."""
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            self._copy()
        self._copy()
        if self.process is not None and self.process.poll() == REFUSED:
            print(self.log.read_text().splitlines()[-1], flush=True)
            return REFUSED
        print(self.tables.read_text() if self.tables.exists() else self.log.read_text(), flush=True)
        if self.running():
            print("the measurement goes on in the background; the same command waits for more of it", flush=True)
            return STILL_RUNNING
        if not self.result.exists():
            return 1
        parts = json.loads(self.result.read_text())["parts"]
        return 1 if any(part["problem"] or part["state"] == "running" for part in parts) else 0

    def _copy(self) -> None:
        if self.out is None:
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for path in (self.result, self.tables, self.log):
                if path.exists():
                    shutil.copyfile(path, self.out / path.name)
        except OSError as error:
            # The measurement goes on, and the tables are printed.
            print(f"problem: --out: {error}", file=sys.stderr, flush=True)
            self.out = None


if __name__ == "__main__":
    sys.exit(main())
