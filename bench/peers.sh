#!/bin/sh
# Measures this library and its peers in turn on this host, and prints tables
# with their ratios: PyTorch's gloo, and Open MPI in shared memory and over TCP; on
# GPUs PyTorch's gloo, NCCL by calls and in a CUDA graph, and the one-shot and two-shot
# all_reduces of PyTorch's symmetric memory (FORMS=calls leaves all but the first of
# NCCL's out). A peer that is not installed is left out.
#
#   WORLD=2 OP=all_reduce,broadcast SIZES=4,1K,64K bench/peers.sh
#   BARS=bench/bars-2cpus.txt WITHIN=300 bench/peers.sh
#   WORLD=4 DEVICE=cuda bench/peers.sh
#
# A case is a number of ranks (WORLD, several with commas), an operation and a
# size; with BARS they are those of that file, and in the end it is told which of
# its bars hold. Of each case every system is measured, one after the other, before
# the next case. OP=all is every operation. PASSES=3 goes round that many times and
# keeps each system's best of a case, for a machine that others use too. WITHIN=300
# begins no case after so many seconds. Records are left in the directory OUT, which
# is bin/bench if not set.
#
# Without Go: C10D is the program c10d, built elsewhere, and MPI is what mpicc makes of bench/mpi.c.
set -eu
cd "$(dirname "$0")/.."

BARS=${BARS:-}
WORLD=${WORLD:-2}
OP=${OP:-all_reduce}
SIZES=${SIZES:-4,1K,64K,1M,16M}
DTYPE=${DTYPE:-float32}
DEVICE=${DEVICE:-cpu}
WORK=${WORK:-}
WIRE=${WIRE:-auto}
ALLOC=${ALLOC:-}
if [ "$BARS" ]; then # many cases
	BUDGET=${BUDGET:-0.1} REPEAT=${REPEAT:-2} PASSES=${PASSES:-3}
fi
BUDGET=${BUDGET:-0.5}
REPEAT=${REPEAT:-3}
PASSES=${PASSES:-1}
WITHIN=${WITHIN:-}
OUT=${OUT:-bin/bench}
GO=${GO:-go}
C10D=${C10D:-}
MPI=${MPI:-}
PYTHON=${PYTHON:-/usr/bin/python3}
FORMS=${FORMS:-calls,graph,one-shot,two-shot}

all=all_reduce,all_reduce_coalesced,sparse_all_reduce,reduce,broadcast,all_gather,all_gather_into_tensor,reduce_scatter
all=$all,reduce_scatter_tensor,all_to_all,all_to_all_single,gather,scatter,send_recv,recv_any,barrier
if [ "$OP" = all ]; then OP=$all; fi

say() { echo "# $*" >&2; }
words() { echo "$1" | tr , ' '; }

