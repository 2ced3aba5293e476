#!/bin/sh
# Runs a test with a runtime folder of its own, where the hook puts its socket.
folder=$(mktemp -d) || exit 1
mkdir "$folder/hook"
PHOS_RUNTIME_DIR=$folder "$@"
result=$?
rm -rf "$folder"
exit $result
