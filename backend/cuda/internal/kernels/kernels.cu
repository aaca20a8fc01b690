// The kernels of the works on device memory, which backend/cuda/ptx.sh compiles.
//
// Every loop is over the whole grid, so that a launch of any shape does the
// work. Arithmetic is that of package internal/reduce, bit for bit, but for the
// payload of a NaN: narrow floats are widened to float, and rounded once after
// each step.

#define DEVICE __attribute__((device)) static inline
#define KERNEL extern "C" __attribute__((global)) void

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

DEVICE u64 thread() {
  return (u64)__nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
}

DEVICE u64 threads() { return (u64)__nvvm_read_ptx_sreg_nctaid_x() * __nvvm_read_ptx_sreg_ntid_x(); }

// float16 and bfloat16 as bits: what the host makes of them does not depend on
// what the compiler knows of such types.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

DEVICE u32 bitsOf(float f) { return __builtin_bit_cast(u32, f); }

DEVICE float wide(float v) { return v; }
DEVICE double wide(double v) { return v; }
DEVICE float wide(f16 v) { return (float)__builtin_bit_cast(_Float16, v.bits); }
DEVICE float wide(bf16 v) { return __builtin_bit_cast(float, (u32)v.bits << 16); }

DEVICE void narrow(float &to, float v) { to = v; }
DEVICE void narrow(double &to, double v) { to = v; }
DEVICE void narrow(f16 &to, float v) { to.bits = __builtin_bit_cast(u16, (_Float16)v); }
DEVICE void narrow(bf16 &to, float v) {
  u32 b = bitsOf(v);
  // To the nearest, ties to even; there is one NaN.
  to.bits = (b & 0x7fffffff) > 0x7f800000 ? (u16)0x7fc0 : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// Whole numbers wrap: signed ones are added as unsigned.
template <class T> struct Unsigned;
template <> struct Unsigned<i8> { typedef u8 type; };
template <> struct Unsigned<u8> { typedef u8 type; };
template <> struct Unsigned<i32> { typedef u32 type; };
template <> struct Unsigned<i64> { typedef u64 type; };

template <class T> struct Integer {
  typedef typename Unsigned<T>::type U;
  static const bool whole = true;
  DEVICE T sum(T a, T b) { return (T)(U)((U)a + (U)b); }
  DEVICE T product(T a, T b) { return (T)(U)((U)a * (U)b); }
  DEVICE T min(T a, T b) { return b < a ? b : a; }
  DEVICE T max(T a, T b) { return a < b ? b : a; }
};

// Min and max keep the first where a comparison with NaN decides nothing.
template <class T> struct Float {
  static const bool whole = false;
  DEVICE T sum(T a, T b) { T r; narrow(r, wide(a) + wide(b)); return r; }
  DEVICE T product(T a, T b) { T r; narrow(r, wide(a) * wide(b)); return r; }
  DEVICE T min(T a, T b) { return wide(b) < wide(a) ? b : a; }
  DEVICE T max(T a, T b) { return wide(a) < wide(b) ? b : a; }
};

// Operators, as kernels.go numbers them.
enum { Sum, Product, Min, Max, BAnd, BOr, BXor };

// combine does into[i] = into[i] op from[i]. It is for several tensors of a rank, which are seldom, so it has one
// form for all.
template <class T, class Math> DEVICE void combine(T *into, const T *from, u64 n, u32 op) {
  for (u64 i = thread(); i < n; i += threads()) {
    T a = into[i], b = from[i];
    switch (op) {
    case Sum: a = Math::sum(a, b); break;
    case Product: a = Math::product(a, b); break;
    case Min: a = Math::min(a, b); break;
    case Max: a = Math::max(a, b); break;
    default:
      if constexpr (Math::whole) a = op == BAnd ? a & b : op == BOr ? a | b : a ^ b;
    }
    into[i] = a;
  }
}

#define COMBINE(name, T, Math) \
  KERNEL c10d_combine_##name(T *into, const T *from, u64 n, u32 op) { combine<T, Math<T>>(into, from, n, op); }

COMBINE(float32, float, Float)
COMBINE(float64, double, Float)
COMBINE(float16, f16, Float)
COMBINE(bfloat16, bf16, Float)
COMBINE(int8, i8, Integer)
COMBINE(uint8, u8, Integer)
COMBINE(int32, i32, Integer)
COMBINE(int64, i64, Integer)

// cast does out[i] = a[i], rounded to float32 on the way.
#define CAST(toName, To, fromName, From)                                      \
  KERNEL c10d_cast_##toName##_##fromName(To *out, const From *a, u64 n) {     \
    const u64 each = 16 / (sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From)); \
    u64 done = 0;                                                             \
    if ((((u64)out | (u64)a) & 15) == 0) {                                    \
      typedef struct alignas(16) { To v[each]; } Out;                         \
      typedef struct alignas(16) { From v[each]; } In;                        \
      u64 packs = n / each;                                                   \
      for (u64 i = thread(); i < packs; i += threads()) {                     \
        In x = ((const In *)a)[i];                                            \
        Out y;                                                                \
        _Pragma("unroll") for (u32 k = 0; k < each; k++) narrow(y.v[k], (float)wide(x.v[k])); \
        ((Out *)out)[i] = y;                                                  \
      }                                                                       \
      done = packs * each;                                                    \
    }                                                                         \
    for (u64 i = done + thread(); i < n; i += threads()) narrow(out[i], (float)wide(a[i])); \
  }

