#!/bin/sh
# make_wheel.sh FOLDER: build phosd's wheel, with the native libraries, in FOLDER. Its tag names the
# oldest C library that the symbols which the libraries need allow: auditwheel reads them.
set -eu

folder=$1
python=.venv/bin/python
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
# The compiler by the name that `make build` calls it by, so that nothing is compiled twice.
CXX=${CXX:-c++} "$python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --config-settings=build-dir=build/wheel --wheel-dir "$fresh" .
mkdir -p "$folder"
rm -f "$folder"/phosd-*.whl
PATH=$PWD/.venv/bin:$PATH "$python" -m auditwheel repair --only-plat --wheel-dir "$folder" "$fresh"/phosd-*.whl
