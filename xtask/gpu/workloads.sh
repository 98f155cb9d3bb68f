# The section `workloads` of run.sh, which sources this: programs that people run, stock and tuned, in turns.
# shellcheck shell=bash disable=SC2154

workloads() {
    # Options for run.py: WORKLOADS="--rounds 2 --only tensor_to,offload", say.
    # shellcheck disable=SC2086
    python3 examples/workloads/run.py --cmt "$cmt" --json "$out/workloads.json" --html "$out/workloads.html" ${WORKLOADS:-} \
        > "$out/workloads.txt" 2> "$out/workloads.err" || fail "workloads: exit code $?: $(tail -1 "$out/workloads.err")"
    # What each run took, for whoever plans the next.
    cat "$out/workloads.err"
    while IFS= read -r line; do say "workloads: $line"; done < "$out/workloads.txt"
}
