#!/bin/sh
# Runs the tests that need GPUs on a machine without Go. `make gpu` builds their programs into bin/gpu, with this file as
# bin/gpu/run. Copy the folder to the machine.
#
#   bin/gpu/run                     all parts
#   bin/gpu/run direct sanitizer    these parts
#
# The parts, each with 2 ranks and, with four GPUs, also with 4:
#
#   direct      the kernels, in processes and in threads
#   cuda        the backend
#   ddp         package ddp/gpu
#   sanitizer   the kernels under CUDA's compute-sanitizer; left out where it is not installed
#   operations  OPERATIONS=200 random operations of each kind of group, from SEED (0: of the clock)
#
# A part that takes longer than LIMIT=10m ends with the stacks of its goroutines. What the parts print is in
# OUT=bin/gpu/out. The first part waits up to a minute for CUDA to compile the kernels.
set -u
cd "$(dirname "$0")" || exit 1

OUT=${OUT:-$PWD/out}
LIMIT=${LIMIT:-10m}
OPERATIONS=${OPERATIONS:-200}
SEED=${SEED:-0}
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
export GOTRACEBACK=all

case ${1:-} in
-h | --help | help)
	sed -n '2,/^set/s/^# \{0,1\}//p' "${0##*/}"
	exit
	;;
esac
if [ "$GPUS" -lt 1 ]; then
	echo "no GPU: nvidia-smi -L lists none" >&2
	exit 1
fi
mkdir -p "$OUT"
failed=

part() { # part NAME COMMAND...
	name=$1
	shift
	began=$(date +%s)
	if "$@" -test.v -test.timeout "$LIMIT" >"$OUT/$name.txt" 2>&1; then
		said=ok
	else
		said=FAILED
		failed=yes
	fi
	count() { grep -c "^ *--- $1" "$OUT/$name.txt"; }
	echo "$said $name: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped, $(($(date +%s) - began)) s"
	[ $said = ok ] || grep '^ *--- FAIL\|^panic:\|^========= \(Invalid\|Program\|ERROR\)' "$OUT/$name.txt" | sort | uniq -c | head -20
}

each() { # each PART NUMBER-OF-RANKS
	export C10D_DIRECT_RANKS="$2"
	case $1 in
	direct) part "direct-$2" ./direct.test -test.run 'Processes|Threads|Large|Failures|Graph|Lanes|ManyRanks|TestReads' ;;
	sanitizer)
		tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
		if [ -z "$tool" ]; then
			echo "-- sanitizer: compute-sanitizer is not installed"
			return
		fi
		# cuFuncGetParamInfo fails behind the last parameter of a kernel, by which the library knows how many there are.
		C10D_DIRECT_ROUNDS=30 part "sanitizer-$2" "$tool" --report-api-errors no --error-exitcode 9 ./direct.test -test.run 'TestThreads|TestLanes|TestGraph|TestReads'
		;;
	operations) part "operations-$2" ./cuda.test -test.run "^TestGPUOperations\$/^$2_ranks" -operations "$OPERATIONS" -operation-seed "$SEED" ;;
	esac
}

for p in ${*:-direct cuda ddp sanitizer operations}; do
	case $p in
	cuda) part cuda ./cuda.test -test.run '^Test.*GPU' -operations 20 ;;
	ddp) part ddp ./ddp.test ;;
	direct | sanitizer | operations)
		for n in 2 4; do
			if [ "$n" -le "$GPUS" ]; then each "$p" $n; fi
		done
		if [ "$GPUS" -lt 2 ]; then echo "-- $p: one GPU, it needs two"; fi
		;;
	*)
		echo "no part is called $p; the parts are direct, cuda, ddp, sanitizer and operations" >&2
		exit 2
		;;
	esac
done
echo "what the parts printed is in $OUT"
[ -z "$failed" ]
