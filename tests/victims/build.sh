#!/usr/bin/env bash
# Builds the victims: build.sh OUTDIR [LIBDIR], where LIBDIR holds libcuda.so and libcudart.so, the stand-in's or the real
# ones (default: OUTDIR). They find the libraries through LD_LIBRARY_PATH. $CC is honoured.
set -euo pipefail
out=${1:?usage: build.sh OUTDIR [LIBDIR]}
libs=${2:-$out}
mkdir -p "$out"
out=$(realpath "$out") libs=$(realpath "$libs")
cd "$(dirname "$0")"
cc=${CC:-gcc}
flags="-std=c11 -O2 -g -Wall -Wextra -Werror -pthread ${VICTIM_CFLAGS:-}"
copier="copier.c options.c parked.c"
jobs=()
# shellcheck disable=SC2086
build() {
    $cc $flags "${@:2}" -o "$out/$1" &
    jobs+=($!)
}
# shellcheck disable=SC2086
{
    build victim-rt $copier api_runtime.c -L"$libs" -lcudart -Wl,--allow-shlib-undefined
    build victim-drv $copier api_driver.c -L"$libs" -lcuda
    build victim-static-rt $copier api_driver.c -DLATE -ldl
    build contract contract.c contract_capture.c contract_context.c contract_copies.c contract_facts.c \
        contract_ends.c contract_memory.c contract_misuse.c contract_order.c contract_streams.c -L"$libs" -lcuda -ldl
    build victim-signals signals.c copying.c options.c api_driver.c -L"$libs" -lcuda
    build victim-odd odd.c copying.c options.c api_driver.c -L"$libs" -lcuda -ldl
    build victim-hostile hostile.c copying.c options.c api_driver.c -L"$libs" -lcuda -ldl
    build victim-own-malloc $copier api_driver.c allocator.c -fno-builtin -L"$libs" -lcuda
    build victim-prologue prologue.c copying.c options.c api_driver.c -L"$libs" -lcuda -ldl
    build victim-mallocs mallocs.c copying.c options.c api_driver.c -L"$libs" -lcuda
    build victim-own-mallocs mallocs.c copying.c options.c api_driver.c -L"$libs" -lcuda -DOWN_ALLOCATOR \
        -fno-builtin-malloc
    build libconfine.so confine.c -shared -fPIC
    build libvariables.so variables.c -shared -fPIC
    build victim-contain contain.c
    build victim-kinds kinds.c -L"$libs" -lcuda
    build libevery.so every.c -DLIBRARY -shared -fPIC -fno-ipa-icf
    build victim-every every.c -ldl
    build victim-crowd crowd.c -ldl
    build victim-jumper jumper.c -rdynamic -fno-omit-frame-pointer
    build victim-launched launched.c -rdynamic -ldl
    build libconstructs.so constructs.c -shared -fPIC
    # One file: the library is linked to when it is there.
    $cc $flags early.c -shared -fPIC -L"$libs" -lcuda -o "$out/libearly.so"
    build victim-early early_main.c -L"$out" -L"$libs" -learly -lcuda
    build victim-nocuda sleeper.c
    build victim-static sleeper.c -static
}
for job in "${jobs[@]}"; do wait "$job"; done
