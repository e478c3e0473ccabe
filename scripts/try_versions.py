"""Run the smoke set with the lowest versions of the packages that pyproject.toml allows, or with the newest ones.

    python scripts/try_versions.py lowest --python python3.11
    python scripts/try_versions.py newest --python python3.13
    python scripts/try_versions.py newest --python python3.13 --pre

It clones the repository as it is committed, installs it with its extra `test` into a new virtual environment, prints
the versions that matter, and ends as pytest does, which reads PYTEST_ADDOPTS, such as `-n 1`. `lowest` pins each
package to its lower bound, and fails if two of these bounds exclude each other. `--pre` takes release candidates too.
It is run by hand, when a bound changes or a package has a new release; put what it prints, with its date, into
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
OWN = "jaxdist"
EXTRA = "test"


def requirements() -> Iterator[Requirement]:
    """Yield what jaxdist and its extra `test` need, and the extras that this one names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = [*project["dependencies"], *project["optional-dependencies"][EXTRA]]
    for row in map(Requirement, rows):
        if row.name != OWN:
            yield row
            continue
        for extra in sorted(row.extras):
            yield from map(Requirement, project["optional-dependencies"][extra])


def lower_bound(requirement: Requirement) -> str | None:
    """Return the version that follows `>=`, or None."""
    for specifier in requirement.specifier:
        if specifier.operator == ">=":
            return specifier.version
    return None


def lowest() -> list[str]:
    """Return a pin to its lower bound for each package; extras without a bound follow the package that has one."""
    return sorted({f"{row.name}=={bound}" for row in requirements() if (bound := lower_bound(row))})


def installed(python: Path) -> dict[str, str]:
    """Return the versions of all packages in an environment, by name in lower case."""
    command = [python, "-m", "pip", "list", "--format", "json"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {one["name"].lower().replace("_", "-"): one["version"] for one in listed}


def main() -> int:
    """Install, print the versions, run the smoke set; return the exit code of pytest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("which", choices=["lowest", "newest"])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the new environment")
    parser.add_argument("--pre", action="store_true", help="with newest: release candidates too")
    asked = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="jaxdist-versions-") as folder:
        clone = Path(folder) / "jaxdist"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run([asked.python, "-m", "venv", clone / ".venv"], check=True)
        python = clone / ".venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "-e", f"{clone}[{EXTRA}]"]
        if asked.which == "lowest":
            command += lowest()
        if asked.pre:
            command.append("--pre")
        if subprocess.run(command, check=False).returncode:
            print("these versions cannot be installed together; pip says above which exclude each other")
            return 1

        versions = installed(python)
        print(subprocess.run([python, "--version"], check=True, capture_output=True, text=True).stdout.strip())
        for name in sorted({row.name.lower() for row in requirements()}):
            print(f"{name:20} {versions[name]}")
        sys.stdout.flush()
        # Optimised code, as users have it, and not that of tests/conftest.py.
        environment = {**os.environ, "XLA_FLAGS": ""}
        tests = [python, "-m", "pytest", "-m", "smoke and not slow"]
        return subprocess.run(tests, cwd=clone, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
