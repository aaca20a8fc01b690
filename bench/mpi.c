/* An MPI, measured as `c10d bench -json` measures this library.
 *
 *   mpicc -O2 -o mpi bench/mpi.c
 *   mpirun -n 2 ./mpi -system openmpi -op all_reduce,barrier -sizes 4,1K,64K,1M > openmpi.jsonl
 *
 * Ranks run the operation back to back; an iteration's time is the slowest
 * rank's; the best of the repetitions is kept. Operations are in place where
 * c10d's are. MPI has one form of what c10d has for a list of tensors and for
 * one large tensor, so both names are the same call here. An operation that MPI
 * lacks is left out.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, world;

/* One case: what is called, and on what. */
static struct {
    char *a, *b;       /* the whole buffer, and another of the same length */
    int whole, part;   /* elements: of the whole, and of one rank's part */
    MPI_Datatype type;
    int turn;          /* calls so far, for the root that goes round */
} the;

static void all_reduce(void) { MPI_Allreduce(MPI_IN_PLACE, the.a, the.whole, the.type, MPI_SUM, MPI_COMM_WORLD); }

static void reduce(void) {
    MPI_Reduce(rank ? the.a : MPI_IN_PLACE, the.a, the.whole, the.type, MPI_SUM, 0, MPI_COMM_WORLD);
}

/* The root goes round so that it cannot run ahead. */
static void broadcast(void) { MPI_Bcast(the.a, the.whole, the.type, the.turn++ % world, MPI_COMM_WORLD); }

static void all_gather(void) { MPI_Allgather(the.a, the.part, the.type, the.b, the.part, the.type, MPI_COMM_WORLD); }

static void reduce_scatter(void) {
    MPI_Reduce_scatter_block(the.a, the.b, the.part, the.type, MPI_SUM, MPI_COMM_WORLD);
}

static void all_to_all(void) { MPI_Alltoall(the.a, the.part, the.type, the.b, the.part, the.type, MPI_COMM_WORLD); }

static void gather(void) { MPI_Gather(the.a, the.part, the.type, the.b, the.part, the.type, 0, MPI_COMM_WORLD); }

static void scatter(void) { MPI_Scatter(the.a, the.part, the.type, the.b, the.part, the.type, 0, MPI_COMM_WORLD); }

