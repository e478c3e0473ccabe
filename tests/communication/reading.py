"""The reader of compiled programs, as tests of communication use it."""

from jax.sharding import Mesh

from jaxdist.planning import hlo


def collectives(program: str, mesh: Mesh) -> list[hlo.Collective]:
    """Refuses collectives in a branch, which some devices may not take: how often they run is not known."""
    found = hlo.collectives(program, mesh)
    assert not [one for one in found if one.branch], "a collective in a branch"
    return found
