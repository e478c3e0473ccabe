"""Tells what the run of all mutants came to, and keeps it among the results."""

import pytest

from tests.mutants.runner import PASSED, Copy
from tests.mutants.summary import MUTANT, SECONDS, lines, results_file
from tests.mutants.table import mutants


@pytest.fixture(scope="session")
def copy(tmp_path_factory, request):
    """A copy of the package, in which the tests of all mutants that are asked for pass while it has no mistake."""
    made = Copy(tmp_path_factory.mktemp("mutants") / "copy")
    asked = {item.callspec.params["mutant"] for item in request.session.items if "copy" in item.fixturenames}
    found = made.run(*sorted({mutant.test for mutant in asked}))
    assert found.code == PASSED, found.output[-5000:]
    return made


def pytest_terminal_summary(terminalreporter):
    """Only a run of all mutants is written down: of some of them nobody can say how many are seen."""
    seconds: dict[str, float | None] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            properties = dict(report.user_properties)
            if report.when == "call" and MUTANT in properties:
                seconds[properties[MUTANT]] = properties[SECONDS] if outcome == "passed" else None
    if not seconds:
        return
    told = lines(mutants(), seconds)
    for line in told:
        terminalreporter.write_line(line)
    if all(mutant.id in seconds for mutant in mutants() if mutant.test):
        file = results_file()
        file.write_text("\n".join(told) + "\n", encoding="utf-8")
        terminalreporter.write_line(f"written to {file}")
