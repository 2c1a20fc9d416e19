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

# Format everything
fmt:
    cargo fmt --all
    ruff format .

# Build and install into the active environment, for working on it
develop:
    maturin develop --release
