#!/bin/sh
# Compares two builds of the program c10d on this host: is the new one slower?
#
#   bench/versus.sh OLD NEW
#   WIRES=native,tcp WORLD=2,8 SIZES=4,64K,1M PASSES=9 bench/versus.sh bin/old bin/c10d
#
# A case is a wire, a number of ranks, an operation and a size. Every pass measures
# each case with both programs, one right after the other, the old one first in odd
# passes. A row has the medians of the passes' p50 in microseconds, their quotient, and each
# program's spread: the range of the middle half of its passes, in percent of the
# median. A difference within the spread says nothing.
set -eu

old=$1 new=$2
WIRES=${WIRES:-native,tcp,gloo}
WORLD=${WORLD:-2,4}
OP=${OP:-all_reduce}
SIZES=${SIZES:-4,1K,64K,1M,16M,64M}
BUDGET=${BUDGET:-100ms}
PASSES=${PASSES:-7}

words() { echo "$1" | tr , ' '; }

records=$(mktemp)
trap 'rm -f "$records"' EXIT
trap 'exit 1' INT TERM HUP

measure() { # name, program
	time=$("$2" bench -json -check=false -repeat 1 -budget "$BUDGET" -wire "$wire" -world "$world" -op "$op" -sizes "$size" |
		sed -n 's/.*"time_us_p50":\([0-9.e+-]*\).*/\1/p')
	if [ -z "$time" ]; then
		echo "versus: $2 measured nothing (wire $wire, $world ranks, $op, $size bytes)" >&2
		exit 1
	fi
	echo "$wire $world $op $size $1 $time" >>"$records"
}

pass=1
while [ "$pass" -le "$PASSES" ]; do
	for wire in $(words "$WIRES"); do for world in $(words "$WORLD"); do
		for op in $(words "$OP"); do for size in $(words "$SIZES"); do
			if [ $((pass % 2)) = 1 ]; then
				measure old "$old"; measure new "$new"
			else
				measure new "$new"; measure old "$old"
			fi
		done; done
	done; done
	[ -t 2 ] && echo "# pass $pass of $PASSES" >&2
	pass=$((pass + 1))
done

awk '
function sorted(list, to,    n, i, j, t) {
	n = split(list, to, " ")
	for (i = 2; i <= n; i++) {
		t = to[i] + 0
		for (j = i - 1; j >= 1 && to[j] + 0 > t; j--) to[j + 1] = to[j]
		to[j + 1] = t
	}
	return n
}
function at(v, n, q,    x, lo) { x = 1 + q * (n - 1); lo = int(x); return lo < n ? v[lo] + (x - lo) * (v[lo + 1] - v[lo]) : v[n] }
{
	k = $1 " " $2 " " $3 " " $4
	if (!(k in seen)) { seen[k] = 1; order[++cases] = k }
	times[k, $5] = times[k, $5] " " $6
}
END {
	printf "%-8s %5s %-20s %6s %12s %12s %8s %12s\n", "wire", "ranks", "operation", "bytes", "old us", "new us", "new/old", "spread"
	for (c = 1; c <= cases; c++) {
		split(order[c], f, " ")
		n = sorted(times[order[c], "old"], a); m = sorted(times[order[c], "new"], b)
		o = at(a, n, .5); w = at(b, m, .5)
		printf "%-8s %5d %-20s %6s %12.2f %12.2f %8.3f %5.1f%% %4.1f%%\n", f[1], f[2], f[3], f[4], o, w, w / o,
			100 * (at(a, n, .75) - at(a, n, .25)) / o, 100 * (at(b, m, .75) - at(b, m, .25)) / w
	}
}' "$records"
