# The sections `contract` and `mps` of run.sh, which sources this: the contract program stock and patched, compared.
# shellcheck shell=bash disable=SC2154

# Runs the contract program: run_contract INTO CMT ARGUMENTS...; CMT patches it before it starts, or is empty for stock. Without
# the guard, so that short copies that come one at a time are staged, too.
# INTO gets its lines, what it wrote to standard error, and its exit code as the last line.
run_contract() {
    local into=$1 tool=$2 pid child code
    shift 2
    rm -f "$into" "$into".*
    timeout -k 5 240 "$bundle/victims/contract" "$@" --wait-file "$into.go" > "$into" 2> "$into.err" &
    child=$!
    pid=$(ready "$into" 2> /dev/null)
    if [ -n "$tool" ] && [ -n "$pid" ]; then
        "$tool" attach "$pid" --unguarded --before 0s --after 0s > "$into.attach" 2>&1 || echo "attach: $(tail -1 "$into.attach")" >> "$into.err"
    fi
    touch "$into.go"
    while [ -n "$tool" ] && kill -0 "$child" 2> /dev/null; do
        "$tool" status "$pid" --json > "$into.status.new" 2> /dev/null && mv "$into.status.new" "$into.status"
        sleep 0.3
    done
    wait "$child"; code=$?
    sed 's/^/stderr: /' "$into.err" >> "$into"
    echo "exit: $code" >> "$into"
}

# Compares what two runs left: compare_contract STOCK PATCHED. Prints one line, and the differences if there are any.
# Allowed: an asynchronous HtoD copy that stock lets wait for its stream may return earlier, in the lines named below.
compare_contract() {
    python3 - "$1" "$2" <<'PY'
import json, os, sys
stock, patched = ([line.rstrip("\n") for line in open(path) if not line.startswith("ready")] for path in sys.argv[1:3])
may_wait_less = ("source_after_htod_busy/", "does_not_wait/", "waits_for_word/HtoD", "two_d_busy/HtoD:")
less, wrong = [], []
for a, b in zip(stock, patched):
    if a == b:
        continue
    if a.startswith(may_wait_less) and a.replace("waited=1", "waited=0") == b:
        less.append(b.split(": ")[0])
    else:
        wrong.append((a, b))
if len(stock) != len(patched):
    wrong.append((f"{len(stock)} lines", f"{len(patched)} lines"))
# Only the processes that are meant to may end in another way.
if not os.path.basename(sys.argv[1]).startswith("end_") and stock and stock[-1] != "exit: 0":
    wrong.append((" ".join(stock[-2:]), "stock itself did not get through"))
for path, lines in zip(sys.argv[1:], (stock, patched)):
    if not lines or lines[-1] in ("exit: 124", "exit: 137"):
        wrong.append((f"{path} did not end by itself", ""))
staged = ""
try:
    process = json.load(open(sys.argv[2] + ".status"))["processes"][0]
    calls = [side["calls"] for side in process["staged"]]
    staged = f", staged {calls[0]} HtoD and {calls[1]} DtoH, engine {process.get('engine', '?')}"
except (OSError, ValueError, KeyError, IndexError):
    pass
print(f"{len(stock)} lines, {len(wrong)} differ, {len(less)} wait no longer{staged}; {stock[-1] if stock else 'nothing'}")
for line in less:
    print(f"    waits no longer: {line}")
for a, b in wrong:
    print(f"    stock:   {a}\n    patched: {b}")
sys.exit(bool(wrong))
PY
}

# Stock against the engines of the bundle: contract_both_ways NAME ENGINES ARGUMENTS... One line a comparison in the
# summary, and the lines that differ.
contract_both_ways() {
    local name=$1 engines=$2 tool engine said
    shift
    shift
    run_contract "$out/$name-stock.txt" "" "$@"
    for engine in $engines; do
        tool=$cmt
        [ "$engine" = builtin ] || tool=$bundle/cmt-$engine
        [ -x "$tool" ] || continue
        run_contract "$out/$name-$engine.txt" "$tool" "$@"
        if said=$(compare_contract "$out/$name-stock.txt" "$out/$name-$engine.txt"); then
            say "$name, $engine: alike: $(head -1 <<< "$said")"
        else
            fail "$name, $engine: $(head -1 <<< "$said")"
            say "$(grep -e '^    stock' -e '^    patched' <<< "$said" | head -40)"
        fi
        tail -n +2 <<< "$said" | tee "$out/$name-$engine.differences.txt"
    done
}

