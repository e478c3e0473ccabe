"""A family of layers of several kinds, which exists in tests alone: Llama whose every third layer has no window."""

import pytest

from jaxdist.config.model import FAMILIES

PERIOD = ("sliding", "sliding", "full")
LAYERS = 7
"""Two periods, and the first layer of a third."""


@pytest.fixture(scope="module", autouse=True)
def llama_of_several_kinds():
    """Give llama this period for the tests of a module that imports the fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "llama", FAMILIES["llama"]._replace(period=PERIOD))
        yield
