#!/bin/sh
# Measures shared memory beside the machine's floor, and small messages beside Open MPI.
#
#   bench/floor.sh
#   RANKS=2 SIZES=64K,1M PASSES=3 bench/floor.sh
#
# Large cases are all_reduces of float32 (RANKS x SIZES). In turn run the floor program
# (bench/floor.c), `c10d bench -alloc`, `c10d bench`, and Open MPI if it is installed. Small cases
# (RANKS x OPS x SMALL) run `c10d bench` with COUNT iterations and Open MPI, for these do without
# copies of tensors. WARMUP calls come before: in the first 32000 the heap grows, and each 64 calls get
# memory that the kernel has to map. The floor program runs an all_reduce of 1 KiB too. PASSES=2 does that twice and
# keeps each system's best p50 of a case. WITHIN=200 begins no case after 200 seconds.
#
# The table has p50 and p99 in microseconds, and ratios. Under it are the bars: a bar says which
# ratio the time of this library may have at most. Records, as of `c10d bench -json`, are left in
# the directory OUT.
#
# Without Go or a compiler: C10D is the program c10d, FLOOR what gcc makes of bench/floor.c, and
# MPI what mpicc makes of bench/mpi.c. MPI=none leaves Open MPI out.
set -eu
cd "$(dirname "$0")/.."

RANKS=${RANKS:-2,4,8}
SIZES=${SIZES:-64K,1M,16M}
SMALL=${SMALL:-4,1K}
OPS=${OPS:-all_reduce,all_gather,reduce,broadcast,gather,scatter,send_recv,barrier}
COUNT=${COUNT:-4000}
WARMUP=${WARMUP:-40000}
BUDGET=${BUDGET:-0.2}
REPEAT=${REPEAT:-3}
PASSES=${PASSES:-2}
WITHIN=${WITHIN:-}
OUT=${OUT:-bin/floor}
GO=${GO:-go}
C10D=${C10D:-}
FLOOR=${FLOOR:-}
MPI=${MPI:-}

say() { echo "# $*" >&2; }
words() { echo "$1" | tr , ' '; }

