#!/bin/sh
# Makes libraries from the functions that cuda.h declares:
#
#	./stub.sh DIR
#
# leaves DIR/libcuda.so for the linker, and DIR/libcuda.so.1 for programs that run without a
# driver: all functions return CUDA_ERROR_STUB_LIBRARY. Programs linked with it need
# libcuda.so.1, which comes with the driver. DIR/fake/libcuda.so.1 is the driver in software of
# fake.c. Needs a C compiler (CC, or cc).
set -eu
dir=${1:?usage: stub.sh DIR}
here=$(dirname "$0")
cc=${CC:-cc}
mkdir -p "$dir/fake"
"$cc" -E -P -include "$here/cuda.h" -xc /dev/null |
	sed -n 's/^CUresult \(cu[A-Za-z0-9_]*\)(.*/__attribute__((weak)) int \1(void) { return 34; }/p' >"$dir/libcuda.c"
test -s "$dir/libcuda.c"
"$cc" -shared -fPIC -nostdlib -Wl,-soname,libcuda.so.1 -o "$dir/libcuda.so" "$dir/libcuda.c"
ln -sf libcuda.so "$dir/libcuda.so.1"
"$cc" -Wall -Wextra -Werror -O2 -shared -fPIC -pthread -Wl,-soname,libcuda.so.1 -o "$dir/fake/libcuda.so.1" "$here/fake.c" "$dir/libcuda.c"
