#!/bin/sh
# Makes the PTX beside CUDA sources, with Debian's clang-19 and nothing of CUDA's:
#
#	apt-get install clang-19
#	examples/internal/ptx.sh examples/kernel/squares.cu examples/internal/gpumlp/kernels.cu
#
# It is for devices of compute capability 8.0 and later. A multiplication and an
# addition stay two operations, as Go makes them. The first line names the source
# that the rest was made from; tests compare it.
set -eu
for source; do
	{
		echo "// $(basename "$source") has SHA-256 $(sha256sum "$source" | cut -d' ' -f1)"
		"${CLANG:-clang-19}" -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib \
			-O3 -ffp-contract=off -S -o - "$source"
	} >"$source.tmp"
	mv "$source.tmp" "${source%.cu}.ptx"
done
