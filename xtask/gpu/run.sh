#!/usr/bin/env bash
# Runs on a machine with an NVIDIA GPU, as root, from the project's folder, after `cargo xtask gpu` has made the bundle:
#
#     xtask/gpu/run.sh [facts] [engine] [crowd] [link] [pair] [rows] [files] [guard] [flavours] [pace] [contract] [mps] [trace] [launch] [tune] [workloads] [pytorch] [static] [pause] [bench]     (all of them by default)
#
# Ends with a short table. Needs nvcc and PyTorch there, but no Rust.
set -uo pipefail
cd "$(dirname "$0")/../.."
bundle=target/gpu-bundle
cmt=$bundle/cmt
out=${OUT:-/tmp/cmt-gpu}
mkdir -p "$out"
summary=$out/summary.txt
: > "$summary"
sections=${*:-facts engine crowd link pair rows files guard flavours pace contract mps trace launch tune workloads pytorch static pause bench}
export LD_LIBRARY_PATH="$PWD/$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
failed=0
say() { printf '%s\n' "$*" | tee -a "$summary"; }
fail() { say "FAILED: $*"; failed=1; }

# Waits for the first line of a victim, `ready PID`, and prints the process id.
ready() {
    for _ in $(seq 300); do
        if grep -q '^ready' "$1" 2>/dev/null; then sed -n 's/^ready //p' "$1" | head -1; return; fi
        sleep 0.2
    done
    cat "$1" >&2
}
# Median of a field over the JSON lines from line $3 on (counted after `ready`), $4 lines at most.
median() {
    python3 - "$@" <<'PY'
import json, statistics, sys
path, field, first, most = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rows = [json.loads(line) for line in open(path) if line.startswith('{"t"')]
rows = [row[field] for row in rows[first:first + most] if field in row]
print(f"{statistics.median(rows):.2f}" if rows else "nan")
PY
}
lines() { grep -c '^{"t"' "$1"; }

# Stock, attached and detached throughput of a running victim; $1 name, $2 log, $3 pid, $4... fields
story() {
    local name=$1 log=$2 pid=$3; shift 3
    sleep 4
    "$cmt" trace "$pid" --for 2s | tee "$out/$name-trace.txt"
    local before after
    before=$(lines "$log")
    "$cmt" attach "$pid" --before 5s --after 5s --html "$out/$name.html" | tee "$out/$name-attach.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || fail "$name: attach"
    sleep 3
    after=$(lines "$log")
    "$cmt" status "$pid"
    "$cmt" detach "$pid" || fail "$name: detach"
    sleep 5
    local end; end=$(lines "$log")
    for field in "$@"; do
        say "$name $field: stock $(median "$log" "$field" 0 "$before") attached $(median "$log" "$field" $((after - 6)) 6) detached $(median "$log" "$field" $((end - 3)) 3) GB/s"
    done
    kill "$pid"; wait "$pid"; local code=$?
    tail -1 "$log"
    [ "$code" = 0 ] || fail "$name: exit code $code"
    say "$name bytes: $(tail -1 "$log")"
}

# shellcheck source=xtask/gpu/contract.sh
. xtask/gpu/contract.sh
# shellcheck source=xtask/gpu/trace.sh
. xtask/gpu/trace.sh
# shellcheck source=xtask/gpu/launch.sh
. xtask/gpu/launch.sh
# shellcheck source=xtask/gpu/tune.sh
. xtask/gpu/tune.sh
# shellcheck source=xtask/gpu/workloads.sh
. xtask/gpu/workloads.sh

say "hardware: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader), $(nproc) CPUs, Linux $(uname -r)"
for section in $sections; do
    echo "==== $section"
    case $section in
    facts)
        nvcc -O2 -arch=sm_90 -o /tmp/facts xtask/gpu/facts.cu -lcuda && /tmp/facts | tee "$out/facts.txt"
        ;;
    engine)
        "$bundle/engine" 1024 2>&1 | tee "$out/engine.txt"
        [ "${PIPESTATUS[0]}" = 0 ] || fail "engine"
        ;;
    crowd | link | pair | rows | files | guard | flavours | pace)
        "$bundle/engine" "$section" 1024 2>&1 | tee "$out/$section.txt"
        [ "${PIPESTATUS[0]}" = 0 ] || fail "$section"
        ;;
    contract)
        contract
        ;;
    mps)
        mps
        ;;
    trace)
        trace
        ;;
    launch | tune | workloads)
        "$section"
        ;;
    pytorch)
        python3 examples/pytorch_loop.py --seconds 90 > "$out/pytorch.log" 2>&1 &
        story pytorch "$out/pytorch.log" "$(ready "$out/pytorch.log")" gbps
        ;;
    static)
        nvcc -O2 -o /tmp/copies examples/copies.cu && strip /tmp/copies
        /tmp/copies 1024 90 > "$out/static.log" 2>&1 &
        story static "$out/static.log" "$(ready "$out/static.log")" htod_gbps dtoh_gbps
        ;;
    pause)
        for threads in 20 200; do
            "$bundle/victims/victim-drv" --threads 4 --bytes 4194304 --idle-threads $((threads - 5)) --seconds 60 > "$out/pause.log" 2>&1 &
            pid=$(ready "$out/pause.log"); sleep 1
            for _ in 1 2 3 4 5; do
                "$cmt" attach "$pid" --before 0s --after 0s --json > "$out/pause.json" || fail "pause: attach"
                "$cmt" detach "$pid" > /dev/null || fail "pause: detach"
                python3 -c "import json;o=json.load(open('$out/pause.json'));print(o['attach_ms'],o['commit_pause_us'],o['commit_threads'],o['hijack_us'])"
            done | tee "$out/pause-$threads.txt"
            say "pause: $threads threads: attach ms, pause us, stopped, hijack us: $(sort -n -k2 "$out/pause-$threads.txt" | sed -n 3p) (median of 5 by pause), worst pause $(sort -n -k2 "$out/pause-$threads.txt" | tail -1 | cut -d' ' -f2)"
            kill "$pid"; wait "$pid" || fail "pause: victim exit $?"
        done
        ;;
    bench)
        # One run; table and page are made from it.
        if "$cmt" bench --json > "$out/bench.json"; then
            "$cmt" bench --from "$out/bench.json" --html "$out/bench.html" | tee "$out/bench.txt"
            say "$(sed -n 's/^GPU  */bench: /p' "$out/bench.txt")"
        else
            fail "bench"
        fi
        ;;
    *) fail "no section $section" ;;
    esac
done
tar -C "$out" -czf "$out/details.tgz" --exclude details.tgz . 2>/dev/null
find "$out" -maxdepth 1 -type f ! -name details.tgz ! -name log ! -name summary.txt -delete
echo "==== summary"
cat "$summary"
exit $failed
