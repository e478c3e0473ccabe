"""The rooms: who may not import whom, and who may spell what (docs/design.md)."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from tests.touched import words

PACKAGE = Path(__file__).parent.parent / "jaxdist"
FILES = sorted(PACKAGE.rglob("*.py"))
COMMANDS = {"train", "evaluate", "generate", "explain", "plan", "checkpoints", "compare", "launch", "doctor"}
COMMANDS |= {"completion"}

READERS = ["jaxdist.programs", "jaxdist.explaining"]
"""Compiled programs, and how they compare with a prediction, which is not read off the program."""

PREDICTIONS = ["memory", "activations", "communication", "predicted_collectives", "parameter_layout", "step_bytes"]
PREDICTIONS += ["runs", "weight_traffic", "stream_traffic", "context_traffic", "expert_traffic", "replica_traffic"]
PREDICTIONS += ["compiler_habits", "memory_habits", "pipelines", "pipeline_memory", "collective_time"]
PREDICTIONS += ["search"]
"""What predicts; by none of it is a program read."""

NOT_FOR_PROGRAMS = [f"jaxdist.planning.{name}" for name in PREDICTIONS]

WITHOUT_JAX = ["folder", "schema", "keys", "rope", "model_config"]
WITHOUT_JAX += ["tokenizer", "special_tokens", "given_tokenizer", "added_tokens"]
"""What reads and writes small files: requests ask it, and answer in a moment."""

OF_MESHES = ["jaxdist.!config,mesh", "jax", "flax", "numpy"]

OF_CONFIGS = ["jaxdist.!config,files,huggingface", "jax", "flax", "numpy"]

COMPLETE = [f"jaxdist.weights.{name}" for name in ("base", "inheriting", "pretrained", "source", "steps", "upcycling")]
"""What is asked of weights once a request is complete."""

PURE = ["jaxdist", "jax", "flax", "numpy"]

FORBIDDEN = {
    "config": ["jaxdist.!config,optimizers,process", "jax", "flax"],
    "optimizers": ["jaxdist.!optimizers", "flax"],
    **dict.fromkeys(("config.rope_scaling", "parallel.partial_trees"), PURE),
    "process": ["jaxdist.!config", "jax", "flax", "numpy"],
    **dict.fromkeys(("process.exit_codes", "process.stop_signals"), PURE),
    "files": ["jaxdist.!config,files", "jax", "flax", "numpy"],
    "output": ["jaxdist.!files,mesh", "jax", "flax", "numpy"],
    "mesh": ["jaxdist.!config,mesh"],
    **dict.fromkeys(("mesh.context", "mesh.crossing", "mesh.split"), OF_MESHES),
    "sharding": ["jaxdist.!config,mesh"],
    "request": ["jaxdist.!config,process,files,mesh,request,data,huggingface,output,weights", *COMPLETE],
    "weights": [
        "jaxdist.!config,files,cluster,data,models,parallel,sharding,request,huggingface,training,weights",
        *(
            f"jaxdist.training.{name}"
            for name in ("run", "trainer", "train_run", "preparing", "starting", "save_policy", "restore", "export")
        ),
    ],
    "weights.named": ["jaxdist.!config,files,huggingface", "jax", "flax", "numpy"],
    "weights.source": ["jaxdist.!config,huggingface,weights", "jax", "flax", "numpy"],
    "parallel": ["jaxdist.models", "jaxdist.training", "jaxdist.weights", "jaxdist.data", "jaxdist.planning"],
    "models": [
        "jaxdist.parallel.zero",
        "jaxdist.parallel.placing",
        "jaxdist.parallel.placement",
        "jaxdist.training",
        "jaxdist.weights",
        "jaxdist.data",
        "jaxdist.planning",
    ],
    "data": ["jaxdist.!config,files,mesh,sharding,output,data,huggingface"],
    "huggingface": ["jaxdist.!config,files,sharding,huggingface"],
    **dict.fromkeys((f"huggingface.{name}" for name in WITHOUT_JAX), OF_CONFIGS),
    "planning": ["jaxdist.training", "jaxdist.weights", "jaxdist.data", "jaxdist.cluster", *READERS],
    "explaining": ["jaxdist.training", "jaxdist.weights", "jaxdist.data", "jaxdist.cluster"],
    "programs": ["jaxdist.!config,mesh,output,parallel,planning,process,programs", *NOT_FOR_PROGRAMS],
    "cluster": ["jaxdist.!config,process,files,mesh,output,cluster"],
    "training.forward.step": ["jaxdist.data", "jaxdist.training.checkpoint", "jaxdist.training.metrics"],
    "training": ["jaxdist.explaining", "jaxdist.lab", "jaxdist.bench"],
}
"""Room -> what it must not import; `jaxdist.!a,b` means nothing of jaxdist but a and b."""


def name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Names that a file imports; only at its top when not `everywhere`. What only types need does not count."""
    own = words(path)
    return set(own.at_once | own.later) if everywhere else set(own.at_once)


