#!/bin/sh
# Prints what "c10d bench -json" and the programs of peers have measured: tables with the peers' times beside them, and
# with BARS which bars of a file hold.
#
#   bench/report.sh OURS.jsonl [PEER.jsonl ...]
#   BARS=bench/bars-2cpus.txt DTYPE=float32 DEVICE=cpu bench/report.sh OURS.jsonl PEER.jsonl
#   BARS=bench/bars-2cpus.txt bench/report.sh -cases
#
# The fastest record of a case counts. -cases prints the cases of the bars, each once: ranks, operation, bytes. A line of
# bars has operations, ranks, sizes (or -), a peer (or -), and by which factor this library has to be faster than the
# peer (2x), or a time that it may take (2us).
set -eu

cases=
if [ "$1" = -cases ]; then cases=yes; set -- /dev/null; fi
ours=$1
awk -v ours="$ours" -v cases="$cases" -v bars="${BARS:-}" -v dtype="${DTYPE:-float32}" -v device="${DEVICE:-cpu}" '
function text(name,    s) {
	if (!match($0, "\"" name "\": *\"[^\"]*\"")) return ""
	s = substr($0, RSTART, RLENGTH)
	sub(/^"[^"]*": *"/, "", s)
	return substr(s, 1, length(s) - 1)
}
function number(name,    s) {
	if (!match($0, "\"" name "\": *[-+.0-9e]+")) return 0
	s = substr($0, RSTART, RLENGTH)
	sub(/^"[^"]*": */, "", s)
	return s + 0
}
function bytes(s,    n) {
	n = s + 0
	if (s ~ /K$/) n *= 1024
	if (s ~ /M$/) n *= 1024 ^ 2
	if (s ~ /G$/) n *= 1024 ^ 3
	return n
}
function least(list, key, value) { if (!(key in list) || value < list[key]) list[key] = value }
function readBars(    line, f, words, ops, worlds, sizes, i, j, k) {
	while ((words = getline line < bars) > 0) {
		sub(/#.*/, "", line)
		words = split(line, f, " ")
		if (words == 0) continue
		if (words != 5 || f[5] !~ /^[0-9.]+(x|us)$/ || (f[4] == "-") != (f[5] ~ /us$/)) {
			printf "%s: a line has operations, ranks, sizes, a peer and a factor (2x), or - and a time (2us): %s\n", bars, line >"/dev/stderr"
			bad = 1
			exit
		}
		split(f[1], ops, ","); split(f[2], worlds, ","); split(f[3], sizes, ",")
		for (i = 1; i in ops; i++) for (j = 1; j in worlds; j++) for (k = 1; k in sizes; k++) {
			barTable[++nbars] = ops[i] " of " dtype " on " device ", " worlds[j] " ranks"
			barCase[nbars] = worlds[j] " " ops[i] " " bytes(sizes[k])
			barShown[nbars] = sprintf("%-24s %5s %6s %-20s %9s", ops[i], worlds[j], sizes[k], f[4], f[5])
			barSize[nbars] = bytes(sizes[k]); barPeer[nbars] = f[4]; barWanted[nbars] = f[5]
		}
	}
	if (words < 0) { print bars ": cannot be read" >"/dev/stderr"; bad = 1; exit }
}
BEGIN {
	split("allreduce all_reduce allgather all_gather_into_tensor alltoall all_to_all_single sendrecv send_recv", names, " ")
	for (i = 1; i in names; i += 2) same[names[i]] = names[i + 1]
	if (bars != "") readBars()
}
(time = number("time_us_p50")) > 0 {
	op = text("op"); if (op in same) op = same[op]
	on = text("device"); if (on == "") on = "cpu"
	table = op " of " text("dtype") " on " on ", " number("world") " ranks"
	size = number("size"); from = text("system"); name = from
	if (text("work") != "") name = name " " text("work")
	if ($0 ~ /"alloc": *true/) name = name " alloc"
	least(best, table SUBSEP size SUBSEP name, time)
	if (FILENAME == ours) {
		least(our, table SUBSEP size, time)
		if (!((table, size, name) in row)) { row[table, size, name] = 1; rows[table] = rows[table] size "\t" name "\n" }
		if (!(table in seen)) { seen[table] = 1; tables[++ntables] = table }
	} else {
		least(peer, table SUBSEP size SUBSEP from, time)
		if (!((table, name) in column)) { column[table, name] = 1; columns[table] = columns[table] name "\t" }
	}
}
END {
	if (bad) exit 2
	if (cases) {
		for (i = 1; i <= nbars; i++) if (!(barCase[i] in once)) { once[barCase[i]] = 1; print barCase[i] }
		exit
	}
	for (t = 1; t <= ntables; t++) {
		table = tables[t]
		printf "# %s, medians in us\n%12s %-24s %12s", table, "bytes", "system", "p50"
		n = split(columns[table], peers, "\t")
		for (p = 1; p < n; p++) printf "  %20s %8s", peers[p], "ratio"
		printf "\n"
		m = split(rows[table], lines, "\n") - 1
		for (i = 2; i <= m; i++) for (j = i; j > 1 && lines[j] + 0 < lines[j - 1] + 0; j--) { s = lines[j]; lines[j] = lines[j - 1]; lines[j - 1] = s }
		for (i = 1; i <= m; i++) {
			split(lines[i], f, "\t")
			took = best[table, f[1], f[2]]
			printf "%12d %-24s %12.2f", f[1], f[2], took
			for (p = 1; p < n; p++) {
				if ((table, f[1], peers[p]) in best) printf "  %20.2f %7.2fx", best[table, f[1], peers[p]], best[table, f[1], peers[p]] / took
				else printf "  %20s %8s", "-", "-"
			}
			printf "\n"
		}
		printf "\n"
	}
	for (i = 1; i <= nbars; i++) {
		k = barTable[i] SUBSEP barSize[i]; p = k SUBSEP barPeer[i]
		if (!(k in our) || barPeer[i] != "-" && !(p in peer)) continue
		measured++
		if (barPeer[i] == "-") { met = our[k] <= barWanted[i] + 0; shown = sprintf("%.2fus", our[k]) }
		else { met = peer[p] / our[k] >= barWanted[i] + 0; shown = sprintf("%.2fx", peer[p] / our[k]) }
		hold += met
		printf "%s %12s %s\n", barShown[i], shown, met ? "holds" : "missed"
	}
	if (nbars) printf "# %d of %d bars hold; %d more were not measured\n", hold, measured, nbars - measured
	if (!ntables) { print ours ": no record" >"/dev/stderr"; exit 1 }
}' "$@"
