#!/usr/bin/env bash
# Measures the GPU table of docs/benchmarks.md: bash benchmarks/run_gpu.sh [FOLDER FOR THE WIDENED MODEL]
# Needs an NVIDIA GPU, quantspec, NumPy and, for the baseline, PyTorch. Afterwards: python benchmarks/run.py --render
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-$(mktemp -d)}
test -f "$work/wide7/model.safetensors" || python tools/widen.py python/quantspec_cli/demo "$work/wide7" --times 16 --layers 32
quantspec bench -m "$work/wide7" -p 0 -n 192 -r 3 -d 4096,32768,130048 --draft-pages all,64 \
    --methods ar-fp16,ar-int8,quantspec --device cuda --json >"$work/bench.json"
python benchmarks/run.py --plan "$work/wide7" "$work/bench.json"
python tools/torch_step.py --shape llama-2-7b --depths 4096,32768,131072 --vocab 8192 >"$work/torch.jsonl"
# Nothing is replaced before everything is measured: the three files are of one commit.
git rev-parse HEAD >benchmarks/results/h200-wide7.commit
# The name of the model, without the folders of this machine.
sed "s#$work/wide7#wide7#g" "$work/bench.json" >benchmarks/results/h200-wide7.json
cp "$work/torch.jsonl" benchmarks/results/h200-wide7-torch.jsonl
