// links.cu says how fast the GPUs of a host copy to and from each other, all at once: what collectives could reach.
//
//	nvcc -O3 -std=c++17 -arch=sm_90 -o links bench/links.cu && ./links
//
// Each of 4 GPUs moves 192 MiB, to one peer or a third of it to each of three. The best of 6 runs counts. It is the
// time until the host sees that the last GPU has ended.
//
//	one peer   each GPU writes to the next one
//	mixed      a warp writes a chunk to each peer in turn
//	phases     a warp writes all to the first peer, then to the second
//	pull       the same by reading
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <utility>
#include <vector>

#define CK(x) do { cudaError_t e = (x); if (e) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1); } } while (0)

enum { Mixed, Phases, PullMixed, PullPhases };

struct P {
  const uint4 *src;
  uint4 *dst[3];
  const uint4 *rem[3];
  int peers;
  size_t bytes, chunk; // for each peer; of a warp at a time
  int mode;
  volatile int *go;
};

// copy moves n bytes by a warp.
template <int U> __device__ void copy(uint4 *d, const uint4 *s, size_t n, int lane) {
  for (size_t o = lane; o < n / 16; o += 32 * U) {
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = s[o + 32 * u];
#pragma unroll
    for (int u = 0; u < U; u++) d[o + 32 * u] = v[u];
  }
}

template <int U> __device__ void move(const P &p, size_t c, int j, int lane) {
  const size_t at = c * p.chunk / 16, mine = at + j * p.bytes / 16;
  if (p.mode >= PullMixed) copy<U>((uint4 *)p.src + mine, p.rem[j] + at, p.chunk, lane);
  else copy<U>(p.dst[j] + at, p.src + mine, p.chunk, lane);
}

template <int U> __global__ void links(P p) {
  if (threadIdx.x == 0) while (!*p.go);
  __syncthreads();
  const int warps = gridDim.x * blockDim.x / 32, w = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
  const size_t chunks = p.bytes / p.chunk;
  if (p.mode & 1) {
    for (int j = 0; j < p.peers; j++)
      for (size_t c = w; c < chunks; c += warps) move<U>(p, c, j, lane);
  } else {
    for (size_t c = w; c < chunks; c += warps)
      for (int j = 0; j < p.peers; j++) move<U>(p, c, j, lane);
  }
}

int main() {
  const int n = 4;
  const size_t part = 64 << 20;
  int there;
  CK(cudaGetDeviceCount(&there));
  if (there < n) {
    printf("%d GPUs, want %d\n", there, n);
    return 1;
  }
  std::vector<char *> in(n), out(n);
  std::vector<cudaStream_t> stream(n);
  std::vector<cudaEvent_t> end(n);
  for (int i = 0; i < n; i++) {
    CK(cudaSetDevice(i));
    for (int j = 0; j < n; j++)
      if (i != j) CK(cudaDeviceEnablePeerAccess(j, 0));
    CK(cudaMalloc(&in[i], 3 * part));
    CK(cudaMalloc(&out[i], 3 * part));
    CK(cudaMemset(in[i], 1, 3 * part));
    CK(cudaStreamCreate(&stream[i]));
    CK(cudaEventCreate(&end[i]));
    CK(cudaDeviceSynchronize());
  }
  int *go;
  CK(cudaHostAlloc(&go, 64, cudaHostAllocPortable | cudaHostAllocMapped));

  auto run = [&](const char *name, int mode, int peers, size_t bytes, size_t chunk, int blocks, int threads, int U) {
    double best = 1e9;
    for (int r = 0; r < 6; r++) {
      *go = 0;
      for (int i = 0; i < n; i++) {
        CK(cudaSetDevice(i));
        P p;
        p.src = (uint4 *)in[i], p.peers = peers, p.bytes = bytes, p.chunk = chunk, p.mode = mode, p.go = go;
        for (int j = 0; j < 3; j++) {
          char *at = out[(i + 1 + j) % n] + (peers == 1 ? 0 : (2 - j) * bytes);
          p.dst[j] = (uint4 *)at, p.rem[j] = (uint4 *)at;
        }
        if (U == 2) links<2><<<blocks, threads, 0, stream[i]>>>(p);
        else links<4><<<blocks, threads, 0, stream[i]>>>(p);
        CK(cudaGetLastError());
        CK(cudaEventRecord(end[i], stream[i]));
      }
      for (volatile int z = 0; z < 300000; z++); // until all kernels wait
      auto begun = std::chrono::steady_clock::now();
      *(volatile int *)go = 1;
      for (int i = 0; i < n; i++) {
        CK(cudaSetDevice(i));
        while (cudaEventQuery(end[i]) == cudaErrorNotReady);
        CK(cudaEventQuery(end[i]));
      }
      best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begun).count());
    }
    printf("%-12s %3d blocks of %3d threads, chunks of %5zu bytes, %d vectors a lane: %7.1f us %6.1f GB/s\n", name, blocks, threads, chunk, U, best,
           peers * bytes / best / 1e3);
    fflush(stdout);
  };
  const std::pair<int, int> shapes[] = {{16, 512}, {32, 512}, {64, 256}, {64, 512}, {128, 256}, {128, 512}};
  for (int U : {2, 4})
    for (auto [blocks, threads] : shapes) {
      const size_t tile = 32 * 16 * U;
      run("one peer", Mixed, 1, 3 * part, tile, blocks, threads, U);
      run("mixed", Mixed, 3, part, tile, blocks, threads, U);
      run("phases", Phases, 3, part, tile, blocks, threads, U);
      run("phases", Phases, 3, part, 16384, blocks, threads, U);
      run("pull mixed", PullMixed, 3, part, tile, blocks, threads, U);
      run("pull phases", PullPhases, 3, part, tile, blocks, threads, U);
    }
}