mkdir -p "$OUT"
rm -f "$OUT"/*.jsonl
if [ -z "$C10D" ]; then
	C10D=$OUT/c10d
	$GO build -o "$C10D" ./cmd/c10d
fi

mpi=
if [ "$DEVICE" = cpu ]; then
	if [ -z "$MPI" ] && command -v mpicc >/dev/null; then
		MPI=$OUT/mpi
		mpicc -O2 -o "$MPI" bench/mpi.c || MPI=
	fi
	if [ "$MPI" ] && command -v mpirun >/dev/null; then mpi=yes; fi
	if [ -z "$mpi" ]; then say "no Open MPI (Debian: openmpi-bin libopenmpi-dev)"; fi
fi
# Open MPI refuses to run as root unless told twice.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# PyTorch takes seconds to start, so it is started once and asked for one case after
# the other, through pipes.
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
trap 'exit 1' INT TERM
trap '' PIPE # it may have ended
torch=
if ! "$PYTHON" -c 'import torch.distributed' 2>/dev/null; then
	say "no PyTorch at $PYTHON (Debian: python3-torch)"
else
	torch=torch-gloo
	if [ "$DEVICE" != cpu ]; then torch='torch-gloo torch-nccl'; fi
fi
for system in $torch; do
	mkfifo "$pipes/$system.ask" "$pipes/$system.answer"
	device=cpu forms=calls
	if [ "$DEVICE" != cpu ]; then device=cuda; fi
	if [ $system = torch-nccl ]; then forms=$FORMS; fi
	"$PYTHON" bench/torch_gloo.py --cases - --backend "${system#torch-}" --device $device --forms "$forms" --dtype "$DTYPE" --budget "$BUDGET" \
		--repeat "$REPEAT" <"$pipes/$system.ask" >"$pipes/$system.answer" &
	case $system in # the shell's numbers of pipes are constants
	torch-gloo) exec 3>"$pipes/$system.ask" 4<"$pipes/$system.answer" ;;
	torch-nccl) exec 6>"$pipes/$system.ask" 7<"$pipes/$system.answer" ;;
	esac
done

# answer SYSTEM: its records up to an empty line.
answer() {
	while IFS= read -r line; do
		if [ -z "$line" ]; then return; fi
		echo "$line" >>"$OUT/$1.jsonl"
	done
	ended "$1"
}

ended() { # ended SYSTEM
	say "$1 has ended"
	torch=$(echo " $torch " | sed "s/ $1 / /")
}

# They say when they are there: two CPUs would be busy with their start.
for system in $torch; do
	case $system in
	torch-gloo) answer $system <&4 ;;
	torch-nccl) answer $system <&7 ;;
	esac
done

run_torch() { # run_torch WORLD OP SIZE
	for system in $torch; do
		case $system in
		torch-gloo) if { echo "$*" >&3; } 2>/dev/null; then answer $system <&4; else ended $system; fi ;;
		torch-nccl) if { echo "$*" >&6; } 2>/dev/null; then answer $system <&7; else ended $system; fi ;;
		esac
	done
}

run_mpi() { # run_mpi SYSTEM WORLD OP SIZE MPIRUN-FLAGS...
	system=$1 world=$2 op=$3 size=$4
	shift 4
	mpirun -n "$world" --oversubscribe "$@" "$MPI" -system "$system" -op "$op" -sizes "$size" -dtype "$DTYPE" \
		-budget "$BUDGET" -repeat "$REPEAT" </dev/null >>"$OUT/$system.jsonl" || say "$system failed"
}

failed=
run_ours() { # run_ours WORLD OP SIZE
	for work in ${works:-any}; do
		flags=
		if [ "$work" != any ]; then flags="-work $work"; fi
		if [ "$ALLOC" ]; then flags="$flags -alloc"; fi
		# shellcheck disable=SC2086 # flags are words
		"$C10D" bench -json -world "$1" -op "$2" -sizes "$3" -dtype "$DTYPE" -device "$DEVICE" -wire "$WIRE" -budget "${BUDGET}s" \
			-repeat "$REPEAT" $flags </dev/null >>"$OUT/c10d-go.jsonl" || failed=yes
	done
}
works=$(words "$WORK")

if [ "$BARS" ]; then
	BARS=$BARS bench/report.sh -cases >"$pipes/cases"
else
	for world in $(words "$WORLD"); do
		for op in $(words "$OP"); do
			sizes=$SIZES
			if [ "$op" = barrier ]; then sizes=0; fi
			if [ "$op" = sparse_all_reduce ] && [ "$DEVICE" != cpu ]; then continue; fi
			for size in $(words "$sizes"); do echo "$world $op $size"; done
		done
	done >"$pipes/cases"
fi
cases=$(wc -l <"$pipes/cases")

say "$cases cases, $PASSES passes, $(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) processors, load $(cut -d ' ' -f 1-3 /proc/loadavg 2>/dev/null || echo unknown)"
began=$(date +%s)
pass=0 late=
while [ $pass -lt "$PASSES" ] && [ -z "$late" ]; do
	pass=$((pass + 1)) case=0
	while read -r world op size <&5; do
		case=$((case + 1)) spent=$(($(date +%s) - began))
		if [ "$WITHIN" ] && [ $spent -ge "$WITHIN" ]; then
			say "$WITHIN s are over: $((case - 1)) cases of pass $pass were measured"
			late=yes
			break
		fi
		say "pass $pass of $PASSES, case $case of $cases, after $spent s: $op of $size bytes, $world ranks"
		run_ours "$world" "$op" "$size"
		run_torch "$world" "$op" "$size"
		if [ "$mpi" ]; then
			run_mpi openmpi "$world" "$op" "$size" --mca btl self,vader
			if [ -z "$BARS" ] || [ "$WIRE" != auto ]; then
				run_mpi openmpi-tcp "$world" "$op" "$size" --mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include lo
			fi
		fi
	done 5<"$pipes/cases"
done
exec 3>&- 6>&-
wait
say "load $(cut -d ' ' -f 1-3 /proc/loadavg 2>/dev/null || echo unknown)"

for file in torch-gloo torch-nccl openmpi openmpi-tcp; do
	if [ -s "$OUT/$file.jsonl" ]; then set -- "$@" "$OUT/$file.jsonl"; fi
done
BARS=$BARS DTYPE=$DTYPE DEVICE=$DEVICE bench/report.sh "$OUT/c10d-go.jsonl" "$@"
say "records are in $OUT"
if [ "$failed" ]; then
	say "this library failed in some cases"
	exit 1
fi
