"""`--touched` runs the tests that can see a change, in a tree that is made up, and leaves out the others."""

import subprocess
from types import SimpleNamespace

import pytest

from tests.touched import Graph, changed, in_order, python_files

TREE = {
    "jaxdist/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jaxdist.api\n"
    "__version__ = '1'\ndef __getattr__(name):\n    from jaxdist import api\n",
    "jaxdist/api.py": "from jaxdist.model import Model",
    "jaxdist/model/__init__.py": "from jaxdist.model.base import Model",
    "jaxdist/model/base.py": "",
    "jaxdist/model/gpt.py": "def late():\n    import jaxdist.mesh",
    "jaxdist/mesh.py": "'''Names jaxdist.model.gpt in words only.'''\nfrom jaxdist import __version__",
    "jaxdist/train.py": "import jaxdist.model.gpt\nCONFIGS = 'configs'",
    "jaxdist/worker.py": "",
    "jaxdist/apart.py": "COMMAND = ['python', '-m', 'jaxdist.worker']",
    "jaxdist/__main__.py": "run = lambda name: __import__(f'jaxdist.{name}')",
    "tests/conftest.py": "",
    "tests/helpers.py": "import jaxdist.mesh",
    "tests/test_mesh.py": "from tests.helpers import x",
    "tests/test_gpt.py": "from jaxdist.model import gpt",
    "tests/test_library.py": "import jaxdist\njaxdist.parallelize()",
    "tests/test_train.py": "COMMAND = 'python -m jaxdist.train --help'",
    "tests/test_program.py": "PROGRAM = 'from jaxdist.model import gpt, base'",
    "tests/test_apart.py": "import jaxdist.apart",
    "tests/test_main.py": "import jaxdist.__main__",
    "tests/test_docs.py": "PAGES = ROOT / 'docs'",
    "tests/rows/conftest.py": "import jaxdist.worker",
    "tests/rows/test_rows.py": "",
    "tests/rows/table.csv": "",
    "docs/a.md": "",
    "jaxdist/configs/tiny.toml": "",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("tests/test_gpt.py", "gpt"),
        ("tests/helpers.py", "mesh"),
        ("jaxdist/mesh.py", "mesh gpt train program main"),  # functions that import count
        ("jaxdist/model/gpt.py", "gpt train program main"),  # not the package, and no words of a docstring
        ("jaxdist/model/base.py", "gpt library train program main"),  # imported with the package
        ("jaxdist/train.py", "train main"),
        ("jaxdist/worker.py", "apart main rows/rows"),
        ("jaxdist/configs/tiny.toml", "train main"),
        ("docs/a.md", "docs"),
        ("tests/rows/table.csv", "rows/rows"),
        ("LICENSE", ""),
    ],
)
def test_what_can_see_a_change(change, seen, tree):
    graph = Graph([name for name in TREE if name.endswith(".py")], tree)
    folders = [name.rpartition("/") for name in seen.split()]
    assert graph.tests([change]) == {f"tests/{folder}{slash}test_{name}.py" for folder, slash, name in folders}


def test_what_all_depend_on(tree):
    graph = Graph([name for name in TREE if name.endswith(".py")], tree)
    everything = {name for name in TREE if "/test_" in name}
    assert graph.tests(["pyproject.toml"]) == graph.tests(["tests/conftest.py"]) == everything
    assert graph.tests([]) == set()


def test_what_has_changed(tmp_path):
    def git(*words):
        words = ("-c", "user.name=x", "-c", "user.email=x", *words)
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-qm", name)
    git("checkout", "-qb", "branch")
    (tmp_path / "c.py").touch()
    assert changed(root=tmp_path) == ("HEAD", ["c.py"])
    git("add", "c.py")
    git("commit", "-qm", "c")
    assert changed(root=tmp_path)[1] == ["c.py"]
    assert changed("main~1", tmp_path) == ("main~1", ["b.py", "c.py"])
    assert python_files(tmp_path) == ["a.py", "b.py", "c.py"]


def test_the_slowest_come_last_in_each_process():
    items = [SimpleNamespace(nodeid=name, keywords={"slow"} if name == "d" else {}) for name in "abcd"]
    ordered = lambda workers: "".join(item.nodeid for item in in_order(items, {"a": 9.0, "b": 1.0}, workers))
    assert ordered(1) == "cdba"
    assert ordered(2) == "cbda"