/* A ping-pong between ranks 0 and 1, of which half is one message. */
static void ping_pong(int from_anybody) {
    int other = from_anybody ? MPI_ANY_SOURCE : 1 - rank;
    if (rank == 0) {
        MPI_Send(the.a, the.whole, the.type, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(the.b, the.whole, the.type, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(the.b, the.whole, the.type, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(the.a, the.whole, the.type, 0, 0, MPI_COMM_WORLD);
    }
}

static void send_recv(void) { ping_pong(0); }
static void recv_any(void) { ping_pong(1); }
static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

/* What a rank's buffer is for the bandwidth, and by what the bus has more: the
 * rules of nccl-tests. */
enum kind { WHOLE, PARTS, NONE };

static const struct operation {
    const char *name;
    void (*call)(void);
    enum kind kind;
    int steps; /* of the operation in one call */
} operations[] = {
    {"all_reduce", all_reduce, WHOLE, 1},
    {"reduce", reduce, WHOLE, 1},
    {"broadcast", broadcast, WHOLE, 1},
    {"all_gather", all_gather, PARTS, 1},
    {"all_gather_into_tensor", all_gather, PARTS, 1},
    {"reduce_scatter", reduce_scatter, PARTS, 1},
    {"reduce_scatter_tensor", reduce_scatter, PARTS, 1},
    {"all_to_all", all_to_all, PARTS, 1},
    {"all_to_all_single", all_to_all, PARTS, 1},
    {"gather", gather, PARTS, 1},
    {"scatter", scatter, PARTS, 1},
    {"send_recv", send_recv, WHOLE, 2},
    {"recv_any", recv_any, WHOLE, 2},
    {"barrier", barrier, NONE, 1},
};

static double bus_factor(const struct operation *op) {
    double shared = (world - 1) / (double)world;
    if (!strcmp(op->name, "all_reduce")) return 2 * shared;
    return op->kind == PARTS ? shared : 1;
}

static void *need(size_t bytes) {
    void *p = calloc(bytes ? bytes : 1, 1);
    if (!p) {
        fprintf(stderr, "mpi: no memory for %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return p;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void quit(const char *what, const char *which) {
    if (rank == 0) fprintf(stderr, "mpi: %s %s\n", what, which);
    MPI_Finalize();
    exit(2);
}

static size_t size_of(const char *text) {
    char *end;
    size_t n = strtoull(text, &end, 10);
    switch (*end) {
    case 'K': case 'k': n <<= 10, end++; break;
    case 'M': case 'm': n <<= 20, end++; break;
    case 'G': case 'g': n <<= 30, end++; break;
    }
    if (end == text || *end) quit("no size:", text);
    return n;
}

struct run {
    const char *system, *dtype;
    double budget;
    int repeat, warmup;
};

static void measure(const struct run *r, const struct operation *op, size_t size) {
    int width;
    MPI_Type_size(the.type, &width);
    the.whole = size / width ? size / width : 1;
    the.part = the.whole / world ? the.whole / world : 1;
    size_t elements = op->kind == PARTS ? (size_t)the.part * world : (size_t)the.whole;
    the.a = need(elements * width);
    the.b = need(elements * width);
    the.turn = 0;

    /* The first calls connect the ranks and map memory; those of a part of the budget tell the time. */
    static const double parts[] = {0.1, 0.2, 1};
    int iters = r->warmup;
    for (int k = 0; k < 3; k++) {
        double start = MPI_Wtime();
        for (int i = 0; i < iters; i++) op->call();
        double each = (MPI_Wtime() - start) / iters;
        double fits = parts[k] * r->budget / (each > 1e-8 ? each : 1e-8);
        int least = k < 2 ? 1 : 10;
        iters = fits < least ? least : fits > 20000 ? 20000 : (int)fits;
        MPI_Bcast(&iters, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }

    double *took = need(iters * sizeof *took), *slowest = need(iters * sizeof *slowest);
    double best = 0, best99 = 0, best_avg = 0, worst = 0;
    for (int k = 0; k < r->repeat; k++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime(), last = begin, wall, longest;
        for (int i = 0; i < iters; i++) {
            op->call();
            double now = MPI_Wtime();
            took[i] = now - last;
            last = now;
        }
        wall = last - begin;
        MPI_Reduce(took, slowest, iters, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        MPI_Reduce(&wall, &longest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank) continue;
        qsort(slowest, iters, sizeof *slowest, ascending);
        double p50 = slowest[iters / 2] * 1e6 / op->steps;
        if (k == 0 || p50 > worst) worst = p50;
        if (k == 0 || p50 < best) {
            best = p50;
            best99 = slowest[iters * 99L / 100] * 1e6 / op->steps;
            best_avg = longest * 1e6 / op->steps / iters;
        }
    }
    if (rank == 0) {
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int n;
        MPI_Get_library_version(version, &n);
        version[strcspn(version, ",\n\t\"\\")] = 0;
        double bytes = op->kind == NONE ? 0 : (double)elements * width, alg = bytes / best / 1e3;
        printf("{\"system\": \"%s\", \"version\": \"%s\", \"op\": \"%s\", \"dtype\": \"%s\", \"size\": %zu, \"world\": %d, "
               "\"bytes\": %.0f, \"iters\": %d, \"repeat\": %d, \"time_us_p50\": %.4f, \"time_us_p99\": %.4f, "
               "\"time_us_avg\": %.4f, \"p50_spread\": %.4f, \"algbw_GBps\": %.6f, \"busbw_GBps\": %.6f}\n",
               r->system, version, op->name, r->dtype, size, world, bytes, iters, r->repeat, best, best99, best_avg,
               worst / best, alg, alg * bus_factor(op));
        fflush(stdout);
    }
    free(took);
    free(slowest);
    free(the.a);
    free(the.b);
}

int main(int argc, char **argv) {
    struct run r = {"mpi", "float32", 0.5, 3, 5};
    char *ops = strdup("all_reduce"), *sizes = strdup("4,1K,64K,1M,16M");
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) quit("no value for", argv[i]);
        char *value = argv[i + 1];
        if (!strcmp(argv[i], "-system")) r.system = value;
        else if (!strcmp(argv[i], "-op")) ops = value;
        else if (!strcmp(argv[i], "-sizes")) sizes = value;
        else if (!strcmp(argv[i], "-dtype")) r.dtype = value;
        else if (!strcmp(argv[i], "-budget")) r.budget = atof(value);
        else if (!strcmp(argv[i], "-repeat")) r.repeat = atoi(value);
        else quit("unknown flag", argv[i]);
    }
    if (r.budget <= 0 || r.repeat < 1) quit("-budget and -repeat", "have to be positive");
    if (!strcmp(r.dtype, "float32")) the.type = MPI_FLOAT;
    else if (!strcmp(r.dtype, "float64")) the.type = MPI_DOUBLE;
    else if (!strcmp(r.dtype, "int32")) the.type = MPI_INT32_T;
    else if (!strcmp(r.dtype, "int64")) the.type = MPI_INT64_T;
    else quit("MPI has no", r.dtype);

    const size_t known = sizeof operations / sizeof *operations;
    for (char *name = strtok(ops, ","), *next; name; name = next) {
        next = strtok(NULL, ",");
        const struct operation *op = operations;
        while (op < operations + known && strcmp(op->name, name)) op++;
        if (op == operations + known) {
            if (rank == 0) fprintf(stderr, "mpi: no %s, left out\n", name);
            continue;
        }
        if (op->kind == NONE) {
            measure(&r, op, 0);
            continue;
        }
        if (op->steps == 2 && world < 2) quit("two ranks are needed for", name);
        /* strtok holds one string at a time. */
        for (char *at = sizes; at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
            char one[32];
            snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
            measure(&r, op, size_of(one));
        }
    }
    MPI_Finalize();
    return 0;
}
