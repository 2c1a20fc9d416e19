#!/usr/bin/env bash
# The wheel must import on a machine without a driver or toolkit: no shared library of CUDA among its dependencies.
set -euo pipefail
library=$(python -c 'import quantspec_cli._native as native; print(native.__file__)')
if readelf -d "$library" | grep NEEDED | grep -Ei 'cuda|cudart|cublas|nvrtc|cudnn|curand'; then
    echo "error: $library links to a CUDA library" >&2
    exit 1
fi
readelf -d "$library" | grep NEEDED
