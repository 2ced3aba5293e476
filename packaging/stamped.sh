#!/bin/sh
# stamped.sh STAMP TITLE COMMAND...: run a command, unless it has passed with the same native sources,
# compiler, options and Makefile before: then say so. The stamp is a hash of them, written after a pass.
set -eu

stamp=$1 title=$2
shift 2
cuda=$(.venv/bin/python packaging/find_cuda_header.py)

now=$({
    printf '%s\n' "$title" "$@" "${CXXFLAGS:-}" "${LDFLAGS:-}" "$(uname -sm)"
    ${CXX:-c++} --version
    # What the build reads, and what the tests run; not the libraries, which tell when they differ.
    find CMakeLists.txt Makefile packaging/find_cuda_header.py phosd "$cuda/cuda.h" -type f \
        \( -name "*.cpp" -o -name "*.h" -o -name "*.def" -o -name "*.map" -o -name "*.cu" \
        -o -name "*.ptx" -o -name "*.sh" -o -name CMakeLists.txt -o -name "*.cmake" \
        -o -name Makefile -o -name find_cuda_header.py \) -exec sha256sum {} + | LC_ALL=C sort
} | sha256sum | cut -d " " -f 1)

if [ "$now" = "$(cat "$stamp" 2>/dev/null)" ]; then
    echo "$title: passed before with these sources (make again: rm $stamp)"
    exit 0
fi
"$@"
echo "$now" >"$stamp"
