#!/bin/sh
# Makes a library for the linker from the functions that cuda.h declares:
#
#	./stub.sh DIR
#
# leaves DIR/libcuda.so, and DIR/libcuda.so.1 for programs that run without a driver. Programs
# linked with it need libcuda.so.1, which comes with the driver. Its functions return
# CUDA_ERROR_STUB_LIBRARY. Needs a C compiler (CC, or cc).
set -eu
dir=${1:?usage: stub.sh DIR}
here=$(dirname "$0")
cc=${CC:-cc}
mkdir -p "$dir"
"$cc" -E -P -include "$here/cuda.h" -xc /dev/null |
	sed -n 's/^CUresult \(cu[A-Za-z0-9_]*\)(.*/int \1(void) { return 34; }/p' >"$dir/libcuda.c"
test -s "$dir/libcuda.c"
"$cc" -shared -fPIC -nostdlib -Wl,-soname,libcuda.so.1 -o "$dir/libcuda.so" "$dir/libcuda.c"
ln -sf libcuda.so "$dir/libcuda.so.1"
