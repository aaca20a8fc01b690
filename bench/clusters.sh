#!/bin/sh
# All-reduces of two hosts over a link of a known speed, beside PyTorch's gloo, Open MPI and what
# the link alone needs. Each host is a network namespace. Needs root and iproute2.
#
#   bench/clusters.sh
#   RATE=1gbit RANKS=2,3 SIZES=16M,64M C10D=bin/c10d OUT=bin/link bench/clusters.sh
#
# RANKS is how many ranks are on each host. A row has the median time of each system in ms, of REPEAT calls after
# one more, and its ratio to the time in which plain TCP moves the bytes of one buffer both ways at once. With OUT
# the records are added to files in that directory, one for each system.
set -eu

RATE=${RATE:-1gbit}
RANKS=${RANKS:-2,2}
SIZES=${SIZES:-16M,64M}
REPEAT=${REPEAT:-5}
C10D=${C10D:-bin/c10d}
PYTHON=${PYTHON:-/usr/bin/python3}
OUT=${OUT:-}

base=c10dlink$$
dir=$(mktemp -d)
cleanup() {
	for h in 0 1; do ip netns del "$base$h" 2>/dev/null || true; done
	rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP

for h in 0 1; do ip netns add "$base$h"; done
ip link add ve0 netns "${base}0" type veth peer name ve0 netns "${base}1"
for h in 0 1; do
	in="ip netns exec $base$h"
	$in ip addr add "10.79.0.$((h + 1))/24" dev ve0
	$in ip link set lo up
	$in ip link set ve0 up
	$in tc qdisc add dev ve0 root tbf rate "$RATE" burst 256k latency 100ms
done

first=${RANKS%,*} second=${RANKS#*,}
world=$((first + second))

# on HOST COMMAND... runs a command on a host.
on() {
	host=$1
	shift
	ip netns exec "$base$host" "$@"
}

bytes() {
	case $1 in
	*M) echo $((${1%M} << 20)) ;;
	*K) echo $((${1%K} << 10)) ;;
	*) echo "$1" ;;
	esac
}

# every COMMAND... runs a command as each rank, and prints what rank 0 does.
every() {
	port=$1 pids=
	shift
	rank=1
	while [ "$rank" -lt "$world" ]; do
		host=1
		if [ "$rank" -lt "$first" ]; then host=0; fi
		RANK=$rank on "$host" env "C10D_HOST=$host" WORLD_SIZE=$world MASTER_ADDR=10.79.0.1 "MASTER_PORT=$port" GLOO_SOCKET_IFNAME=ve0 OMP_NUM_THREADS=1 "$@" >/dev/null &
		pids="$pids $!"
		rank=$((rank + 1))
	done
	RANK=0 on 0 env C10D_HOST=0 WORLD_SIZE=$world MASTER_ADDR=10.79.0.1 "MASTER_PORT=$port" GLOO_SOCKET_IFNAME=ve0 OMP_NUM_THREADS=1 "$@"
	for pid in $pids; do wait "$pid"; done
}

cat >"$dir/link.py" <<'END'
import platform, socket, sys, threading, time
n, first = int(sys.argv[1]), sys.argv[2] == "0"
if first:
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("10.79.0.1", 29400)); s.listen(); c = s.accept()[0]
else:
    for _ in range(100):
        try: c = socket.create_connection(("10.79.0.1", 29400)); break
        except OSError: time.sleep(0.05)
c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
data, into, times = bytes(n), memoryview(bytearray(n)), []
for _ in range(int(sys.argv[3]) + 1):
    c.sendall(b"x"); c.recv(1)
    start = time.monotonic()
    t = threading.Thread(target=c.sendall, args=(data,)); t.start()
    got = 0
    while got < n: got += c.recv_into(into[got:])
    t.join()
    times.append(time.monotonic() - start)
