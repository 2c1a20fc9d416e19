#!/usr/bin/env bash
# Measures the GPU tables of docs/benchmarks.md, or some parts of them:
#     bash benchmarks/run_gpu.sh [FOLDER FOR THE WIDENED MODELS [FOLDER OF seed-gqa [shape_7b] [shape_8b] [batches] [documents]]]
# Needs an NVIDIA GPU (if there are as many as parts, each measures one), quantspec, NumPy and, for the baseline, PyTorch.
# The shape of Llama-3.1-8B is left out without seed-gqa. Afterwards: python benchmarks/page.py
set -euo pipefail
cd "$(dirname "$0")/.."
parts=("${@:3}")
test ${#parts[@]} -gt 0 || parts=(shape_7b shape_8b batches documents)
for part in "${parts[@]}"; do
    case $part in
    shape_7b | shape_8b | batches | documents) ;;
    *) printf 'error: %s is not a part of the tables\nhint: use shape_7b, shape_8b, batches or documents\n' "$part" >&2 && exit 2 ;;
    esac
done
commit=$(python benchmarks/run.py --commit)
work=${1:-$(mktemp -d)}
models=${2:-}

# widened SOURCE NAME OPTIONS...: makes a widened model, unless it exists.
widened() {
    test -f "$work/$2/model.safetensors" || python tools/widen.py "$1" "$work/$2" "${@:3}"
}

# measure NAME SHAPE: the rows of one sequence on a widened model, and those of PyTorch at the shape.
measure() {
    local depths=4096,32768,130048
    # Rows are of an answer after its first 256 tokens, in which the policy measures.
    local bench=(quantspec bench -m "$work/$1" -p 0 -n 192 -r 2 --warm-up 256 --device cuda --json)
    "${bench[@]}" -d $depths --draft-pages all,64,auto --methods ar-fp16,ar-int8,quantspec,auto >"$work/$1.json"
    python benchmarks/run.py --plan "$work/$1" "$work/$1.json"
    # Eight repetitions, as -r 8 replaces -r 2: speeds by rejection differ by 15 % between texts.
    "${bench[@]}" -d 130048 -r 8 --draft-pages 32,64,auto --methods quantspec --accept rejection >"$work/$1-rejection.json"
    "${bench[@]}" -d 4096,32768 --weights int8 --methods ar-int8,quantspec >"$work/$1-int8.json"
    python tools/torch_step.py --shape "$2" --depths 4096,32768,131072 --vocab 8192 >"$work/$1-torch.jsonl"
}

# record_shape NAME: replaces the results of `measure`.
record_shape() {
    # A are the recorded rows, B the new ones; an error means that none match.
    quantspec bench --compare "benchmarks/results/h200-$1.json" "$work/$1.json" || true
    echo "$commit" >"benchmarks/results/h200-$1.commit"
    # The name of the model, without the folders of this machine.
    for name in "$1" "$1-rejection" "$1-int8"; do
        sed "s#$work/$1#$1#g" "$work/$name.json" >"benchmarks/results/h200-$name.json"
    done
    cp "$work/$1-torch.jsonl" "benchmarks/results/h200-$1-torch.jsonl"
}

# The parts; each uses one GPU.
shape_7b() {
    widened python/quantspec_cli/demo wide7 --times 16 --layers 32
    measure wide7 llama-2-7b
}
shape_8b() {
    test -n "$models" || return 0
    widened "$models/seed-gqa" wide8 --times 8 --layers 32
    measure wide8 llama-3.1-8b
}
# A batch of sequences, on a model with 16 KV heads: as many as fit at each context.
batches() {
    local batch=(quantspec bench -m "$work/wide-16-heads" -p 0 -n 250 -r 1 --warm-up 256 --device cuda -o jsonl)
    for sizes in "--batch 8,32 -d 4096,16384,31000" "--batch 64,128 -d 1024,4096" "--batch 256 -d 2048"; do
        # shellcheck disable=SC2086
        "${batch[@]}" $sizes --methods ar-int8,quantspec --draft-pages auto,16,64
        # shellcheck disable=SC2086
        "${batch[@]}" $sizes --methods quantspec --draft-pages auto,16 --accept rejection
    done >"$work/batch.jsonl"
    # With its 16-bit cache, 24 sequences of 16,384 tokens fit.
    python tools/torch_step.py --shape wide-16-heads --batch 8,24 --depths 4096,16384 >"$work/batch-torch.jsonl"
}
documents() {
    # A folder of 64 documents of 2,000 to 60,000 tokens, by `quantspec batch`.
    python benchmarks/folder.py "$work/wide-16-heads" --device cuda >"$work/folder.json"
    # Copies of earlier text, and what they cost where nothing is quoted.
    python benchmarks/quoting.py "$work/wide-16-heads" --device cuda --documents 3 --json "$work/quoting.json"
    # A second question about a document of 60,000 tokens.
    python benchmarks/second_question.py "$work/wide-16-heads" --device cuda --folder "$work" >"$work/second-question.json"
}

# record PART: replaces the results of a part.
record() {
    case $1 in
    shape_7b) record_shape wide7 ;;
    shape_8b) test -z "$models" || record_shape wide8 ;;
    batches)
        sed "s#$work/##g" "$work/batch.jsonl" >benchmarks/results/h200-batch.jsonl
        cp "$work/batch-torch.jsonl" benchmarks/results/h200-batch-torch.jsonl
        echo "$commit" >benchmarks/results/h200-batch.commit
        ;;
    documents)
        cp "$work/folder.json" benchmarks/results/h200-folder.json
        cp "$work/quoting.json" benchmarks/results/h200-quoting.json
        sed "s#$work/tmp[^:]*#FOLDER#" "$work/second-question.json" >benchmarks/results/h200-second-question.json
        echo "$commit" >benchmarks/results/h200-documents.commit
        ;;
    esac
}

for part in "${parts[@]}"; do
    case $part in batches | documents) widened python/quantspec_cli/demo wide-16-heads --times 8 --layers 32 ;; esac
done
if test "$(nvidia-smi --list-gpus | wc -l)" -ge ${#parts[@]}; then
    # At once: they share nothing but the cores of the host.
    running=()
    for i in "${!parts[@]}"; do
        CUDA_VISIBLE_DEVICES=$i ${parts[i]} &
        running+=($!)
    done
    for part in "${running[@]}"; do wait "$part"; done
else
    for part in "${parts[@]}"; do $part; done
fi
# Nothing is replaced before everything is measured: the files of a run are of one commit.
for part in "${parts[@]}"; do record "$part"; done
