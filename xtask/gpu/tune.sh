# The section `tune` of run.sh, which sources this: how long the searches take, and what they find.
# shellcheck shell=bash disable=SC2154

# A search and what it prints: search KIND
search() {
    local start end
    start=$(date +%s%N)
    "$cmt" tune --search "$1" --fresh --quiet --save "$out/tune-$1-profile.json" --json "$out/tune-$1.json" > "$out/tune-$1.txt" 2> "$out/tune-$1.err" \
        || fail "tune $1: $(tail -1 "$out/tune-$1.err")"
    end=$(date +%s%N)
    say "tune: $1 took $(((end - start) / 1000000)) ms"
}

tune() {
    export XDG_CACHE_HOME=$out/cache
    "$cmt" tune --search instant > "$out/tune-text.txt" || fail "tune: instant"
    cat "$out/tune-text.txt"
    search instant
    search fast
    local start end
    start=$(date +%s%N)
    "$cmt" tune > "$out/tune-again.txt" || fail "tune: again"
    end=$(date +%s%N)
    say "tune: fast, a second time: $(((end - start) / 1000000)) ms"
    search full
    "$cmt" tune --search full > "$out/tune-full-text.txt" && cat "$out/tune-full-text.txt"
    "$cmt" profile check "$out/tune-full-profile.json" || fail "tune: its own profile is refused"
    python3 - "$out/tune-full-profile.json" <<'PY' | while IFS= read -r line; do say "tune: $line"; done
import json, sys
classes = json.load(open(sys.argv[1]))["measured"]["classes"]
ratios = []
for it in classes:
    instant = it.get("instant_gbps")
    if instant:
        ratios.append(instant / it["tuned_gbps"])
    print(f'{it["direction"]} {it["bytes"] >> 10:7} KiB: stock {it["stock_gbps"]:5.1f} full {it["tuned_gbps"]:5.1f} instant {instant or float("nan"):5.1f} pinned {it["pinned_gbps"]:5.1f} GB/s, {it["near"]} of {it["finalists"]} finalists within 3 %')
ratios.sort()
if ratios:
    print(f"instant is at {ratios[0]:.2f} to {ratios[-1]:.2f} of full, median {ratios[len(ratios) // 2]:.2f}, over {len(ratios)} classes")
PY
}
