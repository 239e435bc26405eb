#!/usr/bin/env bash
# All set-up, then the tests, for each tested set of versions.
#   ./test.sh [newest|vllm|all] [pytest arguments]
# WORKERS=N: test files run at once (default 2).
# newest: the newest transformers; vllm: the transformers that vLLM admits. See constraints/ and, for PYTHON and TORCH_INDEX_URL, scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}  # spinning threads of two workers slow each other down
sets="newest vllm"
case "${1:-}" in
    newest | vllm) sets=$1; shift ;;
    all) shift ;;
    -h | --help) sed -n '2,5s/^# //p' "$0"; exit 0 ;;
esac

failed=
for name in $sets; do
    echo "== tests, set '$name'"
    if ! { scripts/setup.sh "$name" && ".venv-$name/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile "$@"; }; then failed+=" $name"; fi
done
if [ -n "$failed" ]; then echo "test.sh: failed:$failed" >&2; exit 1; fi
