#!/bin/sh
# Writes what makes a test program of backend/cuda with this driver in place of its own:
#
#	./workspace.sh DIR
#
# leaves DIR/go.work, in which the core may use this module, and DIR/overlay.json, which
# has testdata/gpu_driver_test.go stand for the core's file of that name.
set -eu
dir=${1:?usage: workspace.sh DIR}
here=$(pwd)
core=$(cd ../../.. && pwd)
printf 'go %s\n\nuse (\n\t%s\n\t%s\n)\n' "$(sed -n 's/^go //p' go.mod)" "$core" "$here" >"$dir/go.work"
printf '{"Replace": {"%s": "%s"}}\n' "$core/backend/cuda/gpu_driver_test.go" "$here/testdata/gpu_driver_test.go" >"$dir/overlay.json"
