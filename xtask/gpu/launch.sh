# The section `launch` of run.sh, which sources this: programs that `cmt tune` starts, each beside a run without.
# shellcheck shell=bash disable=SC2154

# One rate of a program's log: the median of its one-second windows but the first.
rate() { median "$1" "$2" 1 1000; }

# Runs a program without and with `cmt tune`: beside NAME FIELD COMMAND...
beside() {
    local name=$1 field=$2 code
    shift 2
    "$@" > "$out/$name-stock.log" 2> "$out/$name-stock.err" || fail "$name, stock: exit $?"
    "$cmt" tune --profile "$out/estimate.json" --json "$out/$name.json" -- "$@" > "$out/$name-tuned.log" 2> "$out/$name-tuned.err"
    code=$?
    [ $code = 0 ] || fail "$name, tuned: exit $code: $(tail -1 "$out/$name-tuned.err")"
    say "launch: $name: stock $(rate "$out/$name-stock.log" "$field") tuned $(rate "$out/$name-tuned.log" "$field") GB/s; $(tail -1 "$out/$name-tuned.err")"
    say "launch: $name bytes: $(tail -1 "$out/$name-tuned.log")"
}

launch() {
    # The estimate, as `cmt status` tells it of a process that was attached to.
    "$bundle/victims/victim-drv" --bytes 1M --pause-ms 10 > "$out/estimate.log" 2>&1 &
    local pid
    pid=$(ready "$out/estimate.log")
    "$cmt" attach "$pid" --before 0s --after 0s > /dev/null || fail "launch: attach"
    "$cmt" status "$pid" --json | python3 -c 'import json,sys; json.dump(json.load(sys.stdin)["processes"][0]["plan"], sys.stdout)' > "$out/estimate.json"
    kill "$pid"; wait "$pid"
    beside launch-pytorch gbps python3 examples/pytorch_loop.py --seconds 8
    nvcc -O2 -o /tmp/copies examples/copies.cu && strip /tmp/copies
    beside launch-static htod_gbps /tmp/copies 1024 6
    cat > /tmp/pool.py <<'PY'
import multiprocessing, torch
def work(number):
    x = torch.full((64 << 20,), number + 1, dtype=torch.uint8)
    return all(bool((x.cuda().cpu() == x).all()) for _ in range(8))
if __name__ == "__main__":
    for how in ("spawn", "fork"):
        with multiprocessing.get_context(how).Pool(2) as pool:
            assert all(pool.map(work, range(2), chunksize=1)), how
    print("right")
PY
    "$cmt" tune --profile "$out/estimate.json" -- python3 /tmp/pool.py > "$out/pool.txt" 2>&1 || fail "launch: pool: $(tail -2 "$out/pool.txt")"
    say "launch: multiprocessing, spawn and fork: $(tr '\n' ' ' < "$out/pool.txt" | tail -c 300)"
    cat > /tmp/rank.py <<'PY'
import torch
x = torch.ones(64 << 20, dtype=torch.uint8)
assert all(bool((x.cuda().cpu() == x).all()) for _ in range(8))
PY
    "$cmt" tune --profile "$out/estimate.json" -- torchrun --nproc-per-node 2 --no-python python3 /tmp/rank.py > "$out/torchrun.txt" 2>&1 || fail "launch: torchrun: $(tail -2 "$out/torchrun.txt")"
    say "launch: torchrun of two: $(tail -1 "$out/torchrun.txt")"
    # What a program that copies nothing pays.
    python3 - "$cmt" "$out/estimate.json" <<'PY' | while read -r line; do say "launch: $line"; done
import statistics, subprocess, sys, time
cmt, profile = sys.argv[1:]
for name, command in (("true", ["true"]), ("python3 -c 'import torch'", ["python3", "-c", "import torch"])):
    times = {"plain": [], "tuned": []}
    for _ in range(5 if "torch" in name else 20):
        for how, prefix in (("plain", []), ("tuned", [cmt, "tune", "--quiet", "--profile", profile, "--"])):
            start = time.perf_counter()
            subprocess.run(prefix + command, check=True)
            times[how].append(time.perf_counter() - start)
    print(f"{name}: {statistics.median(times['plain']) * 1e3:.1f} ms plain, {statistics.median(times['tuned']) * 1e3:.1f} ms by cmt tune")
PY
}