mkdir -p "$OUT"
rm -f "$OUT"/*.jsonl
if [ -z "$C10D" ]; then
	C10D=$OUT/c10d
	$GO build -o "$C10D" ./cmd/c10d
fi
if [ -z "$FLOOR" ]; then
	FLOOR=$OUT/floor
	gcc -O3 -static -o "$FLOOR" bench/floor.c
fi
if [ -z "$MPI" ] && command -v mpicc >/dev/null; then
	MPI=$OUT/mpi
	mpicc -O2 -o "$MPI" bench/mpi.c || MPI=none
fi
if ! command -v mpirun >/dev/null; then MPI=none; fi
if [ "${MPI:=none}" = none ]; then say "no Open MPI (Debian: openmpi-bin libopenmpi-dev)"; fi
# Open MPI refuses to run as root unless told twice.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

failed=
run_ours() { # run_ours FILE FLAGS...
	file=$1
	shift
	"$C10D" bench -json -dtype float32 -repeat "$REPEAT" "$@" </dev/null >>"$OUT/$file.jsonl" || failed=yes
}

run_mpi() { # run_mpi WORLD OP SIZES
	if [ "$MPI" = none ]; then return; fi
	mpirun -n "$1" --oversubscribe --mca btl self,vader "$MPI" -system openmpi -op "$2" -sizes "$3" -dtype float32 \
		-budget "$BUDGET" -repeat "$REPEAT" </dev/null >>"$OUT/openmpi.jsonl" || { say "Open MPI failed" && MPI=none; }
}

cases() {
	for world in $(words "$RANKS"); do
		for size in $(words "$SIZES"); do echo "$world all_reduce $size large"; done
		for op in $(words "$OPS"); do
			case $op in
			barrier) echo "$world $op 0 small" ;;
			*) echo "$world $op $SMALL small" ;;
			esac
		done
	done
}

say "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) processors, load $(cut -d ' ' -f 1-3 /proc/loadavg 2>/dev/null || echo unknown)"
began=$(date +%s)
list=$(mktemp)
trap 'rm -f "$list"' EXIT
trap 'exit 1' INT TERM
cases >"$list"
pass=0 late=
while [ $pass -lt "$PASSES" ] && [ -z "$late" ]; do
	pass=$((pass + 1))
	while read -r world op sizes kind <&5; do
		spent=$(($(date +%s) - began))
		if [ "$WITHIN" ] && [ $spent -ge "$WITHIN" ]; then
			say "stopped after $spent seconds: pass $pass, $world ranks, $op"
			late=yes
			break
		fi
		case $kind in
		large)
			"$FLOOR" -ranks "$world" -sizes "$sizes" >>"$OUT/floor.jsonl" || failed=yes
			run_ours alloc -alloc -world "$world" -op "$op" -sizes "$sizes" -budget "${BUDGET}s"
			run_ours staged -world "$world" -op "$op" -sizes "$sizes" -budget "${BUDGET}s"
			;;
		small)
			[ "$op" != all_reduce ] || "$FLOOR" -ranks "$world" -sizes 1K >>"$OUT/floor.jsonl" || failed=yes
			run_ours small -world "$world" -op "$op" -sizes "$sizes" -n "$COUNT" -w "$WARMUP"
			;;
		esac
		run_mpi "$world" "$op" "$sizes"
	done 5<"$list"
done
say "$pass passes, load $(cut -d ' ' -f 1-3 /proc/loadavg 2>/dev/null || echo unknown)"

cat "$OUT"/*.jsonl | awk '
function field(name,    rest) {
	if (!match($0, "\"" name "\": *")) return ""
	rest = substr($0, RSTART + RLENGTH)
	sub(/^"/, "", rest)
	sub(/[",}].*/, "", rest)
	return rest
}
function shown(n) { return n ? n % 1048576 ? n % 1024 ? n : n / 1024 "K" : n / 1048576 "M" : "-" }
function time(who, key) { return (who, key) in p50 ? sprintf("%.2f", p50[who, key]) : "-" }
function tail(who, key) { return (who, key) in p99 ? sprintf("%.2f", p99[who, key]) : "-" }
function over(a, b, key) { return (a, key) in p50 && (b, key) in p50 ? sprintf("%.2f", p50[a, key] / p50[b, key]) : "-" }
function bar(name, key, most, seen) {
	if (seen == "-") return
	bars++
	if (seen + 0 <= most) hold++
	split(key, k, SUBSEP)
	lines = lines sprintf("%-28s %-11s %5s %5s %7.2f %7.2f  %s\n", name, k[2], k[1], shown(k[3]), most, seen, seen + 0 <= most ? "holds" : "missed")
}
{
	who = field("system")
	if (who == "c10d-go" && field("alloc") == "true") who = "alloc"
	key = field("world") SUBSEP field("op") SUBSEP field("size")
	spent = field("time_us_p50") + 0
	if (spent == 0) next
	if (!(key in seen)) { seen[key]; order[++cases] = key }
	if (!((who, key) in p50) || spent < p50[who, key]) {
		p50[who, key] = spent
		p99[who, key] = field("time_us_p99") + 0
	}
}
END {
	print "# p50 and p99 in us; a ratio is the time of this library over the other time"
	head = "%-11s %5s %5s %9s %9s %9s %9s %9s %9s %9s %9s %9s %7s %7s %7s %7s\n"
	printf head, "operation", "ranks", "size", "c10d", "p99", "alloc", "p99", "floor-sh", "floor-co", "p99", "openmpi", "p99", "al/sh", "c10d/co", "c10d/mp", "p99/p50"
	for (i = 1; i <= cases; i++) {
		key = order[i]
		split(key, k, SUBSEP)
		c = "c10d-go"
		spread = (c, key) in p50 ? sprintf("%.2f", p99[c, key] / p50[c, key]) : "-"
		printf head, k[2], k[1], shown(k[3]), time(c, key), tail(c, key), time("alloc", key), tail("alloc", key), time("floor-shared", key), time("floor-copied", key), tail("floor-copied", key), time("openmpi", key), tail("openmpi", key), over("alloc", "floor-shared", key), over(c, "floor-copied", key), over(c, "openmpi", key), spread
		bar("Alloc / floor-shared", key, 1.15, over("alloc", "floor-shared", key))
		if (k[3] + 0 > 1024) bar("staged / floor-copied", key, 1.05, over(c, "floor-copied", key))
		else {
			most = k[2] ~ /^(all_reduce|all_gather|barrier)$/ ? 1.2 : 2
			if (k[1] == 2 || k[1] == 8) bar("c10d / openmpi", key, most, over(c, "openmpi", key))
			if (k[1] == 8 && k[3] == 1024) bar("p99 / p50", key, 4, spread)
		}
	}
	printf "\n# bars\n%-28s %-11s %5s %5s %7s %7s\n%s", "ratio", "operation", "ranks", "size", "most", "seen", lines
	printf "# %d of %d bars hold\n", hold, bars
}'
say "records are in $OUT"
if [ "$failed" ]; then
	say "this library or the floor program failed in some cases"
	exit 1
fi
