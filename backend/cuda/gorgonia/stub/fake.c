/* A driver in software for the example: device memory is memory of the process, and each stream is a
 * thread that does its commands in order. It has what sums of contiguous tensors need, no
 * kernels, and one device. stub.sh adds the other functions, which fail. */
#include "cuda.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

typedef struct command {
	enum { COPY, SET, RECORD, WAIT_EVENT, WAIT_VALUE, WRITE_VALUE } kind;
	char *dst;
	const char *src;
	size_t bytes;
	unsigned value, flags;
	CUevent event;
	unsigned long number; /* of the event's record */
	struct command *next;
} command;

struct CUctx_st {
	CUdevice dev;
};

struct CUevent_st {
	unsigned long recorded, passed; /* numbers of records; atomic */
};

struct CUstream_st {
	CUcontext ctx;
	pthread_t thread;
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	command *first, **last;
	int busy, closed;
};

typedef struct memory {
	char *p;
	size_t bytes;
	CUmemorytype type;
	unsigned long id;
	struct memory *next;
} memory;

static pthread_mutex_t memories_mutex = PTHREAD_MUTEX_INITIALIZER;
static memory *memories;
static __thread CUcontext current;
static struct CUctx_st primary;

static CUresult remember(void *p, size_t bytes, CUmemorytype type) {
	static unsigned long ids;
	memory *m = calloc(1, sizeof *m);
	pthread_mutex_lock(&memories_mutex);
	*m = (memory){p, bytes, type, ++ids, memories};
	memories = m;
	pthread_mutex_unlock(&memories_mutex);
	return CUDA_SUCCESS;
}

/* find returns the memory at p, with p's own beginning if exact is set, and takes it out if drop is. */
static int find(const void *p, int exact, int drop, memory *found) {
	int ok = 0;
	pthread_mutex_lock(&memories_mutex);
	for (memory **at = &memories; *at; at = &(*at)->next) {
		memory *m = *at;
		const char *c = p;
		if (exact ? c != m->p : c < m->p || c >= m->p + m->bytes) continue;
		*found = *m;
		ok = 1;
		if (drop) {
			*at = m->next;
			free(m);
		}
		break;
	}
	pthread_mutex_unlock(&memories_mutex);
	return ok;
}

