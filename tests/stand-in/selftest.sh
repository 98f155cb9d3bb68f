#!/usr/bin/env bash
# Checks the stand-in and the victims against each other, without cmt: selftest.sh [OUTDIR]. Takes about a minute.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
out=${1:-$(mktemp -d)}
mkdir -p "$out"
out=$(realpath "$out")
bash "$here/build.sh" "$out"
bash "$here/../victims/build.sh" "$out"
cd "$out"
export LD_LIBRARY_PATH=$out
fail() {
    echo "selftest: $*" >&2
    exit 1
}

# Every function that the engine calls is exported.
exports=$(nm -D --defined-only libcuda.so.1 libcudart.so.13 | awk '{sub(/@.*/, "", $3); print $3}')
for name in $(grep -oh '"cu[A-Za-z0-9_]*"' "$here/../../cmt-common/src/api/driver.rs" | tr -d '"' | sort -u); do
    grep -qx "$name" <<<"$exports" || fail "$name is not exported"
done

# The contract program prints what it prints on a real driver.
./contract | grep -v '^ready' > contract.out || fail "contract: exit ${PIPESTATUS[0]}"
diff <(sed -e '/^#/d' -e 's/^? //' "$here/../victims/contract.expected") contract.out || fail "contract.out differs"

# Victims: bytes right, counts as expected.
run() {
    local want=$1
    shift
    set +e
    timeout 60 "$@" > run.out 2> run.err
    local got=$?
    set -e
    [ "$got" = "$want" ] || fail "$*: exit $got instead of $want: $(cat run.err)"
}
for options in "" "--async" "--async --fresh" "--per-thread --async" "--default-kind" "--pinned --async" \
    "--two-d --async" "--fail-every 3" "--fork-at 0.3 --seconds 0.6" "--idle-threads 6 --malloc-storm 2"; do
    for victim in victim-rt victim-drv victim-static-rt; do
        # shellcheck disable=SC2086
        run 0 ./$victim --threads 8 --bytes 1M,70001,512 --seconds 0.6 $options
        head -n 1 run.out | grep -q '^ready [0-9]*$' || fail "$victim $options: no ready line"
        tail -n 1 run.out | grep -q '"mismatches":0' || fail "$victim $options: $(tail -n 1 run.out)"
    done
done
run 0 ./victim-drv --threads 3 --bytes 4K --calls 200
grep -q '"cuMemcpyHtoD_v2":{"calls":300,"errors":0' run.out || fail "--calls: $(tail -n 1 run.out)"
LD_LIBRARY_PATH=$out/endbr:$out run 0 ./victim-rt --threads 4 --bytes 1M --seconds 0.5

# Failures on demand, and that the victims notice what is wrong.
STANDIN_FAIL_COPY_EVERY=10 run 5 ./victim-drv --bytes 4K --calls 100
STANDIN_FAIL_COPY_EVERY=10 run 0 ./victim-drv --bytes 4K --calls 100 --allow-errors
grep -q '"errors":10' run.out || fail "STANDIN_FAIL_COPY_EVERY: $(tail -n 1 run.out)"
STANDIN_FAIL_HOSTALLOC_AFTER=1000000 run 5 ./victim-drv --pinned --bytes 4M --calls 2
STANDIN_CORRUPT_EVERY=10 run 3 ./victim-rt --bytes 64K --calls 100
echo "selftest: all right"
