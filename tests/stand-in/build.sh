#!/usr/bin/env bash
# Builds the stand-in: build.sh OUTDIR. $CC and $STANDIN_CFLAGS are honoured.
set -euo pipefail
out=${1:?usage: build.sh OUTDIR}
mkdir -p "$out/endbr" "$out/compares"
out=$(realpath "$out")
cd "$(dirname "$0")"
cc=${CC:-gcc}
driver="copy.c capture.c context.c device.c event.c link.c memory.c stream.c vmm.c"
flags="-std=c11 -O2 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror -pthread
    -fno-omit-frame-pointer -fno-shrink-wrap -Wl,--hash-style=gnu -Wl,-z,defs ${STANDIN_CFLAGS:-}"

# NVIDIA's libcuda needs these by name, so every process that has one has them loaded.
needs="-Wl,--no-as-needed -l:libm.so.6 -l:libdl.so.2 -l:libpthread.so.0 -l:librt.so.1"
# shellcheck disable=SC2086
build_driver() { $cc $flags -fcf-protection="$1" "${@:3}" $driver -Wl,-soname,libcuda.so.1 $needs -o "$2"; }
build_driver none "$out/libcuda.so.1" &
build_driver full "$out/endbr/libcuda.so.1" &
build_driver none "$out/compares/libcuda.so.1" -DSTANDIN_COMPARES &
# shellcheck disable=SC2086
$cc $flags -fcf-protection=none runtime.c -Wl,-soname,libcudart.so.13 -Wl,--version-script=runtime.map \
    -Wl,-rpath,'$ORIGIN' -ldl -o "$out/libcudart.so.13"
wait -n
wait -n
wait -n
ln -sf libcuda.so.1 "$out/libcuda.so"
ln -sf libcudart.so.13 "$out/libcudart.so"
bash check-entries.sh "$out/libcuda.so.1" 554889e5415453
bash check-entries.sh "$out/endbr/libcuda.so.1" f30f1efa554889e5415453
bash check-entries.sh "$out/compares/libcuda.so.1" 833d
bash check-entries.sh "$out/libcudart.so.13" 554889e54157
