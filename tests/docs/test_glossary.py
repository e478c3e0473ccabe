"""docs/glossary.md: a term leads to a file that is there, and no axis of the mesh and no letter of a dim is missing."""

import re
from pathlib import Path

import pytest

from jaxdist.mesh import AXES
from jaxdist.sharding import LETTERS
from tests.tiers import faults

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| (.+) \| `(.+)` \|$", PAGE, re.MULTILINE)
TERMS = [term for term, _, _ in ROWS]

SEARCHED_FOR = """
FSDP; HSDP; ZeRO stages; gradient accumulation; micro-batch; mixed precision; activation checkpointing; remat;
all-gather; reduce-scatter; all-reduce; shard; replica; prefetch; overlap; exposed communication; bubble;
weight stashing; rendezvous; key-value store; straggler; fault tolerance; grouped-query attention; axis; dim;
logical axis; stage; chunk; global batch; tensor parallelism; sequence parallelism; coordinator; consensus; MFU
"""
"""What people who know other trainers look for."""

OF_OTHERS = """
DistributedSampler; set_epoch; DataLoader; num_workers; DeviceMesh; DTensor; fully_shard; no_sync; autocast; AMP;
GradScaler; loss scaling; activation offload; CPU offload; bucket_cap_mb; gradient bucketing; find_unused_parameters;
SyncBatchNorm; torch.compile; NVLink; NVSwitch; RCCL; dragonfly; fat tree; fragmentation; init_process_group;
world size; barrier; torchrun; elastic training; torchelastic; snapshot; state_dict; DCP
"""
"""Names from PyTorch, vendors and clusters: the row says what takes their place here."""

GUIDES = {
    "how-to/your-data.md": "DistributedSampler; set_epoch; DataLoader",
    "reference/modules.md": "find_unused_parameters; no_sync; bucket_cap_mb; SyncBatchNorm; GradScaler",
    "how-to/processes.md": "torchrun; init_process_group; rendezvous; elastic; fragmentation; RCCL",
    "how-to/resume.md": "snapshot; state_dict",
    "how-to/planning.md": "NVLink; NVSwitch; dragonfly; fat tree",
    "explanation/sharding.md": "activation offload",
}
"""The pages that say more, and what people search them for."""


def listed(terms: str) -> list[str]:
    return re.split(r";\s*", terms.strip())


def test_every_row_of_the_tables_is_read():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| term |")]
    assert len(lines) == len(ROWS) > 60


def has_a_meaning_and_a_file(term, meaning, path):
    """The file, or its name, has the words of the term, or of another name for it, up to their endings."""
    code = path + (ROOT / "jaxdist" / path).read_text().lower()
    names = [re.findall(r"\w+", name.lower()) for name in term.split(", ")]
    assert any(all(word[:6] in code for word in name) for name in names)
    assert meaning.rstrip(")").endswith(".")


def test_a_term_has_a_meaning_and_a_file():
    assert faults(ROWS, has_a_meaning_and_a_file) == []


def test_every_axis_and_every_letter_is_there():
    assert [axis for axis in AXES if f"`{axis}`" not in TERMS] == []
    assert [letter for letter in LETTERS if letter not in TERMS] == []


def test_what_people_look_for_is_there():
    words = {word.strip("`") for term in TERMS for word in term.split(", ")}
    assert [term for term in listed(SEARCHED_FOR) + listed(OF_OTHERS) if term not in words] == []


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_has_the_names_that_people_search_it_for(page):
    text = (ROOT / "docs" / page).read_text()
    assert [name for name in listed(GUIDES[page]) if name not in text] == []


def test_no_term_stands_twice():
    assert sorted(set(TERMS)) == sorted(TERMS)
