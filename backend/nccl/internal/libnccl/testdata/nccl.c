// A library with NCCL's functions that notes how they were called, for a test of the calls alone.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { char b[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga; } config;

static char notes[1 << 16];
static pthread_t group;

static int note(const char *format, ...) {
	size_t n = strlen(notes);
	va_list args;
	va_start(args, format);
	vsnprintf(notes + n, sizeof notes - n, format, args);
	va_end(args);
	return 0;
}

const char *notes_taken(void) { return notes; }
void notes_clear(void) { notes[0] = 0; }

static void note_id(const unique_id *id) { note(" id %d..%d", (unsigned char)id->b[0], (unsigned char)id->b[127]); }
static void note_config(const config *c) {
	note(" config %zu %x %u %d %d;", c->size, c->magic, c->version, c->blocking, c->cga);
}

int ncclGetVersion(int *v) { *v = VERSION; return 0; }
int ncclGetUniqueId(unique_id *id) {
	for (int i = 0; i < 128; i++) id->b[i] = (char)(i + 1);
	return 0;
}
int ncclCommInitRankConfig(void **c, int n, unique_id id, int rank, config *k) {
	*c = (void *)0x1234567890;
	note("config %d %d", n, rank);
	note_id(&id);
	note_config(k);
	return 0;
}
#ifdef SCALABLE
int ncclCommInitRankScalable(void **c, int n, int rank, int ids, unique_id *id, config *k) {
	*c = (void *)0x1234567890;
	note("scalable %d %d", n, rank);
	for (int i = 0; i < ids; i++) note_id(id + i);
	note_config(k);
	return 0;
}
int ncclCommSplit(void *c, int color, int key, void **made, config *k) {
	*made = color < 0 ? 0 : (void *)0x99;
	note("split %p %d %d", c, color, key);
	note_config(k);
	return 0;
}
const char *ncclGetLastError(void *c) { return c ? "the last words" : ""; }
#endif
int ncclCommFinalize(void *c) { return note("finalize %p;", c); }
int ncclCommDestroy(void *c) { return note("destroy %p;", c); }
int ncclCommAbort(void *c) { return note("abort %p;", c); }
int ncclCommGetAsyncError(void *c, int *state) { *state = 6; return note("async %p;", c); }
const char *ncclGetErrorString(int r) { return r == 6 ? "remote process exited" : "other"; }
int ncclGroupStart(void) { group = pthread_self(); return note("start;"); }
int ncclGroupEnd(void) { return note(pthread_equal(group, pthread_self()) ? "end;" : "end on another thread;"); }
int ncclAllReduce(const void *in, void *out, size_t n, int t, int op, void *c, void *s) { return note("allreduce %p %p %zu %d %d %p %p;", in, out, n, t, op, c, s); }
int ncclBroadcast(const void *in, void *out, size_t n, int t, int root, void *c, void *s) { return note("broadcast %p %p %zu %d %d %p %p;", in, out, n, t, root, c, s); }
int ncclReduce(const void *in, void *out, size_t n, int t, int op, int root, void *c, void *s) { return note("reduce %p %p %zu %d %d %d %p %p;", in, out, n, t, op, root, c, s); }
int ncclAllGather(const void *in, void *out, size_t n, int t, void *c, void *s) { return note("allgather %p %p %zu %d %p %p;", in, out, n, t, c, s); }
int ncclReduceScatter(const void *in, void *out, size_t n, int t, int op, void *c, void *s) { return note("reducescatter %p %p %zu %d %d %p %p;", in, out, n, t, op, c, s); }
int ncclSend(const void *p, size_t n, int t, int peer, void *c, void *s) { return note("send %p %zu %d %d %p %p;", p, n, t, peer, c, s); }
int ncclRecv(void *p, size_t n, int t, int peer, void *c, void *s) { return note("recv %p %zu %d %d %p %p;", p, n, t, peer, c, s); }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int t, int residence, void *c) {
	*op = 5;
	return note("premul %g %d %d %p;", *(double *)scalar, t, residence, c);
}
int ncclRedOpDestroy(int op, void *c) { return note("drop %d %p;", op, c); }
