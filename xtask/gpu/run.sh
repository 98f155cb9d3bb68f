#!/usr/bin/env bash
# Runs in the bundle that `cargo xtask gpu` makes, on a machine with an NVIDIA GPU, as root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$here/cmt" doctor