# What the stand-in says of the driver and this driver does not. No failure of ours: something to learn.
contract_against_the_stand_in() {
    local facts=$out/contract-facts.txt
    diff <(sed -e '/^#/d' -e 's/^? //' tests/victims/contract.expected) \
        <(grep -v -e '^ready' -e '^stderr' -e '^exit' -e '^destination_after_dtoh_busy/\(64\|1024\)MiB' "$1") > "$facts"
    say "contract: $(grep -c '^>' "$facts") lines of this driver's are not what the stand-in prints"
    cat "$facts"
}

# Copy functions that this libcuda exports and the API table does not name (case 18).
entry_points() {
    local library
    library=$(ldconfig -p | awk '/libcuda\.so\.1 .*x86-64/ {print $NF; exit}')
    if [ -z "$library" ] || ! command -v nm > /dev/null; then
        say "entry points: not run: no libcuda in the loader's cache, or no nm"
        return
    fi
    nm -D --defined-only "$library" | awk '$3 ~ /^cuMemcpy/ {print $3}' | sort -u > "$out/entry-points.txt"
    grep -oh '"cuMemcpy[A-Za-z0-9_]*"' cmt-common/src/api/*.rs | tr -d '"' | sort -u > "$out/entry-points-known.txt"
    say "entry points: $(wc -l < "$out/entry-points.txt") cuMemcpy* in $library; missing there: $(comm -13 "$out/entry-points.txt" "$out/entry-points-known.txt" | tr '\n' ' ')"
    say "entry points not in the table: $(comm -23 "$out/entry-points.txt" "$out/entry-points-known.txt" | tr '\n' ' ')"
    # Those between host and device in one dimension are what the patch is for.
    if comm -23 "$out/entry-points.txt" "$out/entry-points-known.txt" | grep -E '^cuMemcpy(HtoD|DtoH|Async)?(Async)?_v[2-9](_pt[ds]s?z?)?$'; then
        fail "entry points: a current copy function is not in the table"
    fi
}

contract() {
    local end devices
    [ -x "$bundle/cmt-frida" ] || say "contract, frida: not run: no cmt-frida in the bundle (build it with FRIDA_GUM_DEVKIT set)"
    contract_both_ways contract "builtin frida" --at-length
    contract_against_the_stand_in "$out/contract-stock.txt"
    for end in $("$bundle/victims/contract" --ends); do
        contract_both_ways "$end" "builtin frida" --end "$end"
    done
    devices=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU')
    if [ "$devices" -gt 1 ]; then
        contract_both_ways second-device builtin --device 1
    else
        say "second device: not run: $devices device here"
    fi
    entry_points
}

# The same under NVIDIA's multi-process service, if it can be started here.
mps() {
    local folder servers
    if ! command -v nvidia-cuda-mps-control > /dev/null; then
        say "mps: not run: no nvidia-cuda-mps-control here"
        return
    fi
    folder=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
    mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if ! timeout 30 nvidia-cuda-mps-control -d > "$out/mps.txt" 2>&1 < /dev/null; then
        say "mps: not run: nvidia-cuda-mps-control -d: $(tail -1 "$out/mps.txt")"
    else
        run_contract "$out/mps-probe.txt" "" --only unaligned
        servers=$(echo get_server_list | timeout 30 nvidia-cuda-mps-control 2>&1 | tr '\n' ' ')
        if ! grep -q '^unaligned: ret=0' "$out/mps-probe.txt" || ! [[ $servers =~ ^[0-9] ]]; then
            say "mps: not run: servers: ${servers:-none}; $(tail -2 "$out/mps-probe.txt" | tr '\n' ' ') $(tail -q -n 1 "$CUDA_MPS_LOG_DIRECTORY"/*.log 2> /dev/null | tail -1)"
        else
            say "mps: server $servers"
            contract_both_ways mps builtin
        fi
        echo quit | timeout 30 nvidia-cuda-mps-control > /dev/null 2>&1
        cp "$CUDA_MPS_LOG_DIRECTORY"/*.log "$out/" 2> /dev/null
    fi
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    rm -rf "$folder"
}
