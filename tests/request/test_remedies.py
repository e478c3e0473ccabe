"""What a refusal offers works: each remedy that it names takes its sentence back, in requests drawn at random."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import NamedTuple, get_args

import pytest

from jaxdist.config import RequestError
from jaxdist.mesh import AXES, parse_mesh
from jaxdist.optimizers.table import UPDATE_RULES
from jaxdist.request import load
from jaxdist.request.knobs import KNOBS

CHOICES = {
    "model.family": ["gpt", "gpt", "llama", "llama", "moe", "cnn", "resnet18"],
    "model.layers": [1, 2, 3, 4, 6],
    "model.embed": [60, 64, 96, 128],
    "model.heads": [1, 2, 3, 4, 6, 8],
    "model.head_dim": [0, 15, 16],
    "model.kv_heads": [0, 1, 2, 3, 4, 5],
    "model.mlp": [0, 30, 64, 510],
    "model.experts": [3, 4, 6, 8],
    "model.experts_per_token": [1, 2, 5],
    "model.expert_mlp": [0, 30, 64],
    "model.sequence": [12, 30, 64, 126, 128],
    "model.positions": [0, 64, 256],
    "model.window": [0, 8, 128],
    "model.dropout": [0.0, 0.1],
    "model.remat": ["none", "dots", "block", "stage", "offload"],
    "model.lora_rank": [0, 0, 0, 4, 200],
    "model.lora_targets": ["", "q_proj", "gate_proj"],
    "parallel.zero": [0, 1, 2, 3],
    "parallel.sequence": ["false", "true"],
    "parallel.context": ["auto", "ring", "ulysses"],
    "parallel.replica_zero": ["true", "false"],
    "parallel.gradient_compression": ["exact", "exact", "int8", "powersgd"],
    "parallel.compression_rank": [4, 8],
    "parallel.delayed_gradients": ["false", "false", "true"],
    "parallel.micro_batches": ["inside", "outside"],
    "parallel.offload": ["none", "optimizer"],
    "parallel.rules.heads": ["model", "", "data"],
    "parallel.rules.mlp": ["model", "", "pipeline"],
    "parallel.rules.vocab": ["model", "", "modle"],
    "pipeline.schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-u", "pipedream"],
    "pipeline.microbatches": [0, 1, 3, 4],
    "pipeline.virtual_stages": [0, 1, 2, 3, 5],
    "precision": ["auto", "float32", "bfloat16", "mixed"],
    "optimizer.name": [*UPDATE_RULES],
    "optimizer.schedule": ["cosine", "constant", "inverse-sqrt"],
    "optimizer.warmup": [0, 9, 30],
    "optimizer.decay_fraction": [0.2, 0.9],
    "optimizer.beta2": [0.95, 0.9],
    "optimizer.clip": [0.0, 1.0],
    "train.steps": [8, 20, 150],
    "train.global_batch_size": [8, 12, 16, 48],
    "train.accumulation": [1, 2, 3],
    "train.local_steps": [0, 0, 0, 2],
    "sample.every": [0, 0, 5],
    "sample.prompts": ["", "def"],
    "profile.steps": ["", "3", "9-12", "5-4"],
}
"""Values of knobs that restrict each other."""

SIZES = {
    "data": [1, 2, 3, 4, 5],
    "replica": [1, 1, 1, 2],
    "expert": [1, 1, 1, 2, 3, 4],
    "context": [1, 1, 2, 3, 4, 8],
    "model": [1, 1, 2, 3, 4, 8],
    "pipeline": [1, 1, 2, 3, 5, 8],
}

Request = dict[str, str]
"""The text of each knob; `mesh` is written with the names of its axes."""


def draw(rng: random.Random) -> Request:
    """A few knobs and axes, most of them legal alone."""
    knobs = rng.sample(sorted(CHOICES), rng.randint(1, 7))
    request = {name: str(rng.choice(CHOICES[name])) for name in knobs}
    axes = rng.sample(AXES, rng.randint(1, 3))
    return request | {"mesh": mesh_text({axis: rng.choice(SIZES[axis]) for axis in axes})}


def mesh_text(sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def problems(request: Request) -> list[str]:
    try:
        load(None, request)
    except RequestError as error:
        return error.problems
    return []


WORDS = sorted({str(one) for name in KNOBS for one in get_args(KNOBS[name].annotation) if isinstance(one, str)})


def kind_of(problem: str) -> str:
    """What the sentence says without its values: two sentences of one kind are about the same mistake."""
    text = problem.split(";")[0]
    text = re.sub(r"\(mesh [^)]*\)|mesh [\w=,.-]+|'[^']*'", "", text)
    text = re.sub(r"\bmodel\.family \w+|\bis (empty|true|false)", "", text)
    text = re.sub(rf"(?<![\w.])({'|'.join(map(re.escape, WORDS))})(?![\w.=])", "", text)
    return re.sub(r"[\d.e+]*\d[\d.e+]*( x )?", "", text)


class Remedy(NamedTuple):
    """A way out of a refusal: each value is that of a knob, or of an axis; None leaves the knob out."""

    text: str
    values: dict[str, str | None]


OPTION = re.compile(
    r"(?P<name>[\w.]+|the \w+ axis|it) to (at most )?(?P<values>'?[\w.-]*'?(?: or '?[\w.-]+'?)*)(?P<more>.*)"
)

OTHER_WAYS = (
    r"lower (?P<name>[\w.]+) to at most (?P<values>\d+)",
    r"use (?P<values>'model'(, or '')?)",
    r"did you mean (?P<values>'model')",
    r"write (?P<values>\d+-\d+)",
    r"choose among (?P<values>\w+)",
)


def remedies(problem: str) -> Iterator[Remedy]:
    """Yield each way out that the sentence names."""
    head, _, ways = problem.partition("; ")
    it = re.findall(r"\b(?:[a-z]+\.)+[a-z_0-9]+|\bprecision\b", head)[0]
    if ways.startswith("leave it out"):
        values: dict[str, str | None] = {it: None}
        yield from (Remedy(ways, values | more) for more in more_of(ways))
        return
    given = re.match(r"give those devices to (\w+)", ways)
    if given:
        axis = re.search(r"has (\w+)=(\d+)", head)
        yield Remedy(ways, {f"the {axis[1]} axis": "1", f"the {given[1]} axis": f"x{axis[2]}"})
        return
    for way in OTHER_WAYS:
        found = re.match(way, ways)
        if found:
            name = found.groupdict().get("name") or "it"
            values = re.findall(r"'(\w*)'", found["values"]) or [found["values"]]
            yield from (Remedy(ways, {it if name == "it" else name: value}) for value in values)
            return
    if not ways.startswith("set "):
        return
    for option in re.split(r", or (?=[\w.]+ to |[\w.]+ and [\w.]+ to |the \w+ axis)", ways.removeprefix("set ")):
        found = OPTION.match(option)
        both = re.match(r"([\w.]+) and ([\w.]+) to '?(\w+)'?", option)
        if both:
            yield Remedy(option, {both[1]: both[3], both[2]: both[3]})
        elif found:
            left_out = re.findall(r"leave ([\w., ]+) out", found["more"])
            others = {name: None for text in left_out for name in re.split(r", | and ", text)}
            for value in found["values"].split(" or "):
                name = it if found["name"] == "it" else found["name"]
                yield Remedy(option, {name: value.strip("'")} | others)


def more_of(ways: str) -> list[dict[str, str | None]]:
    """What is to be changed as well where a knob is left out."""
    also = re.search(r"and set ([\w.]+) to (\w+)", ways)
    if also:
        return [{also[1]: also[2]}]
    divided = re.search(r"and divide ([\w.]+) by (\d+)", ways)
    return [{divided[1]: f"/{divided[2]}"}] if divided else [{}]


def changed(request: Request, remedy: Remedy) -> Request:
    request = dict(request)
    for name, value in remedy.values.items():
        if name.startswith("the "):
            axis = name.split()[1]
            shape = parse_mesh(request["mesh"])
            shape[axis] = shape[axis] * int(value[1:]) if value.startswith("x") else int(value)
            request["mesh"] = mesh_text(shape)
        elif value is None:
            request.pop(name, None)
        elif value.startswith("/"):
            rows = int(request.get(name, KNOBS[name].default))
            request[name] = str(rows // int(value[1:]))
        else:
            request[name] = value
    return request


def wrong(request: Request) -> tuple[int, list[str]]:
    """Return how many remedies the refusal of a request names, and those that do not work.

    One works if its sentence is gone, and if no way out of a sentence that is new then brings it back.
    """
    before = problems(request)
    known = set(map(kind_of, before))
    count = 0
    found = []
    for problem in before:
        for remedy in remedies(problem):
            count += 1
            after = changed(request, remedy)
            left = problems(after)
            new = [one for one in left if kind_of(one) not in known]
            back = [next_ for one in new for next_ in remedies(one) if is_told(problem, changed(after, next_))]
            # Without adapters or samples, what only they use is to be left out too, as its own sentence says.
            of_them = any(value == "0" for value in remedy.values.values())
            useless = [one for one in new if "does not use it" in one and not of_them]
            if is_told(problem, after) or back or useless:
                found.append(f"{request}\n  {problem}\n  {remedy}\n  {left}\n  leads back: {back}")
    return count, found


def is_told(problem: str, request: Request) -> bool:
    """Return whether the request is refused for the mistake of which this sentence speaks."""
    return kind_of(problem) in map(kind_of, problems(request))


ADVICE = {
    "sample.every is , but sample.prompts has no  to continue",
    "profile.steps - goes beyond train.steps ",
    "optimizer.warmup  and the decay of optimizer.decay_fraction train.steps  =  are longer than the run",
    "optimizer.warmup  is more than train.steps ",
}
"""Mistakes of which the sentence names no values that would do, but what to change."""


def check(seeds: range) -> None:
    count = 0
    found = []
    without = set()
    for seed in seeds:
        request = draw(random.Random(seed))
        more, bad = wrong(request)
        count += more
        found += [f"seed {seed}: {one}" for one in bad]
        without |= {kind_of(one) for one in problems(request) if not list(remedies(one))}
    assert not found, "\n".join(found)
    assert without <= ADVICE
    assert count > 2 * len(seeds)


def test_a_remedy_takes_its_sentence_back():
    check(range(200))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(8))
def test_every_remedy_takes_its_sentence_back(part):
    check(range(200 + 2500 * part, 200 + 2500 * (part + 1)))


NAMED = [
    ("1x1x2", {"model.layers": "2", "pipeline.schedule": "zb-u", "pipeline.virtual_stages": "3"}),
    ("1x1x2", {"model.layers": "2", "pipeline.schedule": "interleaved", "pipeline.virtual_stages": "3"}),
    ("2x1x1", {"pipeline.virtual_stages": "5"}),
    ("1x1x1", {"model.family": "cnn", "model.remat": "stage"}),
    ("1x3x1", {"model.heads": "2", "model.mlp": "2", "parallel.sequence": "true", "model.sequence": "127"}),
    ("1x2x1", {"model.heads": "1", "parallel.sequence": "true"}),
    ("model=3,context=3", {}),
]
"""Refusals of which a remedy once led back, or contradicted another."""


@pytest.mark.parametrize(("mesh", "request_"), NAMED)
def test_no_remedy_leads_back(mesh, request_):
    shape = {axis: size for axis, size in parse_mesh(mesh).items() if size > 1} or {"data": 1}
    count, found = wrong({**request_, "mesh": mesh_text(shape)})
    assert count
    assert not found, "\n".join(found)


def test_one_stage_is_named_where_no_more_have_layers():
    (problem,) = problems({**NAMED[0][1], "mesh": "pipeline=2"})
    assert "or pipeline.virtual_stages to 1," in problem
    assert problem.endswith("or pipeline.schedule to 1f1b and leave pipeline.virtual_stages out")


def test_a_remedy_that_fails_is_seen(monkeypatch):
    """The test itself: a sentence whose way out does nothing, and one that leads back."""
    request = {"mesh": "data=1", "model.heads": "7"}
    monkeypatch.setattr("jaxdist.request.checks.model.head_counts", lambda model, ways=1: [3, 9])
    count, found = wrong(request)
    assert count > len(found) > 0
