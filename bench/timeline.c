// A library that writes down when each kernel of a CUDA program runs. The driver loads it into every
// process that has its file in CUDA_INJECTION64_PATH. bench/timeline.sh compiles and uses it.
//
// Each process writes a file of its process number to the directory KERNELS_DIR, a line a kernel: begin
// and end in ns, device, stream, blocks, threads of a block, registers of a thread, name.
#include <cupti.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static FILE *out;

static void CUPTIAPI wanted(uint8_t **buffer, size_t *size, size_t *records) {
  *size = 1 << 20;
  *buffer = aligned_alloc(8, *size);
  *records = 0;
}

static void CUPTIAPI filled(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  CUpti_Activity *a = NULL;
  while (cuptiActivityGetNextRecord(buffer, valid, &a) == CUPTI_SUCCESS) {
    if (a->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    KERNEL *k = (KERNEL *)a;
    fprintf(out, "%llu %llu %u %u %d %d %d %s\n", (unsigned long long)k->start, (unsigned long long)k->end, k->deviceId, k->streamId, k->gridX, k->blockX,
            (int)k->registersPerThread, k->name);
  }
  fflush(out);
  free(buffer);
}

// A Go program ends without the functions that a C library would have called.
static void *flush(void *unused) {
  for (;;) {
    usleep(100000);
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  }
  return unused;
}

int InitializeInjection(void) {
  char name[4096];
  pthread_t thread;
  const char *dir = getenv("KERNELS_DIR");
  if (dir == NULL) return 1;
  snprintf(name, sizeof name, "%s/%d.txt", dir, getpid());
  if ((out = fopen(name, "w")) == NULL) {
    perror(name);
    return 1;
  }
  cuptiActivityRegisterCallbacks(wanted, filled);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  return pthread_create(&thread, NULL, flush, NULL) == 0;
}
