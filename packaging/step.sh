#!/bin/sh
# step.sh TITLE LOG COMMAND...: run a command quietly and print one line; on failure, its output.
# With - for LOG its output is shown as it comes. What each step took is noted in build/logs/steps.
title=$1 log=$2
shift 2
note() {
    took=$(($(date +%s) - begin))
    printf '%s\t%s\n' "$title" "$took" >>build/logs/steps
}
mkdir -p build/logs
begin=$(date +%s)
if [ "$log" = - ]; then
    "$@"
    status=$?
    note
    exit "$status"
fi
mkdir -p "$(dirname "$log")"
if "$@" >"$log" 2>&1; then
    note
    echo "$title: done in $took s"
else
    status=$?
    cat "$log"
    echo "$title: FAILED (the output is above, and in $log)" >&2
    exit "$status"
fi
