"""The papers' formulas, as closed forms: what is published is judged by them, and what jaxdist does not do itself.

What jaxdist holds and sends is predicted parameter by parameter in `planning.memory` and `planning.communication`.
These forms are for any model of which only its sizes are known. Numbers or numpy arrays go in, which broadcast; no jax.
The letters are the papers':

    N parameters        s sequence                    t ranks that split tensors
    L layers            b rows of a micro-batch       p ranks of the pipeline
    h embed             m micro-batches of a step     v chunks of each
    f mlp               V vocab                       d ranks that split the batch
    a heads             k key/value heads             c ranks that split the sequence
    q a x head size     kv k x head size
"""

import numpy as np

Number = float | np.ndarray
