#!/usr/bin/env bash
# Measure the GPU of a machine that is lent for a short time and has no internet: docs/how-to/measure.md.
#
#   scripts/gpu_session.sh wheels            with internet: download what an image may lack into gpu_wheels/
#   scripts/gpu_session.sh [options]         on the GPU: install it, measure in the background, wait, print the tables
#
# The same command goes on where an earlier call, or a process that was killed, has ended. PYTHON names the interpreter.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_session.py" "$@"
