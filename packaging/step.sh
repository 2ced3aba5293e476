#!/bin/sh
# step.sh TITLE LOG COMMAND...: run a command quietly and print one line; on failure, its output.
title=$1 log=$2
shift 2
mkdir -p "$(dirname "$log")"
begin=$(date +%s)
if "$@" >"$log" 2>&1; then
    echo "$title: done in $(($(date +%s) - begin)) s"
else
    status=$?
    cat "$log"
    echo "$title: FAILED (the output is above, and in $log)" >&2
    exit "$status"
fi
