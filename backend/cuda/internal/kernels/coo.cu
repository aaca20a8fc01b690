// The kernels that coalesce entries of sparse tensors, which backend/cuda/ptx.sh compiles. coo.go says how they go
// together. Sums are those of tensor.SumSparse, bit for bit.

#define DEVICE __attribute__((device)) static inline
#define KERNEL extern "C" __attribute__((global)) void

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

DEVICE u64 thread() {
  return (u64)__nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
}

DEVICE u64 threads() { return (u64)__nvvm_read_ptx_sreg_nctaid_x() * __nvvm_read_ptx_sreg_ntid_x(); }

#define EACH(i, n) for (u64 i = thread(); i < (n); i += threads())

// key adds a dimension to the row-major numbers of coordinates. It notes a coordinate that is outside.
KERNEL c10d_coo_key(u64 *keys, const u64 *at, u64 *outside, u64 n, u64 size, u64 mark) {
  EACH(i, n) {
    if (at[i] >= size) *outside = mark + i;
    keys[i] = keys[i] * size + at[i];
  }
}

// at takes the last dimension off the keys.
KERNEL c10d_coo_at(u64 *keys, u64 *at, u64 n, u64 size) {
  EACH(i, n) {
    const u64 key = keys[i];
    at[i] = key % size;
    keys[i] = key / size;
  }
}

// merge merges each two runs of width keys. Each key finds its place: after those before it in its own run, and after
// those of the other run that come first. Equal keys keep their order. Without from, entry i has number i.
KERNEL c10d_coo_merge(u64 *sorted, u64 *to, const u64 *keys, const u64 *from, u64 n, u64 width) {
  EACH(i, n) {
    const u64 key = keys[i], run = i / width, second = run & 1;
    const u64 other = (run ^ 1) * width < n ? (run ^ 1) * width : n;
    u64 lo = other, hi = other + width < n ? other + width : n;
    while (lo < hi) {
      const u64 mid = lo + (hi - lo) / 2;
      if (keys[mid] < key || (second && keys[mid] == key)) lo = mid + 1;
      else hi = mid;
    }
    const u64 place = i - second * width + (lo - other);
    sorted[place] = key;
    to[place] = from ? from[i] : i;
  }
}

// first marks the first entry of each key.
KERNEL c10d_coo_first(u64 *marks, const u64 *keys, u64 n) { EACH(i, n) marks[i] = i == 0 || keys[i] != keys[i - 1]; }

// scan does a step of a sum of all marks so far. The steps are 1, 2, 4 and so on.
KERNEL c10d_coo_scan(u64 *sums, const u64 *marks, u64 n, u64 step) {
  EACH(i, n) sums[i] = marks[i] + (i >= step ? marks[i - step] : 0);
}

// unique notes each key once, and where its entries begin. After the last one is n.
KERNEL c10d_coo_unique(u64 *starts, u64 *once, const u64 *keys, const u64 *sums, u64 n) {
  EACH(i, n) {
    const u64 u = sums[i];
    if (i == 0 || sums[i - 1] != u) {
      starts[u - 1] = i;
      once[u - 1] = keys[i];
    }
    if (i + 1 == n) starts[u] = n;
  }
}

template <class To, class From> DEVICE To as(From v) { return __builtin_bit_cast(To, v); }

// What coo.go calls them.
enum { Whole, Float32, Float64, Float16, BFloat16, Bool };

DEVICE u32 shift(u64 v) { return (u32)v << 16; }

// plus adds two elements, which are the lower bits.
DEVICE u64 plus(u64 a, u64 b, u32 kind) {
  switch (kind) {
  case Float32: return as<u32>(as<float>((u32)a) + as<float>((u32)b));
  case Float64: return as<u64>(as<double>(a) + as<double>(b));
  case Float16: return as<u16>((_Float16)((float)as<_Float16>((u16)a) + (float)as<_Float16>((u16)b)));
  case BFloat16: {
    const u32 v = as<u32>(as<float>(shift(a)) + as<float>(shift(b)));
    // To the nearest, ties to even; there is one NaN.
    return (v & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (v + 0x7fff + (v >> 16 & 1)) >> 16;
  }
  case Bool: return a | b;
  }
  return a + b;
}

DEVICE u64 load(const void *p, u64 i, u32 size) {
  return size == 1 ? ((const u8 *)p)[i] : size == 2 ? ((const u16 *)p)[i] : size == 4 ? ((const u32 *)p)[i] : ((const u64 *)p)[i];
}

DEVICE void store(void *p, u64 i, u64 v, u32 size) {
  switch (size) {
  case 1: ((u8 *)p)[i] = (u8)v; break;
  case 2: ((u16 *)p)[i] = (u16)v; break;
  case 4: ((u32 *)p)[i] = (u32)v; break;
  default: ((u64 *)p)[i] = v;
  }
}

// add adds the rows of each key, in the order of its entries. A row has so many elements.
KERNEL c10d_coo_add(void *out, const void *values, const u64 *entries, const u64 *starts, u64 n, u64 row, u32 size, u32 kind) {
  EACH(i, n * row) {
    const u64 u = i / row, k = i % row;
    u64 sum = load(values, entries[starts[u]] * row + k, size);
#pragma unroll 1
    for (u64 e = starts[u] + 1; e < starts[u + 1]; e++) sum = plus(sum, load(values, entries[e] * row + k, size), kind);
    store(out, i, sum, size);
  }
}
