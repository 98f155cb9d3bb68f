# The section `trace` of run.sh, which sources this: what the tracer says of kinds of memory, and what it costs.
# shellcheck shell=bash disable=SC2154

# Traces a program from its first copy to its end: traced NAME COMMAND...
traced() {
    local name=$1 pid tracer
    shift
    "$@" > "$out/$name.log" 2>&1 &
    pid=$(ready "$out/$name.log")
    "$cmt" trace "$pid" --json > "$out/$name.json" 2> "$out/$name.err" &
    tracer=$!
    for _ in $(seq 100); do grep -q '^tracing' "$out/$name.err" && break; sleep 0.1; done
    kill -USR1 "$pid"
    wait "$tracer" || fail "$name: trace: $(tail -1 "$out/$name.err")"
}

trace() {
    "$cmt" doctor | tee "$out/doctor.txt"
    # A registered buffer is pinned by the driver itself here.
    traced kinds "$bundle/victims/victim-kinds"
    python3 - "$out/kinds.json" <<'PY' | tee "$out/kinds.txt"
import json, sys
for row in sorted(json.load(open(sys.argv[1]))["processes"][0]["copies"], key=lambda row: (row["direction"], row["size_class_bytes"])):
    print(f'{row["direction"]} {row["size_class_bytes"] >> 10:6} KiB {row["memory"]:9} {row["backing"]:10} {row["calls"]:4} calls {row["bytes"] / max(row["total_ns"], 1):6.1f} GB/s')
PY
    traced trace-pytorch python3 xtask/gpu/trace.py
    python3 xtask/gpu/trace.py --check "$out/trace-pytorch.json" | tee "$out/trace-pytorch.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || fail "trace: kinds of a PyTorch program"
    while read -r line; do say "trace: $line"; done < "$out/trace-pytorch.txt"
    # A million copies of 64 bytes each way, with and without probes, in turns.
    for turn in 1 2 3; do
        for mode in plain probed; do
            "$bundle/victims/victim-drv" --bytes 64 --calls 2000000 --exact --hold > "$out/million.log" 2>&1 &
            pid=$(ready "$out/million.log")
            tracer=
            if [ $mode = probed ]; then
                "$cmt" trace "$pid" > "$out/million-trace.txt" 2> "$out/million.err" &
                tracer=$!
                for _ in $(seq 100); do grep -q '^tracing' "$out/million.err" && break; sleep 0.1; done
            fi
            start=$(date +%s%N)
            kill -USR1 "$pid"
            while kill -0 "$pid" 2> /dev/null; do sleep 0.01; done
            say "trace: 2000000 copies of 64 bytes, $mode, turn $turn: $((($(date +%s%N) - start) / 2000000)) ns each$([ -n "$tracer" ] && wait "$tracer" && grep -E '^tracing itself|^lost' "$out/million-trace.txt" | sed 's/^/; /' | tr '\n' ' ')"
        done
    done
    # Every copying process of this machine, and the time that Ctrl-C takes.
    "$bundle/victims/victim-drv" --bytes 4K --pause-ms 1 > "$out/all.log" 2>&1 &
    pid=$(ready "$out/all.log")
    "$cmt" trace --all > "$out/all-trace.txt" 2> "$out/all.err" &
    tracer=$!
    sleep 3
    start=$(date +%s%N)
    kill -INT "$tracer"; wait "$tracer" || fail "trace --all"
    say "trace: Ctrl-C of --all to the prompt: $((($(date +%s%N) - start) / 1000000)) ms"
    kill "$pid"; wait "$pid"
}
