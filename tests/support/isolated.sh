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

if [ "$1" = --inside ]; then # the second half, in the namespaces
    shift
    ip link set lo up
    echo 20000 >/proc/sys/kernel/ns_last_pid # high: tests make up low ones, which must not be there
    # Tests take other users' rights, who must get to the checkout: a closed folder on its way, such
    # as root's home, is covered by one that is open and has nothing but the checkout.
    checkout=$(cd "$(dirname "$0")/../.." && pwd)
    closed='' folder=$checkout
    while [ "$folder" != / ]; do
        folder=$(dirname "$folder")
        case $(stat --format %A "$folder") in
            *[xt]) ;;
            *) closed=$folder ;;
        esac
    done
    if [ -n "$closed" ]; then
        kept=$(mktemp --directory)
        mount --bind "$checkout" "$kept"
        mount -t tmpfs -o mode=755 open "$closed"
        mkdir -p "$checkout"
        mount --move "$kept" "$checkout"
        rmdir "$kept"
        cd "$checkout"
    fi
    exec "$@"
fi
# shellcheck disable=SC2086
exec unshare $namespaces -- "$0" --inside "$1" "$(dirname "$0")/reaper.py" "$@"