if first: print(platform.release()); print(*times[1:])
END
cat >"$dir/peer.py" <<'END'
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.zeros(int(sys.argv[1]) // 4)
times = []
for _ in range(int(sys.argv[2]) + 1):
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(t)
    took = torch.tensor([time.monotonic() - start])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    times.append(took.item())
if dist.get_rank() == 0: print(torch.__version__); print(*times[1:])
END
# Open MPI's library by its C names, because its headers may not be installed.
cat >"$dir/mpi.py" <<'END'
import ctypes, sys, time
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
thing = lambda name: ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))
world, float32, float64 = thing("ompi_mpi_comm_world"), thing("ompi_mpi_float"), thing("ompi_mpi_double")
add, most, in_place = thing("ompi_mpi_op_sum"), thing("ompi_mpi_op_max"), ctypes.c_void_p(1)
mpi.MPI_Init(None, None)
rank = ctypes.c_int(); mpi.MPI_Comm_rank(world, ctypes.byref(rank))
n = int(sys.argv[1]); t = ctypes.create_string_buffer(n); times = []
for _ in range(int(sys.argv[2]) + 1):
    mpi.MPI_Barrier(world)
    start = time.monotonic()
    mpi.MPI_Allreduce(in_place, t, n // 4, float32, add, world)
    took = ctypes.c_double(time.monotonic() - start)
    mpi.MPI_Allreduce(in_place, ctypes.byref(took), 1, float64, most, world)
    times.append(took.value)
name, length = ctypes.create_string_buffer(256), ctypes.c_int()
mpi.MPI_Get_library_version(name, ctypes.byref(length))
if rank.value == 0: print(name.value.decode().split(",")[0]); print(*times[1:])
mpi.MPI_Finalize()
END
cat >"$dir/agent" <<END
#!/bin/sh
# Open MPI's agent: runs a command on a host, with a name of its own.
shift
exec ip netns exec ${base}1 unshare --uts sh -c "hostname second; \$*"
END
chmod +x "$dir/agent"

cat >"$dir/record.py" <<'END'
# Makes a record of what a program above prints: a version and times in seconds.
import json, sys
system, size, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
version, times = sys.stdin.read().splitlines()
times = sorted(float(t) * 1e6 for t in times.split())
at = lambda q: times[min(len(times) - 1, int(q * len(times)))]
print(json.dumps({"system": system, "version": version, "op": "all_reduce", "dtype": "float32", "size": size, "world": world,
    "bytes": size, "iters": len(times), "repeat": 1, "time_us_p50": at(0.5), "time_us_p99": at(0.99), "time_us_avg": sum(times) / len(times)}))
END

# keep FILE keeps the record on the input, and prints its median in ms. It prints nothing if there is no record.
keep() {
	IFS= read -r record || return 0
	if [ "$OUT" ]; then printf '%s\n' "$record" >>"$OUT/$1.jsonl"; fi
	printf '%s\n' "$record" | sed -n 's/.*"time_us_p50": *\([0-9.e+-]*\).*/\1/p' | awk '{ print $1 / 1000 }'
}

# made SYSTEM makes a record of what a program prints.
made() { "$PYTHON" "$dir/record.py" "$1" "$n" "$world" | keep "$1"; }

ratio() { awk -v t="${1:-0}" -v l="$2" 'BEGIN { if (t > 0) printf "%9.1f %5.2f", t, t / l; else printf "%9s %5s", "-", "-" }'; }

if [ "$OUT" ]; then mkdir -p "$OUT"; fi
printf '%s ranks a host, link of %s, load %s\n' "$RANKS" "$RATE" "$(cut -d ' ' -f 1-3 /proc/loadavg)"
printf '%6s %9s   %-15s   %-15s   %-15s\n' bytes "link ms" "c10d" "PyTorch gloo" "Open MPI"
port=29500
for size in $(echo "$SIZES" | tr , ' '); do
	n=$(bytes "$size")
	on 1 "$PYTHON" "$dir/link.py" "$n" 1 "$REPEAT" &
	link=$(on 0 "$PYTHON" "$dir/link.py" "$n" 0 "$REPEAT" | made link)
	wait
	port=$((port + 1))
	ours=$(every $port "$C10D" bench -json -check=false -repeat 1 -w 1 -n "$REPEAT" -op all_reduce -sizes "$size" | keep c10d-go)
	torch=
	if "$PYTHON" -c 'import torch' 2>/dev/null; then
		port=$((port + 1))
		torch=$(every $port "$PYTHON" "$dir/peer.py" "$n" "$REPEAT" | made torch-gloo)
	fi
	mpi=
	if command -v mpirun >/dev/null; then
		on 0 unshare --uts sh -c "hostname first; exec mpirun --allow-run-as-root --oversubscribe --host 10.79.0.1:$first,10.79.0.2:$second -n $world --mca plm_rsh_agent $dir/agent --mca btl_tcp_if_include ve0 --mca oob_tcp_if_include ve0 $PYTHON $dir/mpi.py $n $REPEAT" >"$dir/mpi" 2>"$dir/mpi.err" || : >"$dir/mpi"
		if [ -s "$dir/mpi" ]; then mpi=$(made openmpi <"$dir/mpi"); fi
	fi
	printf '%6s %9.1f   %s   %s   %s\n' "$size" "$link" "$(ratio "$ours" "$link")" "$(ratio "$torch" "$link")" "$(ratio "$mpi" "$link")"
	if [ -z "$mpi" ] && [ -s "$dir/mpi.err" ]; then head -5 "$dir/mpi.err" >&2; fi
done
printf 'load %s\n' "$(cut -d ' ' -f 1-3 /proc/loadavg)"
