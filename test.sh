#!/usr/bin/env bash
# All set-up, then the tests, for each tested set of versions.
#   ./test.sh [newest|vllm|all] [pytest arguments]
# WORKERS=N: test files run at once (default 2).
# newest: the newest transformers; vllm: the transformers that vLLM admits. See constraints/ and, for PYTHON and TORCH_INDEX_URL, scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}  # spinning threads of two workers slow each other down
# Python compiles what it imports, a small part of what is installed, and must be allowed to keep it.
export PIP_COMPILE=${PIP_COMPILE:-0}
unset PYTHONDONTWRITEBYTECODE
sets="newest vllm"
case "${1:-}" in
    newest | vllm) sets=$1; shift ;;
    all) shift ;;
    -h | --help) sed -n '2,5s/^# //p' "$0"; exit 0 ;;
esac

# While the tests of one set run, the next set is set up.
log=$(mktemp)
pending=
trap 'if [ -n "$pending" ]; then kill -- "-$pending" 2>/dev/null || true; fi; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
begin_setup() {
    set -m  # a process group of its own, which can be ended as a whole
    scripts/setup.sh "$1" >"$log" 2>&1 </dev/null &
    pending=$!
    set +m
}
end_setup() {
    local code=0
    wait "$pending" || code=$?
    pending=
    cat "$log"
    return "$code"
}

failed=
# Without reordering, tests/conftest.py decides which files start first.
set -- -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
names=($sets)
for i in "${!names[@]}"; do
    name=${names[i]} next=${names[i + 1]:-} ready=yes
    echo "== tests, set '$name'"
    if [ -n "$pending" ]; then end_setup || ready=; else scripts/setup.sh "$name" || ready=; fi
    if [ -n "$next" ]; then begin_setup "$next"; fi
    if [ -z "$ready" ] || ! ".venv-$name/bin/python" "$@"; then failed+=" $name"; fi
done
if [ -n "$failed" ]; then echo "test.sh: failed:$failed" >&2; exit 1; fi
