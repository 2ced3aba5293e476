#!/bin/sh
# ensure_criu.sh PYTHON: a CRIU that really works here, the system's or one of the checkout's own.
# The probe's answer is remembered until the program, the kernel or the boot changes.
set -eu

python=$1
if [ -e .criu/criu ]; then
    "$python" packaging/install_criu.py .criu >/dev/null # a moved checkout needs new paths in it
fi
"$python" -m phosd.engine.criu 2>/dev/null && exit 0
"$python" packaging/install_criu.py .criu >/dev/null
"$python" -m phosd.engine.criu
