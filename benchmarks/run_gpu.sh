#!/usr/bin/env bash
# Measures the GPU tables of docs/benchmarks.md: bash benchmarks/run_gpu.sh [FOLDER FOR THE WIDENED MODELS]
# Needs an NVIDIA GPU, quantspec, NumPy and, for the baseline, PyTorch. Afterwards: python benchmarks/run.py --render
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(python benchmarks/run.py --commit)
work=${1:-$(mktemp -d)}
test -f "$work/wide7/model.safetensors" || python tools/widen.py python/quantspec_cli/demo "$work/wide7" --times 16 --layers 32
# Rows are of an answer after its first 256 tokens, in which the policy measures.
wide=(quantspec bench -m "$work/wide7" -p 0 -n 192 --warm-up 256 --device cuda --json)
"${wide[@]}" -r 2 -d 4096,32768,130048 --draft-pages all,64,auto --methods ar-fp16,ar-int8,quantspec,auto >"$work/bench.json"
python benchmarks/run.py --plan "$work/wide7" "$work/bench.json"
"${wide[@]}" -r 2 -d 130048 --draft-pages 64 --methods quantspec --accept rejection >"$work/bench-rejection.json"
"${wide[@]}" -r 2 -d 4096,32768 --weights int8 --methods ar-int8,quantspec >"$work/bench-int8.json"
python tools/torch_step.py --shape llama-2-7b --depths 4096,32768,131072 --vocab 8192 >"$work/torch.jsonl"
# A batch of sequences, on a model with 16 KV heads: as many as fit at each context.
test -f "$work/wide-16-heads/model.safetensors" ||
    python tools/widen.py python/quantspec_cli/demo "$work/wide-16-heads" --times 8 --layers 32
batch=(quantspec bench -m "$work/wide-16-heads" -p 0 -n 250 -r 1 --warm-up 256 --device cuda -o jsonl)
for sizes in "--batch 8 -d 4096,16384,31000" "--batch 32 -d 4096,16384"; do
    # shellcheck disable=SC2086
    "${batch[@]}" $sizes --methods ar-int8,quantspec --draft-pages auto,16,64
    # shellcheck disable=SC2086
    "${batch[@]}" $sizes --methods quantspec --draft-pages auto,16 --accept rejection
done >"$work/batch.jsonl"
# A folder of 64 documents of 2,000 to 60,000 tokens, by `quantspec batch`.
python benchmarks/folder.py "$work/wide-16-heads" --device cuda >"$work/folder.json"
# Copies of earlier text, and what they cost where nothing is quoted.
python benchmarks/quoting.py "$work/wide-16-heads" --device cuda --documents 3 --json "$work/quoting.json"
# A second question about a document of 60,000 tokens.
python benchmarks/second_question.py "$work/wide-16-heads" --device cuda --folder "$work" >"$work/second-question.json"
# A are the recorded rows, B the new ones; an error means that none match.
quantspec bench --compare benchmarks/results/h200-wide7.json "$work/bench.json" || true
# Nothing is replaced before everything is measured: the files are of one commit.
echo "$commit" >benchmarks/results/h200-wide7.commit
# The name of the model, without the folders of this machine.
for name in "" -rejection -int8; do
    sed "s#$work/wide7#wide7#g" "$work/bench$name.json" >"benchmarks/results/h200-wide7$name.json"
done
cp "$work/torch.jsonl" benchmarks/results/h200-wide7-torch.jsonl
sed "s#$work/##g" "$work/batch.jsonl" >benchmarks/results/h200-batch.jsonl
cp "$work/folder.json" benchmarks/results/h200-folder.json
cp "$work/quoting.json" benchmarks/results/h200-quoting.json
cp "$work/second-question.json" benchmarks/results/h200-second-question.json
