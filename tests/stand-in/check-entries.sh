#!/usr/bin/env bash
# Checks the machine code of the exported copy functions: check-entries.sh LIBRARY FIRST_BYTES_HEX.
# They must be functions with a size, start with these bytes, and have no branch back into their first 16 bytes.
set -euo pipefail
library=$1 expected=$2
symbols=$(readelf --dyn-syms -W "$library" | awk '$8 ~ /^cu(da)?Memcpy/ {sub(/@.*/, "", $8); print $3, $4, $8}')
[ -n "$symbols" ] || { echo "$library: no copy functions exported" >&2; exit 1; }
while read -r size type name; do
    [ "$type" = FUNC ] && [ "$size" -ge 16 ] || { echo "$library: $name: $type of $size bytes" >&2; exit 1; }
done <<<"$symbols"
objdump -d "$library" | awk -v library="$library" -v expected="$expected" -v names="$(awk '{print $3}' <<<"$symbols")" '
    function finish(   target) {
        if (name == "") return
        seen++
        if (substr(code, 1, length(expected)) != expected) fail("starts with " substr(code, 1, 32))
        for (target in targets) if (target in window) fail("branches back to " target)
    }
    function fail(why) { print library ": " name ": " why > "/dev/stderr"; failed = 1 }
    BEGIN { FS = "\t"; split(names, list, "\n"); for (i in list) wanted[list[i]] = 1; total = length(wanted) }
    /^[0-9a-f]+ </ {
        finish()
        name = $0; sub(/^[^<]*</, "", name); sub(/>:.*/, "", name)
        if (!(name in wanted)) name = ""
        code = ""; split("", window); split("", targets)
        next
    }
    name != "" && NF >= 3 {
        address = $1; gsub(/[ :]/, "", address)
        if (length(code) > 0 && length(code) < 32) window[address] = 1
        bytes = $2; gsub(/ /, "", bytes); code = code bytes
        if ($3 ~ /^(j|call|loop)/) { split($3, words, " "); targets[words[2]] = 1 }
    }
    END { finish(); if (seen != total) { print library ": saw " seen " of " total > "/dev/stderr"; failed = 1 } exit failed }
'
