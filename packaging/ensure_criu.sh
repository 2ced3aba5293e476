#!/bin/sh
# ensure_criu.sh PYTHON: a CRIU that really works here, the system's or one beside it.
# The probe's answer is remembered until the program, the kernel or the boot changes.
set -eu

python=$1
prefix=.criu
as_nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
# CRIU restores another user's program as that user, who cannot execute it in a closed home.
if [ "$(id -u)" = 0 ] && ! as_nobody test -x "$PWD/packaging/ensure_criu.sh"; then
    prefix=/usr/lib/phos/criu
    rm -rf .criu
fi
umask 022
if [ -e "$prefix/criu" ]; then
    "$python" packaging/install_criu.py "$prefix" >/dev/null # a moved checkout needs new paths in it
fi
"$python" -m phosd.engine.criu 2>/dev/null && exit 0
"$python" packaging/install_criu.py "$prefix" >/dev/null
"$python" -m phosd.engine.criu