#define CASTS(toName, To, fromName, From) \
  CAST(toName, To, fromName, From)        \
  CAST(fromName, From, toName, To)

CASTS(float16, f16, float32, float)
CASTS(bfloat16, bf16, float32, float)
CASTS(float32, float, float64, double)
CASTS(float16, f16, float64, double)
CASTS(bfloat16, bf16, float64, double)

// c10d_copy does out[i] = push[i] = a[i] for n bytes. One of out and push may be
// null.
KERNEL c10d_copy(u8 *out, u8 *push, const u8 *a, u64 n) {
  typedef u32 Words __attribute__((ext_vector_type(4)));
  u64 done = 0;
  if ((((u64)out | (u64)push | (u64)a) & 15) == 0) {
    u64 packs = n / 16;
    for (u64 i = thread(); i < packs; i += threads()) {
      Words x = ((const Words *)a)[i];
      if (out) ((Words *)out)[i] = x;
      if (push) ((Words *)push)[i] = x;
    }
    done = packs * 16;
  }
  for (u64 i = done + thread(); i < n; i += threads()) {
    u8 x = a[i];
    if (out) out[i] = x;
    if (push) push[i] = x;
  }
}

// Layout is how elements lie in memory: strides in elements, which may be
// negative, of the last dimensions. Those before have a shape of 1.
struct Layout {
  u64 n;
  u64 size; // of an element, in bytes: 1, 2, 4 or 8
  u64 shape[8];
  i64 stride[8];
};

DEVICE i64 place(const Layout &l, u64 i) {
  i64 at = 0;
  for (int d = 7; d >= 0; d--) {
    at += (i64)(i % l.shape[d]) * l.stride[d];
    i /= l.shape[d];
  }
  return at;
}

template <class T> DEVICE void gather(void *packed, void *spread, const Layout &l, bool back) {
  for (u64 i = thread(); i < l.n; i += threads()) {
    T &p = ((T *)packed)[i], &s = ((T *)spread)[place(l, i)];
    if (back) s = p; else p = s;
  }
}

DEVICE void gatherSize(void *packed, void *spread, const Layout &l, bool back) {
  switch (l.size) {
  case 1: gather<u8>(packed, spread, l, back); break;
  case 2: gather<u16>(packed, spread, l, back); break;
  case 4: gather<u32>(packed, spread, l, back); break;
  case 8: gather<u64>(packed, spread, l, back); break;
  }
}

// c10d_pack brings elements in row-major order, c10d_unpack puts them back.
// Spread is the address of the element whose indices are all 0.
KERNEL c10d_pack(void *packed, void *spread, Layout l) { gatherSize(packed, spread, l, false); }
KERNEL c10d_unpack(void *packed, void *spread, Layout l) { gatherSize(packed, spread, l, true); }

// Words order a kernel against the host, which sees what was stored before a word
// once it sees the word, and the other way round.
DEVICE u32 load(const u32 *p) {
  u32 v;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

DEVICE void store(u32 *p, u32 v) { asm volatile("st.release.sys.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory"); }

DEVICE void barrier() { asm volatile("bar.sync 0;" : : : "memory"); }

// move copies n values with all threads of the block. Each loads several before it
// stores any: what comes from the host takes a microsecond.
template <class T> DEVICE void move(T *to, const T *from, u64 n) {
  const u64 each = 4, width = __nvvm_read_ptx_sreg_ntid_x();
  for (u64 i = __nvvm_read_ptx_sreg_tid_x(); i < n; i += each * width) {
    T v[each];
    _Pragma("unroll") for (u64 k = 0; k < each; k++) if (i + k * width < n) v[k] = from[i + k * width];
    _Pragma("unroll") for (u64 k = 0; k < each; k++) if (i + k * width < n) to[i + k * width] = v[k];
  }
}

DEVICE void moveBytes(u8 *to, const u8 *from, u64 n) {
  typedef u32 Words __attribute__((ext_vector_type(4)));
  u64 all = (u64)to | (u64)from, done = 0;
  if ((all & 15) == 0) {
    done = n & ~15ull;
    move((Words *)to, (const Words *)from, n / 16);
  } else if ((all & 3) == 0) {
    done = n & ~3ull;
    move((u32 *)to, (const u32 *)from, n / 4);
  }
  move(to + done, from + done, n - done);
}

DEVICE u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// c10d_exchange gives the host n bytes at x, in memory at in, says so in the word
// arrived, waits until the word release has come to count, takes the bytes at out instead,
// and says so in the word taken. After limit nanoseconds it ends without them. It is one block.
__attribute__((launch_bounds(512)))
KERNEL c10d_exchange(u8 *x, u8 *in, u8 *out, u64 n, u32 *arrived, u32 *release, u32 *taken, u32 count, u64 limit) {
  bool first = __nvvm_read_ptx_sreg_tid_x() == 0, late = false;
  moveBytes(in, x, n);
  barrier();
  if (first) {
    store(arrived, count);
    u64 since = now();
    for (u32 polls = 1; (i32)(load(release) - count) < 0 && !late; polls++) late = polls % 256 == 0 && now() - since > limit;
  }
  if (__nvvm_bar0_or(late)) return;
  moveBytes(x, out, n);
  barrier();
  if (first) store(taken, count);
}