def breaks(module: str, rule: str) -> bool:
    if "!" not in rule:
        return module == rule or module.startswith(rule + ".")
    allowed = rule.split("!")[1].split(",")
    parts = module.split(".")
    return parts[0] == "jaxdist" and len(parts) > 1 and parts[1] not in [*allowed, "__version__"]


def offences(path: Path) -> list[str]:
    if path.name == "__main__.py":  # a command, whatever the room is in which it stands
        return []
    rules = [rule for room, banned in FORBIDDEN.items() if (name(path) + ".").startswith(room + ".") for rule in banned]
    everywhere = name(path) != "mesh"  # mesh imports jax where it makes one, not before
    return [f"{name(path)} imports {m}" for m in imports(path, everywhere) for rule in rules if breaks(m, rule)]


def test_rooms():
    assert [offence for path in FILES for offence in offences(path)] == []


def test_the_rules_are_about_modules_that_exist():
    banned = {rule for rules in FORBIDDEN.values() for rule in rules if rule.startswith("jaxdist.") and "!" not in rule}
    for module in {*FORBIDDEN, *(rule.removeprefix("jaxdist.") for rule in banned)}:
        path = PACKAGE / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_the_rules_can_be_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for room, line in [
        ("sharding", "from jaxdist.models import x"),
        ("data", "import jaxdist.training.forward.step"),
        ("parallel", "from jaxdist import data"),
        ("config", "import jax.numpy"),
        ("planning/memory", "from jaxdist.programs.hlo import collectives"),
        ("planning/communication", "from jaxdist.programs import target"),
        ("planning/search", "from jaxdist.explaining import report"),
    ]:
        path = tmp_path / f"{room}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(line)
        assert offences(path), line


def test_nothing_imports_commands_labs_or_benchmarks():
    for path in FILES:
        if not name(path).startswith(("bench", "lab", "doctor", "completion")) and name(path) != "__main__":
            banned = COMMANDS | {"bench", "lab"}
            assert not any(breaks(m, f"jaxdist.{c}") for m in imports(path) for c in banned), name(path)


