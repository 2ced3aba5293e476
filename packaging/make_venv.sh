#!/bin/sh
# make_venv.sh PYTHON VENV: a virtual environment with everything that a checkout needs, and the
# checkout itself in it, in place: Python files are used where they are, nothing is rebuilt.
set -eu

python=$1 venv=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' || "$python" -m venv --clear "$venv"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
"$venv/bin/python" packaging/requirements.py >"$wanted"
"$venv/bin/python" -m pip install --quiet --requirement "$wanted"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation \
    --config-settings=editable.mode=inplace --config-settings=wheel.cmake=false --editable .
