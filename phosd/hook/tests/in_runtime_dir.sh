#!/bin/sh
# Runs a test with a runtime folder of its own, where the hook puts its socket, and with device
# memory of its own.
folder=$(mktemp -d) || exit 1
mkdir -p "$folder/hook/$(id -u)"
PHOS_RUNTIME_DIR=$folder PHOS_SOFTGPU_DIR=$folder/softgpu "$@"
result=$?
rm -rf "$folder"
exit $result
