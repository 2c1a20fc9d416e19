#!/usr/bin/env bash
# Everything the project tests on a machine without a GPU: cargo tests, then the installed wheel from outside the tree.
# Needs Rust and Python; keeps its virtual environment in target/venv.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=${QUANTSPEC_VENV:-$root/target/venv}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" PYO3_PYTHON="$venv/bin/python"

echo "== development dependencies"
pip install --quiet --disable-pip-version-check --upgrade pip
pip install --quiet --disable-pip-version-check --group dev

# Output of passing tests is hidden; their messages about missing paths, models and GPUs are repeated at the end.
log=$(mktemp)
outside=$(mktemp -d)
finish() {
    echo "== what ran, and what was skipped (QUANTSPEC_REQUIRE_SIMD, QUANTSPEC_REQUIRE_GPU and QUANTSPEC_TEST_MODELS: CONTRIBUTING.md)"
    grep -E '^(TESTED|SKIPPED)' "$log" | sort -u | tee "$root/target/skipped.txt" || true
    rm -rf "$outside" "$log"
}
trap finish EXIT

echo "== cargo tests"
cargo_tests() {
    # The Python binding has no tests of its own, and takes long to build.
    cargo test --workspace --exclude quantspec-py "$@" --quiet -- --show-output 2>&1 | tee -a "$log" |
        sed -u -E '/^successes:$/,/^(failures:|test result:)/{/^(failures:|test result:)/!d;}'
}
if [ -e /dev/nvidiactl ] || [ -n "${QUANTSPEC_REQUIRE_GPU:-}" ]; then
    cargo_tests
else
    # Tests of the GPU take a minute to build, and clippy checks that they compile. There are no doctests.
    echo "SKIPPED: tests of crates/quantspec-cuda need an NVIDIA GPU" >>"$log"
    cargo_tests --lib
    cargo_tests --exclude quantspec-cuda --test '*'
    # Two of its tests need none: they measure what a defect changes.
    cargo_tests --test parity defects_exceed_the_bounds
    cargo_tests --test parity matrices_in_eight_bits_show
fi

echo "== wheel"
rm -rf target/wheels
maturin build --release --locked --out target/wheels
pip install --quiet --disable-pip-version-check --force-reinstall --no-deps target/wheels/quantspec-*.whl
pip install --quiet --disable-pip-version-check target/wheels/quantspec-*.whl

echo "== pytest against the installed wheel"
cd "$outside"
# Two workers: many tests wait for a command that they started. Engines use every core.
HF_HUB_OFFLINE=1 python -m pytest -n 2 --dist worksteal --rootdir "$root" -c "$root/pyproject.toml" -q -rs "$@" "$root/tests" | tee -a "$log"
