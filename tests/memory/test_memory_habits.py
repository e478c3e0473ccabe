"""Each habit of what XLA holds changes a prediction here, and the program of a CPU is nearer to that than to theory."""

import ast
import inspect

import jax
import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig
from jaxdist.explain import CPU
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning import activations, memory, memory_habits, parameter_layout, pipeline_memory, step_bytes
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.memory_habits import HELD, Held
from jaxdist.sharding import Layout
from jaxdist.training.run import Run
from tests.communication.steps import config
from tests.planning.pipelines import config as pipeline
from tests.planning.sharded import sharded_by

DEEP = ModelConfig(layers=4, embed=128, heads=4, vocab=96, sequence=4)
WIDE = ModelConfig(layers=1, embed=32, heads=4, vocab=8192, sequence=32)

EXAMPLES = {
    "logits in f32": config("1x1x1", 1, WIDE),
    "one micro-batch": config("1x1x1", 1, DEEP),
    "weights cut out": pipeline("1x1x2", "interleaved", virtual=2, embed=128),
    "stash copied for a branch": pipeline("1x1x2", "zb-h1", remat="none"),
    "one update after the other": config("1x1x1", 1, DEEP, ParallelConfig(offload="optimizer")),
}
"""Habit -> a step whose prediction it changes."""

CASES = [(one, platform) for one in HELD for platform in one.platforms]


def name(value: Held | str) -> str:
    return value if isinstance(value, str) else value.name


def test_each_habit_has_an_example():
    assert list(EXAMPLES) == [one.name for one in HELD]


def predicted(asked: Config, platform: str) -> memory.Memory:
    shape = parse_mesh(asked.mesh)
    layout = Layout.of(Split(asked, shape), abstract_mesh(shape), CPU if platform == "cpu" else GPUS["h100"])
    return memory.predict(sharded_by(asked, models.build(asked.model, layout), layout))


def by_theory(habit: Held, platform: str, monkeypatch) -> memory.Memory:
    """What is predicted without this habit."""
    monkeypatch.setattr(memory_habits, "HELD", tuple(one for one in HELD if one is not habit))
    memory_habits._as_held.cache_clear()
    found = predicted(EXAMPLES[habit.name], platform)
    memory_habits._as_held.cache_clear()
    return found


@pytest.mark.parametrize(("habit", "platform"), CASES, ids=name)
def test_a_habit_changes_what_is_held_during_a_step_alone(habit, platform, monkeypatch):
    found = predicted(EXAMPLES[habit.name], platform)
    theory = by_theory(habit, platform, monkeypatch)
    assert theory.total != found.total
    assert theory.persistent == found.persistent


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["logits in f32", "weights cut out"])
def test_the_program_of_a_cpu_is_nearer_to_the_prediction_than_to_theory(habit, monkeypatch):
    """The other habits are seen in programs of H100s, which `test_target` compiles."""
    habit = next(one for one in HELD if one.name == habit)
    run = Run(EXAMPLES[habit.name])
    with jax.set_mesh(run.mesh):
        temporary = run.lower().compile().memory_analysis().temp_size_in_bytes
    corrected = sum(memory.predict(run.sharded).transient.values())
    theory = sum(by_theory(habit, "cpu", monkeypatch).transient.values())
    assert abs(corrected - temporary) < abs(theory - temporary)


def test_theory_reads_no_platform():
    for module in (activations, memory, parameter_layout, pipeline_memory, step_bytes):
        names = {
            node.attr for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Attribute)
        }
        assert "platform" not in names, module.__name__