static CUresult reserve(void **p, size_t bytes, CUmemorytype type) {
	if (!current) return CUDA_ERROR_INVALID_CONTEXT;
	if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
	if (posix_memalign(p, 4096, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
	memset(*p, type == CU_MEMORYTYPE_HOST ? 0 : 0xa5, bytes);
	return remember(*p, bytes, type);
}

static CUresult release(void *p, CUmemorytype type) {
	memory m;
	if (!find(p, 1, 1, &m) || m.type != type) return CUDA_ERROR_INVALID_VALUE;
	free(p);
	return CUDA_SUCCESS;
}

static void run(command *c) {
	switch (c->kind) {
	case COPY:
		memmove(c->dst, c->src, c->bytes);
		break;
	case SET:
		memset(c->dst, (int)c->value, c->bytes);
		break;
	case RECORD:
		__atomic_store_n(&c->event->passed, c->number, __ATOMIC_SEQ_CST);
		break;
	case WAIT_EVENT:
		while (__atomic_load_n(&c->event->passed, __ATOMIC_SEQ_CST) < c->number) sched_yield();
		break;
	case WAIT_VALUE: /* flags: 0 is >= as a difference of int32, 1 is ==, 2 is & */
		for (;;) {
			unsigned now = __atomic_load_n((unsigned *)c->dst, __ATOMIC_SEQ_CST);
			if (c->flags == 0 ? (int)(now - c->value) >= 0 : c->flags == 1 ? now == c->value : (now & c->value) != 0) break;
			sched_yield();
		}
		break;
	case WRITE_VALUE:
		__atomic_store_n((unsigned *)c->dst, c->value, __ATOMIC_SEQ_CST);
	}
}

static void *work(void *arg) {
	CUstream s = arg;
	pthread_mutex_lock(&s->mutex);
	for (;;) {
		while (!s->first && !s->closed) pthread_cond_wait(&s->changed, &s->mutex);
		command *c = s->first;
		if (!c) break;
		if (!(s->first = c->next)) s->last = &s->first;
		s->busy = 1;
		pthread_mutex_unlock(&s->mutex);
		run(c);
		free(c);
		pthread_mutex_lock(&s->mutex);
		s->busy = 0;
		pthread_cond_broadcast(&s->changed);
	}
	pthread_mutex_unlock(&s->mutex);
	return NULL;
}

static CUresult give(CUstream s, command c) {
	if (!s) return CUDA_ERROR_NOT_SUPPORTED; /* there is no default stream */
	if (!current) return CUDA_ERROR_INVALID_CONTEXT;
	command *copy = malloc(sizeof *copy);
	*copy = c;
	copy->next = NULL;
	pthread_mutex_lock(&s->mutex);
	*s->last = copy;
	s->last = &copy->next;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->mutex);
	return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
	*version = CUDA_VERSION;
	return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult r, const char **name) {
	*name = r == CUDA_SUCCESS ? "CUDA_SUCCESS" : r == CUDA_ERROR_STUB_LIBRARY ? "CUDA_ERROR_STUB_LIBRARY" : "CUDA_ERROR";
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *dev, int ordinal) {
	*dev = 0;
	return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int *count) {
	*count = 1;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice dev) {
	strncpy(name, "a device in software", room - 1);
	return dev == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) {
	memset(uuid, 1, sizeof *uuid);
	return dev == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice dev) {
	*bytes = (size_t)1 << 30;
	return dev == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute a, CUdevice dev) {
	switch ((int)a) {
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		*value = 1;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value = 8;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
		*value = 1024;
		break;
	default:
		*value = 0;
	}
	return dev == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev) {
	*ctx = &primary;
	return dev == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice dev) { return dev == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }

CUresult cuCtxCreate(CUcontext *ctx, unsigned flags, CUdevice dev) {
	*ctx = current = calloc(1, sizeof **ctx);
	return flags == 0 && dev == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxDestroy(CUcontext ctx) {
	if (!ctx || ctx == &primary) return CUDA_ERROR_INVALID_CONTEXT;
	if (current == ctx) current = NULL;
	free(ctx);
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
	current = ctx;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *ctx) {
	*ctx = current;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
	*least = *greatest = 0;
	return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *available, size_t *total) {
	*available = *total = (size_t)1 << 30;
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *p, size_t bytes) { return reserve((void **)p, bytes, CU_MEMORYTYPE_DEVICE); }

CUresult cuMemFree(CUdeviceptr p) { return release((void *)p, CU_MEMORYTYPE_DEVICE); }

CUresult cuMemHostAlloc(void **p, size_t bytes, unsigned flags) {
	return flags & CU_MEMHOSTALLOC_PORTABLE ? reserve(p, bytes, CU_MEMORYTYPE_HOST) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFreeHost(void *p) { return release(p, CU_MEMORYTYPE_HOST); }

CUresult cuMemHostRegister(void *p, size_t bytes, unsigned flags) {
	return flags & CU_MEMHOSTREGISTER_PORTABLE ? remember(p, bytes, CU_MEMORYTYPE_HOST) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostUnregister(void *p) {
	memory m;
	return find(p, 1, 1, &m) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *p, unsigned flags) {
	memory m;
	*device = (CUdeviceptr)p;
	return flags == 0 && find(p, 0, 0, &m) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
	memory m;
	if (!find((void *)p, 0, 0, &m)) return CUDA_ERROR_NOT_FOUND;
	*base = (CUdeviceptr)m.p;
	*size = m.bytes;
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute a, CUdeviceptr p) {
	memory m;
	if (!find((void *)p, 0, 0, &m)) return CUDA_ERROR_INVALID_VALUE;
	switch ((int)a) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned *)value = m.type;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long *)value = m.id;
		return CUDA_SUCCESS;
	case 9: /* the device's ordinal */
		*(int *)value = 0;
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuStreamCreateWithPriority(CUstream *s, unsigned flags, int priority) {
	if (!current) return CUDA_ERROR_INVALID_CONTEXT;
	if (flags != CU_STREAM_NON_BLOCKING || priority) return CUDA_ERROR_NOT_SUPPORTED;
	*s = calloc(1, sizeof **s);
	(*s)->ctx = current;
	(*s)->last = &(*s)->first;
	pthread_mutex_init(&(*s)->mutex, NULL);
	pthread_cond_init(&(*s)->changed, NULL);
	return pthread_create(&(*s)->thread, NULL, work, *s) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *s, unsigned flags) { return cuStreamCreateWithPriority(s, flags, 0); }

CUresult cuStreamDestroy(CUstream s) {
	pthread_mutex_lock(&s->mutex);
	s->closed = 1;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->mutex);
	pthread_join(s->thread, NULL);
	free(s);
	return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream s, CUcontext *ctx) {
	*ctx = s ? s->ctx : current;
	return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream s) {
	pthread_mutex_lock(&s->mutex);
	int idle = !s->first && !s->busy;
	pthread_mutex_unlock(&s->mutex);
	return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream s) {
	pthread_mutex_lock(&s->mutex);
	while (s->first || s->busy) pthread_cond_wait(&s->changed, &s->mutex);
	pthread_mutex_unlock(&s->mutex);
	return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) {
	*status = CU_STREAM_CAPTURE_STATUS_NONE; /* there are no graphs */
	return s ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) {
	if (flags) return CUDA_ERROR_INVALID_VALUE;
	return give(s, (command){.kind = WAIT_EVENT, .event = e, .number = __atomic_load_n(&e->recorded, __ATOMIC_SEQ_CST)});
}

CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t value, unsigned flags) {
	if (flags > 2) return CUDA_ERROR_NOT_SUPPORTED;
	return give(s, (command){.kind = WAIT_VALUE, .dst = (char *)p, .value = value, .flags = flags});
}

CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t value, unsigned flags) {
	if (flags) return CUDA_ERROR_NOT_SUPPORTED;
	return give(s, (command){.kind = WRITE_VALUE, .dst = (char *)p, .value = value});
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream s) {
	return give(s, (command){.kind = COPY, .dst = (char *)dst, .src = (char *)src, .bytes = bytes});
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream s) {
	return give(s, (command){.kind = COPY, .dst = (char *)dst, .src = src, .bytes = bytes});
}

CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream s) {
	return give(s, (command){.kind = COPY, .dst = dst, .src = (char *)src, .bytes = bytes});
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t n, CUstream s) {
	return give(s, (command){.kind = SET, .dst = (char *)dst, .value = value, .bytes = n});
}

CUresult cuEventCreate(CUevent *e, unsigned flags) {
	(void)flags;
	*e = calloc(1, sizeof **e);
	return *e ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Commands may still refer to the event: it is never freed. */
CUresult cuEventDestroy(CUevent e) { return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

CUresult cuEventRecord(CUevent e, CUstream s) {
	return give(s, (command){.kind = RECORD, .event = e, .number = __atomic_add_fetch(&e->recorded, 1, __ATOMIC_SEQ_CST)});
}

CUresult cuEventQuery(CUevent e) {
	unsigned long recorded = __atomic_load_n(&e->recorded, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&e->passed, __ATOMIC_SEQ_CST) >= recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent e) {
	while (cuEventQuery(e) == CUDA_ERROR_NOT_READY) sched_yield();
	return CUDA_SUCCESS;
}
