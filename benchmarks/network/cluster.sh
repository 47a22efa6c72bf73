#!/usr/bin/env bash
# Runs a script with torchrun on hosts of one rank each: network namespaces behind a bridge, each with
# a full-duplex NIC of a given rate. Needs root and iproute2 (apt-get install -y iproute2).
#
#   cluster.sh [-n HOSTS] [-r RATE|none] [-s HOP:RATE]... [-t SECONDS] [-p PYTHON] script.py [args...]
#
#   -n  number of hosts, 4              -s  hop between host HOP and host HOP+1, both ways, is slower
#   -r  rate of each NIC, 1gbit         -t  limit for the whole run, 600 seconds
#
# Exits with the code of the first rank that fails, or 124 after the limit; the last line says so.
# Nothing is left behind and no packet gets out: every device is made inside a namespace, every
# namespace goes when this script ends.
set -euo pipefail

hosts=4 rate=1gbit limit=600 python=python3 slow=()
usage() { sed -n '5,8p' "$0" >&2; exit 2; }
while getopts n:r:s:t:p: option; do
  case $option in
    n) hosts=$OPTARG ;; r) rate=$OPTARG ;; s) slow+=("$OPTARG") ;; t) limit=$OPTARG ;;
    p) python=$OPTARG ;; *) usage ;;
  esac
done
shift $((OPTIND - 1))
(($# > 0)) || usage

name=pgnet$$ net=10.88.0 port=29400 made=() pids=() at_limit=0  # $$: runs side by side do not meet

cleanup() {
  trap '' INT TERM
  local space
  kill -TERM "${pids[@]}" 2>/dev/null || true
  for space in "${made[@]}"; do ip netns pids "$space" | xargs -r kill -KILL 2>/dev/null || true; done
  for space in "${made[@]}"; do ip netns del "$space" || true; done
  rm -rf "$TMPDIR"
  ((at_limit == 0)) || echo "limit of ${limit%s} seconds reached" >&2
}
TMPDIR=$(mktemp -d) && export TMPDIR  # torchrun leaves folders there when it is killed
trap cleanup EXIT
trap 'exit 130' INT TERM

space() {  # name
  ip netns add "$1"
  made+=("$1")
  ip -n "$1" link set lo up
}

# htb, not tbf: it lets a packet of 64 KiB (GSO) through into debt, so that the burst can be small.
# With tbf's burst of 256 KiB a message as large passes a link of any rate at once.
class() { tc -n "$1" class add dev "$2" parent 1: classid "1:$3" htb rate "$4" burst 16kb quantum 60000; }
shape() {  # namespace device
  [[ $rate == none ]] && local rate=100gbit
  tc -n "$1" qdisc add dev "$2" root handle 1: htb default 1
  class "$1" "$2" 1 "$rate"
}
slow_down() {  # from-host to-host rate, a class of its own beside the rest of the NIC
  class "$name-$1" eth0 2 "$3"
  tc -n "$name-$1" filter add dev eth0 parent 1: protocol ip u32 \
    match ip dst "$net.$((100 + $2))/32" flowid 1:2
}

space "$name-sw"
ip -n "$name-sw" link add bridge type bridge
ip -n "$name-sw" link set bridge up
for ((i = 0; i < hosts; i++)); do
  space "$name-$i"
  ip -n "$name-$i" link add eth0 type veth peer name "port$i" netns "$name-sw"
  ip -n "$name-$i" addr add "$net.$((100 + i))/24" dev eth0
  ip -n "$name-$i" link set eth0 up
  ip -n "$name-sw" link set "port$i" master bridge up
  shape "$name-$i" eth0        # what the host sends
  shape "$name-sw" "port$i"    # what it receives
done
for hop in "${slow[@]}"; do
  slow_down "${hop%%:*}" $((${hop%%:*} + 1)) "${hop#*:}"
  slow_down $((${hop%%:*} + 1)) "${hop%%:*}" "${hop#*:}"
done

# is_host and --local-addr: all namespaces have one host name, from which c10d would guess who serves
# the rendezvous, and hang. Ranks come in the order of addresses, compared as text: hence 100 and up.
began=$SECONDS
for ((i = 0; i < hosts; i++)); do
  timeout -k 5 "$limit" ip netns exec "$name-$i" \
    env GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONUNBUFFERED=1 \
    "$python" -m torch.distributed.run --nnodes "$hosts" --nproc-per-node 1 --rdzv-backend c10d \
    --rdzv-id "$name" --rdzv-endpoint "$net.100:$port" \
    --rdzv-conf "is_host=$((i == 0)),join_timeout=60" --local-addr "$net.$((100 + i))" "$@" \
    2> >(exec tee "$TMPDIR/errors.$i" >&2) &
  pids+=($!)
done
# When a host fails the others would wait for it. They get a while, to say what they know.
for _ in "${pids[@]}"; do
  wait -n -p failed && continue
  code=$? seconds=$((SECONDS - began))
  sleep 3
  if ((code == 124 || (code == 137 && seconds >= ${limit%%[!0-9]*}))); then  # of timeout
    at_limit=1
    exit 124
  fi
  # torchrun exits with 1 whatever a rank exits with, and prints that code.
  for ((i = 0; i < hosts; i++)); do
    ((pids[i] == failed)) || continue
    of_rank=$(sed -n 's/^ *exitcode *: \(-\{0,1\}[0-9]*\) (pid.*/\1/p' "$TMPDIR/errors.$i" | tail -n 1)
    code=${of_rank:-$code}
  done
  exit $((code < 0 ? 128 - code : code))  # a signal, as shells count it
done
