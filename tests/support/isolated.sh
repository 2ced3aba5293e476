#!/bin/sh
# isolated.sh COMMAND...: run a command in pid, mount, ipc and network namespaces of its own, under an
# init that waits for orphans at once. Programs that are restored under their old pids, and sockets
# whose names hold a pid, then cannot meet those of a shard beside it.
# `isolated.sh --probe`: whether namespaces can be made here.
set -eu

namespaces="--pid --fork --kill-child --mount-proc --ipc --net"
if [ "$1" = --probe ]; then
    # shellcheck disable=SC2086
    exec unshare $namespaces -- ip link set lo up
fi
# Pids begin high: tests make up low ones, which must not be there.
inside='ip link set lo up && echo 20000 >/proc/sys/kernel/ns_last_pid && exec "$@"'
# shellcheck disable=SC2086
exec unshare $namespaces -- sh -c "$inside" sh "$1" "$(dirname "$0")/reaper.py" "$@"
