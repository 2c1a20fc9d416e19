# The menu: `just` lists it.
default:
    @just --list

# Everything CI runs
ci:
    bash .ci/run

# All tests that need no GPU
test *args:
    bash tools/test.sh {{args}}

# Tests on a machine with an NVIDIA GPU; a skip is a failure
test-gpu:
    QUANTSPEC_REQUIRE_GPU=1 cargo test --release -p quantspec-cuda
    QUANTSPEC_REQUIRE_GPU=1 python -m pytest -q -m gpu tests

# The table of docs/benchmarks.md from a small trained checkpoint, widened to the 1-billion-parameter shape
bench-cpu source depths="0,4096" repetitions="2":
    test -f target/wide-1b/model.safetensors || python tools/widen.py {{source}} target/wide-1b --times 4 --layers 18
    quantspec bench -m target/wide-1b -p 256 -n 128 -d {{depths}} -r {{repetitions}}

# Format everything
fmt:
    cargo fmt --all
    ruff format .

# Build and install into the active environment, for working on it
develop:
    maturin develop --release
