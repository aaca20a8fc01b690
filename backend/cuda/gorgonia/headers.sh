#!/bin/sh
# Fetches what the module needs to compile and link, from Debian 12's package
# nvidia-cuda-dev (non-free; CUDA 11.8; 774 MB, of which 0.9 are kept):
#
#	./headers.sh DIR
#
# leaves DIR/include/cuda.h and DIR/lib/libcuda.so. The licence is NVIDIA's;
# keep them out of the tree. Needs apt-get, dpkg and Debian's keys. The mirror is
# the machine's own, or DEBIAN_MIRROR.
set -eu
dir=${1:?usage: headers.sh DIR}
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' |
	sed -n 's/^Debian //p' | head -n 1)}
: "${mirror:?no Debian mirror is configured here, or apt-get update was never run: set DEBIAN_MIRROR}"
mkdir -p "$dir/include" "$dir/lib"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/lists/partial" "$tmp/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm non-free" >"$tmp/sources.list"
apt() {
	apt-get -q -oDir::Etc::sourcelist="$tmp/sources.list" -oDir::Etc::sourceparts=- \
		-oDir::State::Lists="$tmp/lists" -oDir::Cache="$tmp/cache" -oAPT::Sandbox::User=root \
		-oAPT::Architecture=amd64 -oAPT::Architectures=amd64 "$@"
}
apt update
(cd "$tmp" && apt download nvidia-cuda-dev)
(cd "$tmp" && dpkg --fsys-tarfile nvidia-cuda-dev_*.deb |
	tar -x ./usr/include/cuda.h ./usr/lib/x86_64-linux-gnu/stubs/libcuda.so)
cp "$tmp/usr/include/cuda.h" "$dir/include/"
cp "$tmp/usr/lib/x86_64-linux-gnu/stubs/libcuda.so" "$dir/lib/"
