# List the tasks
default:
    @just --list

# Before a push: everything CI runs, which is test-all, format, lints and types
ci:
    bash .ci/run

# While you work: quick tests of core, model, exactness on two CPU paths, and the installed package; no CUDA kernels
test *args:
    QUANTSPEC_KERNELS=off cargo test --quiet -p quantspec-core -p quantspec-model --features quantspec-model/reference
    for path in $({{just_executable()}} _paths | sed -n '1p;$p' | uniq); do \
        echo "$path" && QUANTSPEC_KERNELS=off QUANTSPEC_SIMD=$path cargo test --quiet -p quantspec-cpu --test exactness -- prompts_are_processed every_method the_selection || exit; \
    done
    python -m pytest -n 2 --dist worksteal -q -m "not slow and not gpu" {{args}} tests

# All tests that need no GPU, against the wheel (tools/test.sh)
test-all *args:
    bash tools/test.sh {{args}}

# Before a release: a wheel with kernels for all architectures, whose machine code is checked
kernels:
    QUANTSPEC_KERNELS=on maturin build --release --locked
    python tools/check_sass.py target/kernel-images

# Before a release (hours): exactness at full length on every SIMD path of this machine, 100 kills of a batch, more fuzzing
laws:
    for path in $({{just_executable()}} _paths); do \
        echo "$path" && QUANTSPEC_LAWS=long QUANTSPEC_SIMD=$path cargo test --release -p quantspec-cpu --test exactness || exit; \
    done
    QUANTSPEC_LAWS=long cargo test --release -p quantspec-model --test fuzz
    QUANTSPEC_LAWS=long python -m pytest -q --timeout 3600 tests/test_batch*.py tests/test_mapreduce.py tests/test_documents.py tests/test_lower_bound.py tests/test_output.py tests/test_text.py tests/test_tokenizer.py

# The SIMD paths of this machine, the best first
_paths:
    @if [ "$(uname -m)" = aarch64 ]; then echo neon; fi
    @if grep -qw amx_bf16 /proc/cpuinfo; then echo amx; fi
    @if grep -qw avx512_bf16 /proc/cpuinfo; then echo avx512; fi
    @if grep -qw avx2 /proc/cpuinfo; then echo avx2; fi
    @echo scalar

# After a change of kernels: tests on an NVIDIA GPU, with the demo model and those in the folder `models`, which may be empty
test-gpu models:
    QUANTSPEC_REQUIRE_GPU=1 QUANTSPEC_TEST_MODELS="$(realpath {{models}})" cargo test --release -p quantspec-cuda
    QUANTSPEC_REQUIRE_GPU=1 QUANTSPEC_TEST_MODELS="$(realpath {{models}})" QUANTSPEC_TEST_PTX=1 cargo test --release -p quantspec-cuda
    QUANTSPEC_REQUIRE_GPU=1 python -m pytest -q -m gpu tests

# racecheck omits GEMMs of many tiles, which take too long under it, and proxy fences, which kernels/hopper.cuh does not need.

# After a change of kernels: each one under compute-sanitizer 2026.4, on an NVIDIA GPU
sanitize *filter:
    for tool in memcheck racecheck initcheck synccheck; do \
        echo "$tool" && QUANTSPEC_REQUIRE_GPU=1 \
        env "CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_)_RUNNER=compute-sanitizer --report-api-errors no --error-exitcode 9 --tool $tool $([ $tool != racecheck ] || echo --racecheck-fence-proxy-async no)" \
        cargo test --release -p quantspec-cuda --test attend --test draft --test elementwise --test hierarchy --test linear --test penalty --test prefill --test quantize --test sample \
            {{filter}} -- --test-threads 1 --skip other_work_changes_no_bit --skip long_contexts $([ $tool != racecheck ] || echo --skip of_many_tiles) || exit; \
    done

# Needs qemu-user, gcc-aarch64-linux-gnu and rustup's target aarch64-unknown-linux-gnu.

# After a change of NEON code: tests of core, model and cpu on aarch64, emulated
test-arm *args:
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
    cargo test --release --target aarch64-unknown-linux-gnu -p quantspec-core -p quantspec-cpu -p quantspec-model {{args}}

# Time every CPU kernel, as a share of the memory bandwidth; `--max-time 0.05` for a quick look
bench-kernels *options:
    cargo bench --quiet -p quantspec-cpu -- {{options}}

# bench-kernels, then `quantspec bench` of the checkpoint `source`, widened 4 times with 18 layers
bench-cpu source depths="0,4096" repetitions="3" seconds="1": (bench-kernels "--max-time" seconds)
    test -f target/wide-1b/model.safetensors || python tools/widen.py {{source}} target/wide-1b --times 4 --layers 18
    quantspec bench -m target/wide-1b -p 512 -d {{depths}} -r {{repetitions}}

# bench-cpu at depth 0, once, in a few minutes
bench-cpu-quick source: (bench-cpu source "0" "1" "0.05")

# Format Rust, Python and the CUDA kernels
fmt:
    cargo fmt --all
    ruff format .
    clang-format -i kernels/*

# Build the package and install it into the active environment
develop:
    maturin develop --release