def test_layouts_are_written_in_three_rooms_only():
    """`PartitionSpec` (`P`) in sharding, parallel and data.batches."""
    for path in FILES:
        if name(path) == "sharding" or name(path).startswith("parallel") or name(path) == "data.batches":
            continue
        names = {node.id for node in ast.walk(parsed(path)) if isinstance(node, ast.Name)}
        attributes = {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
        assert not {"P", "PartitionSpec"} & (names | attributes), name(path)


def test_pictures_are_written_in_one_room_only():
    """In `output.pictures`, whole and never through a link."""
    for path in FILES:
        attributes = {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
        assert name(path) == "output.pictures" or not attributes & {"savefig", "print_png"}, name(path)


def test_axis_names_are_spelled_in_mesh_only():
    """`data`, `model` and `pipeline` are sections of the configuration too: they count where a collective is told. The
    questions of `evaluate` have a field `context`."""
    from jaxdist.mesh import AXES, CONTEXT, DATA, MODEL, PIPELINE

    takers = {"P", "spec", "psum", "psum_scatter", "all_gather", "ppermute", "all_to_all", "axis_index", "reshard"}
    for path in FILES:
        tree = parsed(path)
        constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        told = [
            inner.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in takers
            for inner in ast.walk(node)
            if isinstance(inner, ast.Constant)
        ]
        if name(path) != "mesh":
            words = {DATA, MODEL, PIPELINE} | ({CONTEXT} if name(path) == "data.multiple_choice" else set())
            assert not {node.value for node in constants} & (set(AXES) - words), name(path)
            assert not set(told) & set(AXES), name(path)


READ_AS_JSON = {
    "files.json_files": "reads them all",
    "config.values": "a knob",
    "cluster.faults": "a variable of the environment",
    "cluster.kv_store": "what processes tell each other",
    "cluster.consensus": "what processes tell each other",
    "cluster.watchdog": "what processes tell each other",
    "training.checkpoint.shared_reading": "what processes tell each other",
    "doctor.network": "what processes tell each other",
    "doctor.sites": "what processes tell each other",
    "training.copies": "what processes tell each other",
    "data.readers.json_rows": "lines of data, each bounded",
    "huggingface.safetensors_file": "the header of a file of weights, which has limits of its own",
    "programs.trace": "the profile that this process has just written, which is large",
    "data.known": "what processes tell each other",
    "data.tokenizing.workers": "what its own children have written",
    "bench.gpu_process": "what its own child has written",
    "bench.gpu_runs": "what its own children have written",
    "bench.gpu_child": "what its own parent has written",
}
"""Modules that call `json.loads`, and on what; files are for `json_files` alone."""


def loads_json(path) -> bool:
    """Whether a file calls a function of `json` that reads."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "json":
            return True
        of_json = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "json"
        if of_json and node.attr not in ("dumps", "dump", "JSONDecodeError"):
            return True
    return False


def test_nobody_else_reads_json_from_a_file():
    assert {name(path) for path in FILES if loads_json(path)} == set(READ_AS_JSON)


BEFORE_JAX = ["config", "mesh", "request", "train", "launch", "checkpoints", "weights.source", "training.entering"]
BEFORE_JAX += ["cluster.process_env", "cluster.local", "cluster.slurm", "cluster.kubernetes"]
BEFORE_JAX += ["cluster.heartbeat"]
BEFORE_JAX += ["training.checkpoint.step_dir", "data.__main__", "lab.__main__", "doctor.__main__"]
BEFORE_JAX += ["completion.table"]

IMPORT_ONE_BY_ONE = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(f"jaxdist.{module}")
    if {"jax", "numpy"} & sys.modules.keys():
        sys.exit(f"{module} imports one of them")
"""


def test_no_jax_before_the_request_is_read():
    command = [sys.executable, "-c", IMPORT_ONE_BY_ONE, *BEFORE_JAX]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_wheel_says_that_it_has_types():
    """PEP 561. The wheel takes the folder of the package as it is."""
    with (PACKAGE.parent / "pyproject.toml").open("rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": [PACKAGE.name]}
    assert (PACKAGE / "py.typed").is_file()


def test_files_tell_one_story():
    """At most 500 lines each."""
    assert {name(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 500} == {}


def test_training_has_eight_levels_and_no_circle():
    """Each of its files, and each of its folders as a whole, stands above what it imports; so do files of `weights`."""
    below = {}
    for path in [*(PACKAGE / "training").rglob("*.py"), *(PACKAGE / "weights").rglob("*.py")]:
        own = unit(name(path))
        found = {unit(module.removeprefix("jaxdist.")) for module in imports(path, everywhere=False)}
        below.setdefault(own, set()).update(found - {own, None})

    levels = {}
    while below.keys() - levels.keys():
        ready = [own for own in below.keys() - levels.keys() if below[own] <= levels.keys()]
        assert ready, f"a circle among {sorted(below.keys() - levels.keys())}"
        for own in ready:
            levels[own] = 1 + max((levels[other] for other in below[own]), default=0)
    assert max(levels.values()) <= 8
    assert levels["train_run"] == max(levels.values())


def test_no_module_stands_in_a_circle():
    """Imports inside functions, and those for types alone, count too."""
    above = {name(path): needed(path) for path in FILES}
    while True:
        lowest = {module for module, others in above.items() if not others}
        if not lowest:
            break
        above = {module: others - lowest for module, others in above.items() if module not in lowest}
    assert above == {}, "what stands in a circle, or above one"


def needed(path: Path) -> set[str]:
    """The other modules of the package that a file names in an import, wherever that stands."""
    modules = {name(one) for one in FILES}
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                own = f"{node.module}.{alias.name}".removeprefix("jaxdist.")
                found.add(own if own in modules else own.rpartition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("jaxdist.") for alias in node.names}
    return found & modules - {name(path)}


def unit(module: str) -> str | None:
    """The file or the folder of `training` that a module belongs to, such as `forward` for training.forward.step.

    A file of `weights` keeps the name of its folder.
    """
    parts = module.split(".")
    if parts[0] == "weights" and len(parts) > 1:
        return f"weights.{parts[1]}"
    return parts[1] if parts[0] == "training" and len(parts) > 1 else None
