/* The floor of an all_reduce in shared memory: what processes that do nothing else take for it.
 *
 *   gcc -O3 -static -o floor bench/floor.c
 *   ./floor -ranks 2,4,8 -sizes 64K,1M,16M
 *
 * Ranks are processes over one memfd, as this library's are. All sum float32s, in place: rank r
 * reduces slice r of all buffers in its own, and copies the other slices from where they were
 * reduced. With "shared" the buffers lie in the memfd, as those of Alloc do. With "copied" they do
 * not, and each rank copies its buffer in first. The time of an iteration is that of its slowest
 * rank. A row has the best of the variants: slices with a barrier before the copies (0), the same
 * with prefetches (1), or sub-slices of 16 KiB with flags instead of that barrier (2), each with the
 * ranks where the kernel puts them and, if there are enough CPUs, on a CPU each. -all prints each
 * variant.
 *
 * -gaps measures something else: how often the machine interrupts a process. Each rank reads the clock
 * for a second, and prints how many gaps of how many us there were between two readings.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 8, ITERS = 4000, HUGE = 2 << 20, SUB = 16 << 10, VARIANTS = 3 };

struct line {
    _Alignas(128) _Atomic long v;
};

/* What the ranks share, before their buffers. */
struct shared {
    struct line in[MOST], reduced[MOST];
    double took[MOST][ITERS];
};

static struct shared *the;
static char *area;    /* of the buffers: one for each rank, and a copy */
static size_t room;   /* bytes of a buffer, whole huge pages */
static int ranks, rank;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* A rank polls for some microseconds and then lets others run: there may be more ranks than CPUs. */
static void reach(_Atomic long *w, long v) {
    for (int n = 0; atomic_load_explicit(w, memory_order_acquire) < v; n++) {
        if (n < 200) _mm_pause();
        else sched_yield();
    }
}

static void barrier(long e) {
    atomic_store_explicit(&the->in[rank].v, e, memory_order_release);
    for (int q = 1; q < ranks; q++) reach(&the->in[(rank + q) % ranks].v, e);
}

#define SUMS(NAME, TARGET, VECTOR, WIDTH, LOAD, ADD, STORE)                                                        \
    __attribute__((target(TARGET))) static void NAME(float *d, float **s, size_t n, int p, int ahead) {            \
        for (size_t i = 0; i < n; i += WIDTH) {                                                                    \
            if (ahead)                                                                                             \
                for (int q = 0; q < p; q++) _mm_prefetch((char *)(s[q] + i + 128), _MM_HINT_T0);                   \
            VECTOR a = LOAD(s[0] + i);                                                                             \
            for (int q = 1; q < p; q++) a = ADD(a, LOAD(s[q] + i));                                                \
            STORE(d + i, a);                                                                                       \
        }                                                                                                          \
    }
SUMS(sum512, "avx512f", __m512, 16, _mm512_loadu_ps, _mm512_add_ps, _mm512_storeu_ps)
SUMS(sum256, "avx2", __m256, 8, _mm256_loadu_ps, _mm256_add_ps, _mm256_storeu_ps)
static void sum(char *d, char **s, size_t bytes, int ahead) {
    static int wide = -1;
    if (wide < 0) wide = __builtin_cpu_supports("avx512f") != 0;
    if (wide) sum512((float *)d, (float **)s, bytes / 4, ranks, ahead);
    else sum256((float *)d, (float **)s, bytes / 4, ranks, ahead);
}

static char *buffer(int r) { return area + r * room; }

/* One all_reduce of n bytes of own, which is this rank's buffer or, if not shared, other memory. */
static void all_reduce(char *own, size_t n, int variant, long *epoch, long *subs) {
    char *mine = buffer(rank), *s[MOST];
    size_t slice = n / ranks, sub = variant == 2 && slice % SUB == 0 ? SUB : slice;
    if (own != mine) memcpy(mine, own, n);
    barrier(++*epoch);
    for (size_t at = 0; at < slice + sub; at += sub) {
        if (at < slice) {
            for (int q = 0; q < ranks; q++) s[q] = buffer((rank + q) % ranks) + rank * slice + at;
            sum(mine + rank * slice + at, s, sub, variant > 0);
            ++*subs;
            atomic_store_explicit(&the->reduced[rank].v, *subs, memory_order_release);
        }
        if (at == 0) continue;
        long have = at < slice ? *subs - 1 : *subs;
        for (int q = own == mine; q < ranks; q++) {
            int o = (rank + q) % ranks;
            reach(&the->reduced[o].v, have);
            memcpy(own + o * slice + at - sub, buffer(o) + o * slice + at - sub, sub);
        }
    }
    barrier(++*epoch);
}

static void be_rank(size_t n, int iters, int variant, int staged, int pin) {
    if (pin) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(rank, &one);
        sched_setaffinity(0, sizeof one, &one);
    }
    char *own = buffer(rank);
    memset(own, 1, n);
    if (staged) {
        own = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(own, 1, n);
    }
    long epoch = 0, subs = 0;
    barrier(++epoch);
    for (int i = -5; i < iters; i++) {
        double begin = now();
        all_reduce(own, n, variant, &epoch, &subs);
        if (i >= 0) the->took[rank][i] = now() - begin;
    }
    _exit(0);
}

