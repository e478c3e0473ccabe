"""Layers that are written out send and compute what the loop over them does (`model.unroll_layers`)."""

import pytest

from jaxdist.config import ParallelConfig
from jaxdist.explain import explain
from jaxdist.programs import target
from tests.communication import steps
from tests.communication.arithmetic import product_flops
from tests.communication.reading import collectives, summary
from tests.parity import cases

MESH = "data=2,model=2"
WEIGHTS = "all-gather", ("data",)


@pytest.mark.parametrize(("zero", "remat"), [(3, "block"), (2, "dots")])
def test_layers_send_and_compute_what_they_do_in_a_loop(zero, remat):
    """XLA would keep what remat is to compute again, if it saw both passes as one program. On CPUs it gathers the
    weights of a layer once for both, as `explain` says (`explaining.known_differences`)."""
    flops, sent = [], []
    for unrolled in False, True:
        model = cases.LLAMA.model_copy(update=dict(heads=4, remat=remat, unroll_layers=unrolled))
        program = steps.compiled(mesh=MESH, model=model, parallel=ParallelConfig(zero=zero)).as_text()
        flops.append(product_flops(program))
        found = summary(collectives(program, steps.mesh_of(MESH)))
        sent.append({key: elements for key, (_, elements) in found.items()})
    assert flops[0] == flops[1]
    if zero == 3:
        assert sent[1].pop(WEIGHTS) < sent[0].pop(WEIGHTS)
    assert sent[0] == sent[1]


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_remat_computes_again_on_a_gpu_too():
    """Where both passes are one program, XLA:GPU would keep what the forward pass has computed."""
    found = []
    for unrolled in False, True:
        model = cases.LLAMA.model_copy(update=dict(heads=4, remat="block", unroll_layers=unrolled))
        asked = steps.config(mesh="1x1x1", model=model)
        report = explain(asked, "h100")
        found.append(report.kernels.products)
    assert found[0] == found[1]
