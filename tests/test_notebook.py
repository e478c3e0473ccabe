"""`examples/first_steps.ipynb`: it runs from top to bottom in a kernel of its own, and prints what it shows."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

needs_nbclient = pytest.mark.skipif(
    not (importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel")),
    reason="nbclient and ipykernel are not installed: pip install -e '.[notebook]'",
)


def execute() -> dict:
    """The notebook after all cells have run in a new kernel, on CPUs. Raises `CellExecutionError` if one fails."""
    import nbclient
    import nbformat

    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = nbclient.NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute(env=environment)
    for cell in notebook.cells:
        merge_streams(cell.get("outputs", []))
    return json.loads(nbformat.writes(notebook))


def merge_streams(outputs: list) -> None:
    """Join outputs to one stream: how the kernel cuts a text depends on the time between its parts."""
    for number in range(len(outputs) - 1, 0, -1):
        before, after = outputs[number - 1], outputs[number]
        if (before.get("name"), after.get("name")) == ("stdout", "stdout"):
            before["text"] += after["text"]
            del outputs[number]


def write() -> None:
    """Run the notebook and write its outputs into it: `python -c "from tests.test_notebook import *; write()"`."""
    ran = execute()
    ran["metadata"]["language_info"] = {"name": "python"}
    NOTEBOOK.write_text(json.dumps(ran, indent=1, ensure_ascii=False) + "\n")


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    """What a cell has printed; anything else than text on standard output fails the test."""
    assert all(output["output_type"] == "stream" and output["name"] == "stdout" for output in cell["outputs"]), cell
    return "".join("".join(output["text"]) for output in cell["outputs"])


@pytest.fixture(scope="module")
def committed():
    return json.loads(NOTEBOOK.read_text())


def test_it_is_committed_as_a_reviewer_can_read_it(committed):
    text = NOTEBOOK.read_text()
    assert text == json.dumps(committed, indent=1, ensure_ascii=False) + "\n"
    assert len(text) < 100_000
    names = [cell["id"] for cell in committed["cells"]]
    assert len(set(names)) == len(names)
    # Names, and not the random ones that editors give.
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)
    assert all(cell["metadata"] == {} for cell in committed["cells"])
    assert all(len(cell["outputs"]) <= 1 for cell in code_cells(committed))
    assert committed["metadata"]["language_info"] == {"name": "python"}


def test_it_shows_nothing_of_the_machine_it_ran_on(committed):
    assert [cell["execution_count"] for cell in code_cells(committed)] == [*range(1, 1 + len(code_cells(committed)))]
    shown = "\n".join(printed(cell) for cell in code_cells(committed))
    assert not re.search(r"(^|[\s'\"(])/\w|~/|[A-Z]:\\", shown)
    assert not re.search(r"\b\d+(\.\d+)? ?(s|ms|seconds|minutes)\b|\d\d:\d\d", shown)
    assert shown.count("as on one device") == 6


def test_the_first_cell_is_the_line_that_the_message_names(committed):
    """A kernel in which JAX has too few devices is sent there: tests/cluster/test_devices.py."""
    first = "".join(code_cells(committed)[0]["source"])
    assert re.sub(r"\s+#.*", "", first) == 'import jax\n\njax.config.update("jax_num_cpu_devices", 4)'


@pytest.mark.slow
@needs_nbclient
def test_it_runs_and_prints_what_it_shows(committed):
    ran = execute()
    for cell, again in zip(code_cells(committed), code_cells(ran), strict=True):
        shown, new = printed(cell), printed(again)
        assert NUMBER.sub("_", new) == NUMBER.sub("_", shown), cell["id"]
        numbers, others = ([float(number) for number in NUMBER.findall(text)] for text in (shown, new))
        assert others == pytest.approx(numbers, rel=1e-2, abs=2e-4), cell["id"]