static int ascending(const void *a, const void *b) {
    double d = *(double *)a - *(double *)b;
    return d < 0 ? -1 : d > 0;
}

static double measure(size_t n, int iters, int variant, int staged, int pin, double *p99) {
    memset(the, 0, sizeof *the);
    for (rank = 0; rank < ranks; rank++)
        if (fork() == 0) be_rank(n, iters, variant, staged, pin);
    for (int r = 0, status; r < ranks; r++)
        if (wait(&status) < 0 || status) exit(1);
    static double slowest[ITERS];
    for (int i = 0; i < iters; i++) {
        slowest[i] = 0;
        for (int r = 0; r < ranks; r++)
            if (the->took[r][i] > slowest[i]) slowest[i] = the->took[r][i];
    }
    qsort(slowest, iters, sizeof *slowest, ascending);
    *p99 = slowest[iters * 99 / 100];
    return slowest[iters / 2];
}

static void gaps(void) {
    for (rank = 0; rank < ranks; rank++) {
        if (fork()) continue;
        const double ends[] = {1, 4, 8, 16, 1e9};
        int n[4] = {0};
        for (double begin = now(), last = begin, t; (t = now()) < begin + 1e6; last = t)
            for (int k = 0; k < 4; k++)
                if (t - last >= ends[k] && t - last < ends[k + 1]) n[k]++;
        printf("rank %d: gaps of 1 to 4 us: %d, 4 to 8: %d, 8 to 16: %d, longer: %d\n", rank, n[0], n[1], n[2], n[3]);
        fflush(stdout);
        _exit(0);
    }
    while (wait(NULL) > 0) {}
}

static size_t size_of(const char *s) {
    char *end;
    size_t n = strtoull(s, &end, 10);
    return *end == 'K' ? n << 10 : *end == 'M' ? n << 20 : n;
}

int main(int argc, char **argv) {
    const char *worlds = "2,4,8", *sizes = "64K,1M,16M";
    int all = 0, only_gaps = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-all")) all = 1;
        else if (!strcmp(argv[i], "-gaps")) only_gaps = 1;
        else if (i + 1 < argc && !strcmp(argv[i], "-ranks")) worlds = argv[++i];
        else if (i + 1 < argc && !strcmp(argv[i], "-sizes")) sizes = argv[++i];
        else return fprintf(stderr, "usage: floor [-all | -gaps] [-ranks 2,4,8] [-sizes 64K,1M,16M]\n"), 2;
    }
    for (const char *w = worlds; w; w = strchr(w, ','), w = w ? w + 1 : w) {
        ranks = atoi(w);
        if (ranks < 2 || ranks > MOST) return fprintf(stderr, "floor: %d ranks, want 2 to %d\n", ranks, MOST), 2;
        if (only_gaps) {
            gaps();
            continue;
        }
        for (const char *s = sizes; s; s = strchr(s, ','), s = s ? s + 1 : s) {
            size_t n = size_of(s), unit = (size_t)64 * ranks;
            n = (n + unit - 1) / unit * unit;
            room = (n + HUGE - 1) / HUGE * HUGE;
            size_t head = (sizeof(struct shared) + HUGE - 1) / HUGE * HUGE, bytes = head + ranks * room;
            int fd = memfd_create("floor", 0);
            char *m = fd < 0 || ftruncate(fd, bytes) ? MAP_FAILED : mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (m == MAP_FAILED) return perror("floor: memfd"), 1;
            madvise(m, bytes, MADV_HUGEPAGE);
            the = (struct shared *)m, area = m + head;
            int iters = n > (4 << 20) ? 20 : n > (256 << 10) ? 200 : n > (4 << 10) ? 1000 : ITERS;
            for (int staged = 0; staged < 2; staged++) {
                double best = 0, best99 = 0;
                int pins = ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? 2 : 1;
                for (int k = 0; k < VARIANTS * pins; k++) {
                    int v = k % VARIANTS, pin = k / VARIANTS;
                    double p99, p50 = measure(n, iters, v, staged, pin, &p99);
                    if (all) printf("ranks %d bytes %zu %s variant %d pinned %d p50 %.1f p99 %.1f\n", ranks, n, staged ? "copied" : "shared", v, pin, p50, p99);
                    if (k == 0 || p50 < best) best = p50, best99 = p99;
                }
                printf("{\"system\": \"floor-%s\", \"op\": \"all_reduce\", \"dtype\": \"float32\", \"size\": %zu, \"world\": %d, \"bytes\": %zu, \"time_us_p50\": %.2f, \"time_us_p99\": %.2f}\n",
                       staged ? "copied" : "shared", size_of(s), ranks, n, best, best99);
                fflush(stdout);
            }
            munmap(m, bytes);
            close(fd);
        }
    }
    return 0;
}
