#!/bin/sh
# Records when the kernels of a training step run on GPUs, for examples/ddp.
#
#   bench/timeline.sh
#   CASE=2048x9 bench/timeline.sh
#
# The records are OUT/CASE.jsonl, without slashes in CASE: a step of each rank, of median length. "make figures" draws those of
# docs/benchmarks. CASE and the
# variables C10D, DDP, WORLD and GO are as in bench/step.sh. It needs a C compiler and CUPTI, which is part of the
# CUDA toolkit in the directory CUDA.
set -eu
cd "$(dirname "$0")/.."

CASE=${CASE:-1024x9}
WORLD=${WORLD:-2}
OUT=${OUT:-bin/timeline}
PYTHON=${PYTHON:-python3}
CUDA=${CUDA:-/usr/local/cuda}

mkdir -p "$OUT"
rm -f "$OUT"/*.txt
header=$(find -L "$CUDA" -name cupti.h | head -1)
library=$(find -L "$CUDA" -name libcupti.so | head -1)
if [ -z "$header" ] || [ -z "$library" ]; then
	echo "no CUPTI in $CUDA: CUDA is the directory of the CUDA toolkit" >&2
	exit 1
fi
# The newest version of the record has the longest name.
record=$(grep -ho 'CUpti_ActivityKernel[0-9]*' "$(dirname "$header")/cupti_activity.h" | sort -V | tail -1)
gcc -shared -fPIC -O2 -DKERNEL="$record" -I"$(dirname "$header")" -I"$CUDA/include" -o "$OUT/timeline.so" bench/timeline.c \
	-L"$(dirname "$library")" -Wl,-rpath,"$(dirname "$library")" -lcupti -lpthread
records=$OUT/$(echo "$CASE" | tr / -).jsonl
KERNELS_DIR=$OUT CUDA_INJECTION64_PATH=$(realpath "$OUT/timeline.so") CASES=$CASE STEPS=40 PYTHON=none OUT=$OUT/step bench/step.sh >&2
"$PYTHON" bench/timeline.py "$OUT"/*.txt >"$records"
echo "$records"
