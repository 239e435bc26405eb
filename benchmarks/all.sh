#!/usr/bin/env bash
# Every measurement on one GPU, in parts; results go to benchmarks/results, and the tables of docs/benchmarks.md are made from them.
#   benchmarks/all.sh tests kernels memory_e2b speed_e2b batches_e2b longest_e2b memory_31b experts grpo ranks_e2b ...   (the names of the parts are the functions below)
#   MODELS=DIR    where checkpoints are made (random weights at the real shapes; 31b takes 58 GB, 26b_a4b 51 GB)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
models=${MODELS:-/tmp/models}
results=benchmarks/results

make() { [ -f "$models/$1/config.json" ] || python3 benchmarks/make_model.py "$1" "$models/$1" --smooth; }
# What tests print as RESULT is kept.
gpu_tests() {  # NAME PYTEST-ARGUMENTS...
    local status=0
    python3 -m pytest -s "${@:2}" | tee /tmp/gpu_tests.txt || status=$?
    sed -n 's/^.*RESULT //p' /tmp/gpu_tests.txt >/tmp/gpu_results.txt
    if [ -s /tmp/gpu_results.txt ]; then
        python3 -c 'import json, sys; json.dump([json.loads(line) for line in sys.stdin], open(sys.argv[1], "w"), indent=1)' "$results/gpu_tests_$1.json" </tmp/gpu_results.txt
    fi
    return $status
}

speed() { python3 benchmarks/speed.py "$models/$1" --name "$1" --out "$results/speed_$1.json" "${@:2}"; }
batches_e2b() {  # batch 4, rows of 8192, and both
    make e2b
    for shape in "--batch 4" "--seq 8192" "--batch 4 --seq 8192"; do speed e2b --steps 10 --contenders trl_bf16 trl_bf16_kept ours ours_kept $shape; done
}
tests() { make e2b; E2B_CHECKPOINT=$models/e2b gpu_tests sft tests/gpu/test_sft_gpu.py; }
kernels() { gpu_tests kernels tests/gpu/test_kernels_gpu.py; }
agreement() { make e2b; speed e2b --contenders trl ours ours_plain --steps 50; }
for size in e2b e4b 31b 26b_a4b; do
    eval "memory_$size() { make $size; python3 benchmarks/memory.py $models/$size --name $size --out $results/memory_$size.json; }"
    eval "speed_$size() { make $size; speed $size; }"
    eval "longest_$size() { make $size; python3 benchmarks/longest_sequence.py $models/$size --name $size --seconds 400 --out $results/longest_$size.json; }"
done
ranks() { gpu_tests ranks tests/gpu/test_ranks_gpu.py; }
for size in e2b e4b 31b 26b_a4b; do  # two GPUs against one: speed, then the same rows
    eval "ranks_$size() { make $size; for batch in '--batch 1' '--total_batch 2 --steps 50 --contenders ours'; do python3 benchmarks/ranks.py $models/$size --name $size --out $results/ranks_$size.json \$batch; done; }"
done
limit_31b() { make 31b; python3 benchmarks/ranks.py "$models/31b" --name 31b --ranks 1 2 --memory_gib 16 --seq 1024 --contenders ours --out $results/ranks_31b.json; }
offloaded_31b() { make 31b; python3 benchmarks/memory.py "$models/31b" --name 31b --contenders ours --extra activation_offloading=true --out $results/memory_31b.json; }
experts() { make 26b_a4b; A4B_CHECKPOINT=$models/26b_a4b gpu_tests experts tests/gpu/test_experts_gpu.py; }
rollouts() { make e2b; E2B_CHECKPOINT=$models/e2b gpu_tests grpo tests/gpu/test_grpo_gpu.py; }
grpo() { python3 benchmarks/grpo_smollm2.py --at_once --out $results/grpo_smollm2.json; }

[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0"; exit 1; }
for part in "$@"; do
    declare -F "$part" >/dev/null || { echo "all.sh: no part '$part'" >&2; exit 1; }
    "$part"
done
python3 benchmarks/table.py
