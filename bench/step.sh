#!/bin/sh
# Measures the communication of a training step on GPUs that computation does not hide, beside PyTorch
# DDP on NCCL.
#
#   bench/step.sh
#   CASES="1024x9 2048x9" STEPS=400 KERNELS= bench/step.sh
#
# In turn run BenchmarkStep of examples/ddp, bench/ddp_step.py with PyTorch's kernels, and the same with
# the demo's kernels, which are in the file KERNELS. KERNELS= leaves the last out. A case is a model: bench/ddp_step.py
# says how it is written. STEPS is the number of steps of each kind, WORLD the number of ranks, a GPU each.
#
# The table is Markdown. It has the median times of a step with the exchange and without, and their
# difference with the quartiles of the rounds, in microseconds; the ratio is that of the differences.
# Records are left in the directory OUT.
#
# Without Go: C10D is the program c10d, and DDP what "go test -c ./examples/ddp" makes. DEVICE=sim tries
# the first part without a GPU. Without PyTorch, PYTHON=none leaves the rest out.
set -eu
cd "$(dirname "$0")/.."

CASES=${CASES:-128,64/16 512x5 1024x9 2048x9}
STEPS=${STEPS:-200}
WORLD=${WORLD:-2}
DEVICE=${DEVICE:-cuda}
KERNELS=${KERNELS-examples/internal/gpumlp/kernels.ptx}
OUT=${OUT:-bin/step}
PYTHON=${PYTHON:-python3}
GO=${GO:-go}
C10D=${C10D:-}
DDP=${DDP:-}

say() { echo "# $*" >&2; }

mkdir -p "$OUT"
for system in c10d-go torch-nccl torch-nccl-kernels; do : >"$OUT/$system.jsonl"; done
if [ -z "$C10D" ]; then
	C10D=$OUT/c10d
	$GO build -o "$C10D" ./cmd/c10d
fi
if [ -z "$DDP" ]; then
	DDP=$OUT/ddp.test
	$GO test -c -o "$DDP" ./examples/ddp
fi
case $DDP in */*) ;; *) DDP=./$DDP ;; esac
case $C10D in */*) ;; *) C10D=./$C10D ;; esac

failed=
C10D_STEP_DEVICE=$DEVICE C10D_STEP_CASES=$CASES C10D_STEP_COUNT=$STEPS C10D_STEP_RECORDS=$OUT/c10d-go.jsonl \
	"$C10D" run -n "$WORLD" -- "$DDP" -test.run '^$' -test.bench '^BenchmarkStep$' -test.benchtime 1x >&2 || failed="$failed c10d-go"

torch() { # torch FILE FLAGS...
	file=$1
	shift
	"$PYTHON" bench/ddp_step.py --world "$WORLD" --cases "$CASES" --steps "$STEPS" "$@" >"$OUT/$file" || failed="$failed $file"
}

if [ "$PYTHON" = none ]; then
	say "records are in $OUT/c10d-go.jsonl"
else
	if [ "$DEVICE" = cuda ]; then
		torch torch-nccl.jsonl
		[ -z "$KERNELS" ] || torch torch-nccl-kernels.jsonl --kernels "$KERNELS"
	fi
	"$PYTHON" bench/ddp_step.py --table "$OUT/c10d-go.jsonl" "$OUT/torch-nccl.jsonl" "$OUT/torch-nccl-kernels.jsonl"
fi
if [ -n "$failed" ]; then
	say "failed:$failed"
	exit 1
fi
