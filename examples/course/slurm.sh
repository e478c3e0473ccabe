#!/bin/bash
# A job on four nodes with one GPU and four cores each. It prints the job script; --submit submits it:
#
#     bash examples/course/slurm.sh --submit
#
# The usual original asks Slurm for no signal and no requeue, so that its time limit kills it, and what it has trained since
# its last snapshot is lost; and two such jobs on a node meet at the port that it has in its text.
exec python -m jaxdist.launch slurm examples/course/fsdp.toml \
    --run-dir runs/slurm --nodes 4 --gpus-per-node 1 --cpus-per-task 4 --time 1:00:00 "$@"
