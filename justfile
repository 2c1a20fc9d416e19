# Lists the tasks.
default:
    @just --list

# Everything CI runs
ci:
    bash .ci/run

# Tests after a change to Python or one crate, without kernels: the installed package, core, model, and exactness on two CPU paths
test *args:
    QUANTSPEC_KERNELS=off cargo test --quiet -p quantspec-core -p quantspec-model
    for path in $({{just_executable()}} _paths | sed -n '1p;$p' | uniq); do \
        echo "$path" && QUANTSPEC_KERNELS=off QUANTSPEC_SIMD=$path cargo test --quiet -p quantspec-cpu --test exactness -- prompts_are_processed every_method the_selection || exit; \
    done
    python -m pytest -n 2 --dist worksteal -q -m "not slow and not gpu" {{args}} tests

# All tests that need no GPU, against the wheel, as in README and CI
test-all *args:
    bash tools/test.sh {{args}}

# Before a release, for hours: exactness at full length on every SIMD path of this machine, 100 kills of a batch, fuzzing with more inputs
laws:
    for path in $({{just_executable()}} _paths); do \
        echo "$path" && QUANTSPEC_LAWS=long QUANTSPEC_SIMD=$path cargo test --release -p quantspec-cpu --test exactness || exit; \
    done
    QUANTSPEC_LAWS=long cargo test --release -p quantspec-model --test fuzz
    QUANTSPEC_LAWS=long python -m pytest -q --timeout 3600 tests/test_batch.py tests/test_documents.py tests/test_lower_bound.py tests/test_output.py tests/test_text.py tests/test_tokenizer.py

# The SIMD paths of this machine, the best first
_paths:
    @if [ "$(uname -m)" = aarch64 ]; then echo neon; fi
    @if grep -qw amx_bf16 /proc/cpuinfo; then echo amx; fi
    @if grep -qw avx512_bf16 /proc/cpuinfo; then echo avx512; fi
    @if grep -qw avx2 /proc/cpuinfo; then echo avx2; fi
    @echo scalar

# Tests on a machine with an NVIDIA GPU, with the demo model and those in the folder `models`, which may be empty; they fail without a GPU
test-gpu models:
    QUANTSPEC_REQUIRE_GPU=1 QUANTSPEC_TEST_MODELS="$(realpath {{models}})" cargo test --release -p quantspec-cuda
    QUANTSPEC_REQUIRE_GPU=1 QUANTSPEC_TEST_MODELS="$(realpath {{models}})" QUANTSPEC_TEST_PTX=1 cargo test --release -p quantspec-cuda
    QUANTSPEC_REQUIRE_GPU=1 python -m pytest -q -m gpu tests

# Every kernel under compute-sanitizer 2026.4, on a machine with an NVIDIA GPU. racecheck omits GEMMs of many tiles, which take too long under it, and proxy fences, which kernels/hopper.cuh does not need
sanitize *filter:
    for tool in memcheck racecheck initcheck synccheck; do \
        echo "$tool" && QUANTSPEC_REQUIRE_GPU=1 \
        env "CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_)_RUNNER=compute-sanitizer --report-api-errors no --error-exitcode 9 --tool $tool $([ $tool != racecheck ] || echo --racecheck-fence-proxy-async no)" \
        cargo test --release -p quantspec-cuda --test attend --test draft --test elementwise --test linear --test prefill --test quantize --test sample \
            {{filter}} -- --test-threads 1 --skip other_work_changes_no_bit --skip long_contexts $([ $tool != racecheck ] || echo --skip of_many_tiles) || exit; \
    done

# The crates that run on aarch64 (NEON), emulated: needs rustup's target aarch64-unknown-linux-gnu, gcc-aarch64-linux-gnu and qemu-user
test-arm *args:
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
    cargo test --release --target aarch64-unknown-linux-gnu -p quantspec-core -p quantspec-cpu -p quantspec-model {{args}}

# Every CPU kernel compared with a plain read of memory, and choosing pages and tokens; `--max-time 0.05` for a quick look
bench-kernels *options:
    cargo bench --quiet -p quantspec-cpu -- {{options}}

# Kernels, then bench of a small trained checkpoint, widened to the 1-billion-parameter shape
bench-cpu source depths="0,4096" repetitions="3" seconds="1": (bench-kernels "--max-time" seconds)
    test -f target/wide-1b/model.safetensors || python tools/widen.py {{source}} target/wide-1b --times 4 --layers 18
    quantspec bench -m target/wide-1b -p 512 -d {{depths}} -r {{repetitions}}

# The same at depth 0, once, in a few minutes
bench-cpu-quick source: (bench-cpu source "0" "1" "0.05")

# Format everything
fmt:
    cargo fmt --all
    ruff format .

# Build and install into the active environment, for working on it
develop:
    maturin develop --release
