#!/bin/sh
# curl, wget, or gron (Go's own client), named first, asks for each address after it with what the environment says.
# Prints a line for each: `answered ADDRESS BODY` or `failed ADDRESS REASON`.
by_curl() { curl --silent --show-error --fail-with-body --max-time 20 "$1"; }
by_gron() { gron --monochrome "$1"; }
by_wget() { wget --no-verbose --tries=1 --timeout=20 --output-document=- "$1"; }

client=$1
shift
for url in "$@"; do
    if said=$("by_$client" "$url" 2>&1); then result=answered; else result=failed; fi
    printf '%s %s %s\n' "$result" "$url" "$(printf %s "$said" | tr '\n' ' ')"
done
