// The kernels of package direct, which backend/cuda/ptx.sh compiles.
//
// A warp is a channel. It has a ring of slots in the memory of every peer, into
// which it pushes its tiles, and a ring for every peer in its own memory, from
// which it takes theirs. A free slot holds nothing but ones. Data is its own
// flag: a tile has come when no word of it is all ones any more, and who takes it
// fills the slot with ones again. doc.go has the rules and says why they hold.
//
// Arithmetic is that of package internal/reduce, bit for bit, but for the payload
// of a NaN: narrow floats are widened to float, and rounded once after each step.

#define DEVICE __attribute__((device, always_inline)) static inline
#define METHOD __attribute__((device, always_inline)) // of a structure that has values
// What is seldom done stays out of the kernels: they are read from memory at every launch.
#define OUTLINE __attribute__((device, noinline)) static
#define KERNEL extern "C" __attribute__((global, launch_bounds(512, 1))) void

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

// Vec is 16 bytes, what a lane moves at once.
typedef u32 Vec __attribute__((ext_vector_type(4)));

// Free is a word of a slot that holds no data.
static const u32 Free = 0xffffffff;

// A slot has room for 4 vectors a lane, or for 2 with more than two ranks, and for a key: see Kernel.seal.
static const u32 lanes = 32, maxRanks = 8;

// Keys are multiples of this odd number, 0 first. The first 513 differ, and none is all ones. A tile has at most 512
// words, so one of the keys suits it.
static const u32 nextKey = 0x9e3779b1;
constexpr bool keysAreData() {
  u32 key = 0;
  for (u32 i = 0; i <= 512; i++, key += nextKey)
    if (key == Free) return false;
  return true;
}
static_assert(keysAreData(), "a key must not be all ones");

// Marked is the first word of a tile with a key. Its own first word comes with the key. As a float it is a NaN, so data
// seldom begin with it.
static const u32 Marked = 0xffb4d2e1;
static const u64 NoKey = ~0ull;

DEVICE u32 lane() { return __nvvm_read_ptx_sreg_tid_x() & (lanes - 1); }
DEVICE void syncWarp() { __nvvm_bar_warp_sync(0xffffffff); }
// all reports to all lanes whether something holds in all of them. It does not if some lanes have returned.
__attribute__((unused)) DEVICE bool all(bool holds) { return __nvvm_vote_ballot_sync(0xffffffff, holds) == 0xffffffff; }
__attribute__((unused)) DEVICE bool any(bool holds) { return __nvvm_vote_ballot_sync(0xffffffff, holds) != 0; }

// Relaxed accesses at the scope of the system: single words are whole, nothing else is ordered.
DEVICE void put(Vec *p, Vec v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" : : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void put(u64 *p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(p), "l"(v) : "memory"); }
DEVICE void put(u32 *p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory"); }
DEVICE Vec get(const Vec *p) {
  Vec v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE u32 get(const u32 *p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u64 get(const u64 *p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 acquire(const u32 *p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void release(u32 *p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory"); }

// Accesses of the caller's memory, and of slots that nobody else looks at.
DEVICE Vec load(const Vec *p) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE void store(Vec *p, Vec v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" : : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Operators, as the host numbers them.
enum { Sum, Product, Min, Max, BAnd, BOr, BXor };

template <class To, class From> DEVICE To bits(From v) { return __builtin_bit_cast(To, v); }

// The arithmetic of a dtype works on words of 4 or 8 bytes, in which there are one or
// more elements. Whole numbers have operators of bits.
struct F32 {
  typedef u32 Word;
  static const bool whole = false;
  // Min and max keep the first where a comparison with NaN decides nothing.
  template <int op> DEVICE float of(float a, float b) {
    return op == Sum ? a + b : op == Product ? a * b : op == Min ? (b < a ? b : a) : (a < b ? b : a);
  }
  template <int op> DEVICE u32 combine(u32 a, u32 b) { return bits<u32>(of<op>(bits<float>(a), bits<float>(b))); }
  DEVICE u32 scaled(u32 a, u64 by) { return bits<u32>(bits<float>(a) * bits<float>((u32)by)); }
  DEVICE u32 divided(u32 a, u32 by) { return bits<u32>(bits<float>(a) / (float)by); }
};

struct F64 {
  typedef u64 Word;
  static const bool whole = false;
  template <int op> DEVICE double of(double a, double b) {
    return op == Sum ? a + b : op == Product ? a * b : op == Min ? (b < a ? b : a) : (a < b ? b : a);
  }
  template <int op> DEVICE u64 combine(u64 a, u64 b) { return bits<u64>(of<op>(bits<double>(a), bits<double>(b))); }
  DEVICE u64 scaled(u64 a, u64 by) { return bits<u64>(bits<double>(a) * bits<double>(by)); }
  DEVICE u64 divided(u64 a, u32 by) { return bits<u64>(bits<double>(a) / (double)by); }
};

// Narrow floats are widened to float, and rounded once after each step. Min and max
// return one of the operands' bits.
template <class Format> struct Narrow {
  typedef u32 Word;
  static const bool whole = false;
  template <int op> DEVICE u32 pick(u32 a, u32 b) {
    bool low = op == Min ? Format::low(b) < Format::low(a) : Format::low(a) < Format::low(b);
    bool high = op == Min ? Format::high(b) < Format::high(a) : Format::high(a) < Format::high(b);
    return (low ? b & 0xffff : a & 0xffff) | (high ? b & 0xffff0000 : a & 0xffff0000);
  }
  template <int op> DEVICE u32 combine(u32 a, u32 b) {
    if (op == Sum) return Format::sum(a, b);
    if (op == Product) return Format::both(Format::low(a) * Format::low(b), Format::high(a) * Format::high(b));
    return pick<op>(a, b);
  }
  DEVICE u32 scaled(u32 a, u64 by) {
    float f = bits<float>((u32)by);
    return Format::both(Format::low(a) * f, Format::high(a) * f);
  }
  DEVICE u32 divided(u32 a, u32 by) { return Format::both(Format::low(a) / (float)by, Format::high(a) / (float)by); }
};

// A sum of two narrow floats that is rounded once has the bits of one that float rounds
// before: float has more than twice their digits.
struct Half {
  DEVICE float low(u32 w) { return (float)bits<_Float16>((u16)w); }
  DEVICE float high(u32 w) { return (float)bits<_Float16>((u16)(w >> 16)); }
  DEVICE u32 both(float low, float high) { return bits<u16>((_Float16)low) | (u32)bits<u16>((_Float16)high) << 16; }
  DEVICE u32 sum(u32 a, u32 b) {
    u32 r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
};

struct Brain {
  DEVICE float low(u32 w) { return bits<float>(w << 16); }
  DEVICE float high(u32 w) { return bits<float>(w & 0xffff0000); }
  DEVICE u32 both(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  // a * 1 + b.
  DEVICE u32 sum(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80), "r"(b));
    return r;
  }
};

// Whole numbers wrap: all but Min and Max take them as unsigned.
template <class U, class T> struct Integer {
  typedef U Word;
  static const bool whole = true;
  template <int op> DEVICE U combine(U a, U b) {
    switch (op) {
    case Sum: return a + b;
    case Product: return a * b;
    case Min: return (T)b < (T)a ? b : a;
    case Max: return (T)a < (T)b ? b : a;
    case BAnd: return a & b;
    case BOr: return a | b;
    default: return a ^ b;
    }
  }
  DEVICE U scaled(U a, u64 by) { return a * (U)by; }
  DEVICE U divided(U a, u32) { return a; }
};

// Four bytes. What is not wanted often takes one after the other.
template <class T> struct Bytes {
  typedef u32 Word;
  static const bool whole = true;
  template <int op> DEVICE u32 combine(u32 a, u32 b) {
    if (op == Sum) return ((a & 0x7f7f7f7f) + (b & 0x7f7f7f7f)) ^ ((a ^ b) & 0x80808080);
    if (op == BAnd) return a & b;
    if (op == BOr) return a | b;
    if (op == BXor) return a ^ b;
    u32 r = 0;
#pragma unroll 1
    for (u32 j = 0; j < 32; j += 8) {
      T x = (T)(a >> j), y = (T)(b >> j);
      T z = op == Product ? (T)((u8)x * (u8)y) : op == Min ? (y < x ? y : x) : (x < y ? y : x);
      r |= (u32)(u8)z << j;
    }
    return r;
  }
  DEVICE u32 scaled(u32 a, u64 by) {
    u32 r = 0;
#pragma unroll 1
    for (u32 j = 0; j < 32; j += 8) r |= (u32)(u8)((a >> j) * (u32)by) << j;
    return r;
  }
  DEVICE u32 divided(u32 a, u32) { return a; }
};

template <class W> struct Words { W v[16 / sizeof(W)]; };

// combineTile does a[u] = a[u] op b[u].
template <class M, int U, int op> DEVICE void combineTile(Vec *a, const Vec *b) {
  typedef Words<typename M::Word> W;
#pragma unroll
  for (int u = 0; u < U; u++) {
    W x = bits<W>(a[u]), y = bits<W>(b[u]);
#pragma unroll
    for (u32 k = 0; k < 16 / sizeof(x.v[0]); k++) x.v[k] = M::template combine<op>(x.v[k], y.v[k]);
    a[u] = bits<Vec>(x);
  }
}

template <class M> DEVICE void scale(Vec *a, u64 by) {
  typedef Words<typename M::Word> W;
  W x = bits<W>(*a);
#pragma unroll
  for (u32 k = 0; k < 16 / sizeof(x.v[0]); k++) x.v[k] = M::scaled(x.v[k], by);
  *a = bits<Vec>(x);
}

template <class M> DEVICE void divide(Vec *a, u32 by) {
  typedef Words<typename M::Word> W;
  W x = bits<W>(*a);
#pragma unroll
  for (u32 k = 0; k < 16 / sizeof(x.v[0]); k++) x.v[k] = M::divided(x.v[k], by);
  *a = bits<Vec>(x);
}

// Dtypes, as the host numbers them.
enum { Float32, BFloat16, Float16, Float64, Int8, Uint8, Int32, Int64 };

// A family is dtypes that share kernels, because most of a kernel moves bytes. Each calls f with the arithmetic of a
// dtype. Element is what unaligned memory is accessed by.
//
// Gradients need no keys: a word that is all ones is one NaN or two, and becomes another NaN.
struct Gradients {
  typedef u16 Element;
  static const bool keyed = false;
  static const u32 nan = 0x7fff7fff; // of any of them
  template <class F> DEVICE void each(u32 type, F f) {
    switch (type) {
    case Float32: f(F32()); return;
    case BFloat16: f(Narrow<Brain>()); return;
    default: f(Narrow<Half>()); return;
    }
  }
};

// Of the others every pattern of bits is data: tiles with words of all ones get a key.
struct Others {
  typedef u8 Element;
  static const bool keyed = true;
  static const u32 nan = 0;
  template <class F> DEVICE void each(u32 type, F f) {
    switch (type) {
    case Float64: f(F64()); return;
    case Int32: f(Integer<u32, i32>()); return;
    case Int64: f(Integer<u64, i64>()); return;
    default: f(Bytes<u8>()); return; // signed bytes: see combine
    }
  }
};

// add does a[u] += b[u].
template <class Family, int U> DEVICE void add(u32 type, Vec *a, const Vec *b) {
  Family::each(type, [&](auto m) { combineTile<decltype(m), U, Sum>(a, b); });
}

// The rest of the arithmetic stays out of the kernels: a op b, and a multiplied by a factor, or divided by a number if
// that is no power of two.
template <class Family> OUTLINE Vec combine(u32 type, u32 op, Vec a, Vec b) {
  const u32 flip = type == Int8 && (op == Min || op == Max) ? 0x80808080 : 0;
  a ^= (Vec)(flip), b ^= (Vec)(flip);
  Family::each(type, [&](auto m) {
    typedef decltype(m) M;
    switch (op) {
    case Sum: combineTile<M, 1, Sum>(&a, &b); return;
    case Product: combineTile<M, 1, Product>(&a, &b); return;
    case Min: combineTile<M, 1, Min>(&a, &b); return;
    case Max: combineTile<M, 1, Max>(&a, &b); return;
    }
    if constexpr (M::whole)
      switch (op) {
      case BAnd: combineTile<M, 1, BAnd>(&a, &b); return;
      case BOr: combineTile<M, 1, BOr>(&a, &b); return;
      case BXor: combineTile<M, 1, BXor>(&a, &b); return;
      }
  });
  return a ^ (Vec)(flip);
}
template <class Family> OUTLINE Vec scaled(u32 type, Vec a, u64 factor, u32 by) {
  Family::each(type, [&](auto m) {
    // To multiply by 1/2 or 1/4 gives the same bits as to divide, and is as fast for tiny numbers as for others.
    if ((by & (by - 1)) == 0) scale<decltype(m)>(&a, factor);
    else divide<decltype(m)>(&a, by);
  });
  return a;
}

// inTurn replaces each vector of a tile by what f makes of it. It is one place of code: the vectors change places.
template <int U, class F> DEVICE void inTurn(Vec *v, F f) {
#pragma unroll 1
  for (int k = 0; k < U; k++) {
    const Vec x = f(v[0]);
#pragma unroll
    for (int u = 1; u < U; u++) v[u - 1] = v[u];
    v[U - 1] = x;
  }
}

// average divides a result, unless by is 0 or 1.
template <class Family, int U> DEVICE void average(u32 type, Vec *v, u32 by, u64 factor) {
  if (__builtin_expect(by <= 1, 1)) return;
  if constexpr (U == 1) // a call of a function shows in short calls
    if (!Family::keyed && type == Float32 && (by & (by - 1)) == 0) return scale<F32>(v, factor);
  inTurn<U>(v, [&](Vec x) { return scaled<Family>(type, x, factor, by); });
}

// Peer is where this rank writes at another one.
struct Peer {
  Vec *slots;  // its ring for this rank's tiles
  u64 *keys;   // the keys of that ring
  u32 *credit; // what it is told of its own tiles here, a word a channel
};

// Call is the parameters of a launch. launch.go has the same layout.
struct Call {
  const u8 *src;
  u8 *dst;
  u64 part;     // bytes of a part: what a rank gets from another one
  u64 srcStep;  // from one rank's part of src to the next one's; 0: all get the same part
  u64 srcBytes; // in src; parts that reach beyond it are short
  u64 dstStep;  // from one rank's part of dst to the next one's, where parts are gathered
  u64 dstBytes; // in dst
  Vec *slots;   // the rings for the tiles of the ranks, this one's left out
  u64 *keys;
  u64 *state;   // of the channels: tiles before the last call (high half) and after it; then the turns of each rank
  u32 *credit;  // of a channel: tiles that each peer has taken, a word a rank
  u32 *failed;  // set when a call has failed; the later ones do nothing. After it: the channels that have ended
  u32 *host;    // the abort word, the report and the number of the last call that has ended, in the host's memory
  u64 factor;   // of scaled calls, and 1 / by if that is exact; as bits
  u64 limit;    // how long a wait may take, in ns
  u32 ranks, rank;
  u32 channels; // of a ring
  u32 depth;    // slots of a channel's ring, a power of two
  u16 op, type; // the operator, and the dtype of elements
  u32 by;       // what the outcome is divided by
  u32 scaled;   // operands are multiplied by factor
  u32 align;    // all addresses and lengths of parts, or-ed
  u32 number;   // of the call, for the host; 0: it is not told
  u32 roles;    // three sets of ranks, see Roles
  Peer peers[maxRanks];
};
static_assert(sizeof(Call) == 352, "launch.go counts on it");

// Spread is the parameters of an all_reduce of two ranks in which each writes its half of the result straight
// to the other one, or of a reduce whose root reads the other rank's operand. launch.go has the same layout.
struct Spread {
  Call one;          // the same in one shot, where a rank is not open
  Call two;          // of an all_reduce: a reduce_scatter of the halves
  u64 into;          // where the peer may write the result, or read: a region of this rank, from 1 on, in the high 16 bits, and an offset
  const u64 *maps;   // where the peer's regions are
  const u32 *failed; // the peer's own failed word
  u32 open;          // the peer may write, or read
  u32 pad;
};
static_assert(sizeof(Spread) == 736, "launch.go counts on it");

// Span is bytes of src or dst.
struct Span { u64 at, bytes; };

// Move is the parameters of a launch that only moves bytes: to each peer what it is to have,
// from each what it sends. launch.go has the same layout. Of c the steps, the bytes and the
// arithmetic are not used; part is the longest span that this rank knows of.
//
// It is also the parameters of two shots in one launch whose results go straight to the peers. Those use all of c, and
// not the spans.
struct Move {
  Call c;
  Span send[maxRanks], take[maxRanks]; // this rank's own ones are copied
  u64 into[maxRanks];                  // where each peer may write its span: a region of this rank, from 1 on, in the high 16 bits, and an offset
  const u64 *maps[maxRanks];           // where the regions of each peer are
  const u32 *failed[maxRanks];         // the peers' own failed words
  u32 open;                            // the peers may write all that they send here
  u32 told;                            // they write something
  u32 writers;                         // so many ranks write to one at a time
  u32 pad;
};
static_assert(sizeof(Move) == 816, "launch.go counts on it");

enum { Aborted = 1, TimedOut = 2, Unlike = 3 };

// report makes the call and all later ones of this rank fail. The first one tells the host why.
DEVICE void report(u32 *host, u32 *failed, u32 why, u32 peer, u32 channel, u32 tile) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(failed), "r"(why) : "memory");
  if (old == 0) {
    put(host + 2, peer);
    put(host + 3, channel);
    put(host + 4, tile);
    release(host + 1, why);
  }
}

// look returns 0 if a wait for a peer's tile may go on.
OUTLINE u32 look(u32 *host, u32 *failed, u64 limit, u64 waited, u32 peer, u32 channel, u32 tile) {
  u32 why = get(host) != 0 ? Aborted : waited > limit ? TimedOut : 0;
  if (why == 0) return get(failed);
  report(host, failed, why, peer, channel, tile);
  return why;
}

DEVICE void pause(u32 ns) { asm volatile("nanosleep.u32 %0;" : : "r"(ns)); }

// Wait ends waits: by the abort word, by a failure elsewhere in this rank's grid, and by
// the clock. It looks every 1024 polls, which costs nothing that can be measured.
//
// After a few polls it pauses between them. Warps that poll without a pause slow down all else that uses the
// device's memory, above all copies from and to the host: beside 64 blocks of 256 threads a copy of 512 KiB took
// 3 ms, and 0.04 ms when they paused.
static const u32 eagerPolls = 64;

struct Wait {
  u32 polls;
  u64 since;
  DEVICE bool over(Wait &w, const Call &c, u32 peer, u32 channel, u32 tile) {
    if (__builtin_expect((++w.polls & 1023) != 0, 1)) {
      if (w.polls > eagerPolls) pause(1000);
      return false;
    }
    u64 t = now();
    if (w.since == 0) w.since = t;
    return look(c.host, c.failed, c.limit, t - w.since, peer, channel, tile) != 0;
  }
};

// takeKey waits for what comes with a tile that has a key, and makes the place free. It returns NoKey if the call has failed.
__attribute__((unused)) OUTLINE u64 takeKey(u64 *at, u32 *host, u32 *failed, u64 limit, u32 peer, u32 channel, u32 tile) {
  u64 v, since = 0;
  for (u32 polls = 1; v = get(at), (u32)v == Free || (u32)(v >> 32) == Free; polls++) {
    if ((polls & 1023) != 0) continue;
    const u64 t = now();
    if (since == 0) since = t;
    if (look(host, failed, limit, t - since, peer, channel, tile) != 0) return NoKey;
  }
  *at = NoKey;
  return v;
}

// finish tells the host that the call has ended, when the last of so many channels has. What all of them
// have written comes before.
DEVICE void finish(const Call &c, u32 lane, u32 channels) {
  if (c.number == 0 || lane != 0) return;
  u32 before;
  asm volatile("fence.acq_rel.gpu;" : : : "memory");
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(c.failed + 1), "r"(channels - 1) : "memory");
  if (before + 1 != channels) return;
  asm volatile("fence.acq_rel.sys;" : : : "memory");
  put(c.host + 5, c.number);
}

// A rank that writes straight to another one looks every so many tiles whether that has failed. One that has
// failed stays for a while, so that nothing comes after it has ended.
static const u32 lookTiles = 16;
static const u64 lingerTime = 5000000; // ns

// A rank that may wait for a third one looks again after this time.
static const u64 lookTime = 1000000; // ns

__attribute__((unused)) OUTLINE void linger() {
  for (u64 since = now(); now() - since < lingerTime;) pause(1000);
}

// Channel is what a warp has at hand.
struct Channel {
  u32 w;     // its number
  u32 lane;
  u32 cur;   // tiles before this call
  u32 limit; // it may push tile t if t is before limit
  u64 first, step; // bytes of a part: where its first tile begins, and from one tile to the next
  u32 tiles;       // in this call
  u32 last;        // vectors of the last tile
  u32 all;         // channels
};

// fetchPart gets a vector of which n bytes are there, by words where all of them are whole and aligned, or by elements.
// The rest is zeros.
template <class T> OUTLINE Vec fetchPart(const u8 *p, u64 n, bool words) {
  Vec v = (Vec)(0);
  if (__builtin_expect(words && (n >= 16 || n % 4 == 0), 1)) {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
      if (n >= 4 * k + 4) v[k] = ((const u32 *)p)[k];
    return v;
  }
#pragma unroll
  for (u32 k = 0; k < 4; k++)
#pragma unroll 1
    for (u32 j = 0; j < 4 && n >= 4 * k + j + sizeof(T); j += sizeof(T)) {
      const u8 *e = p + 4 * k + j;
      v[k] |= (sizeof(T) == 2 ? (u32)*(const u16 *)e : (u32)*e) << (8 * j);
    }
  return v;
}

// keepPart puts the first n bytes of a vector, in the same way.
template <class T> OUTLINE void keepPart(u8 *p, u64 n, bool words, Vec v) {
  if (__builtin_expect(words && (n >= 16 || n % 4 == 0), 1)) {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
      if (n >= 4 * k + 4) ((u32 *)p)[k] = v[k];
    return;
  }
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    u32 word = v[k];
#pragma unroll 1
    for (u32 j = 0; j < 4 && n >= 4 * k + j + sizeof(T); j += sizeof(T), word >>= 8 * sizeof(T)) {
      u8 *e = p + 4 * k + j;
      if (sizeof(T) == 2) *(u16 *)e = (u16)word;
      else *e = (u8)word;
    }
  }
}

// reach returns how many bytes of a vector at an offset come before the end.
DEVICE u64 reach(u64 end, u64 offset) { return offset < end ? end - offset : 0; }

// Kernel is what a kernel does with tiles of U vectors a lane, for N ranks, or any number if
// N is 0.
template <class Family, int U, int N, bool Gather> struct Kernel {
  typedef typename Family::Element T;

  static const u32 tile = U * lanes, slotVecs = (N == 2 ? 4 : 2) * lanes; // vectors

  DEVICE u64 at(const Channel &ch, u32 i) { return ch.first + i * ch.step; }
  DEVICE u32 vecs(const Channel &ch, u32 i) { return i + 1 < ch.tiles ? tile : ch.last; }

  // Part is one of src or dst.
  struct Part {
    u8 *p;
    u64 bytes;
    u32 whole; // so many of the channel's tiles can be moved vector by vector
  };
  DEVICE Part part(const Call &c, const Channel &ch, u8 *p, u64 offset, u64 end) {
    Part a = {p + offset, reach(end, offset), 0};
    if (a.bytes > c.part) a.bytes = c.part;
    if ((c.align & 15) != 0) return a;
    if (a.bytes == c.part) {
      a.whole = ch.tiles - (at(ch, ch.tiles - 1) + tile * 16 > a.bytes);
    } else {
      u32 n = (u32)(a.bytes / (tile * 16));
      a.whole = n > ch.w ? (n - ch.w + ch.all - 1) / ch.all : 0;
    }
    return a;
  }
  DEVICE Part from(const Call &c, const Channel &ch, u32 rank) { return part(c, ch, (u8 *)c.src, rank * c.srcStep, c.srcBytes); }
  DEVICE Part to(const Call &c, const Channel &ch, u32 rank) { return part(c, ch, c.dst, rank * c.dstStep, c.dstBytes); }

  // fetch gets tile i of a part. Beyond its end are zeros.
  DEVICE void fetch(const Call &c, const Channel &ch, const Part &a, u32 i, Vec *v) {
    const u64 o = at(ch, i) + ch.lane * 16;
    if (__builtin_expect(i < a.whole, 1)) {
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = load((const Vec *)(a.p + o) + u * lanes);
      return;
    }
#pragma unroll
    for (int u = 0; u < U; u++)
      v[u] = fetchPart<T>(a.p + o + u * lanes * 16, reach(a.bytes, o + u * lanes * 16), (c.align & 3) == 0);
  }

  // keep puts tile i to a part.
  DEVICE void keep(const Call &c, const Channel &ch, const Part &a, u32 i, const Vec *v) {
    const u64 o = at(ch, i) + ch.lane * 16;
    if (__builtin_expect(i < a.whole, 1)) {
#pragma unroll
      for (int u = 0; u < U; u++) store((Vec *)(a.p + o) + u * lanes, v[u]);
      return;
    }
#pragma unroll
    for (int u = 0; u < U; u++)
      keepPart<T>(a.p + o + u * lanes * 16, reach(a.bytes, o + u * lanes * 16), (c.align & 3) == 0, v[u]);
  }

  // prepare multiplies by the factor, which plain calls have not, and leaves nothing that is all ones. All ranks compute
  // with that, so that they get the same bits.
  DEVICE void prepare(const Call &c, Vec *v, bool plain = false) {
    if (Gather) return;
    if (!plain && __builtin_expect(c.scaled, 0))
      inTurn<U>(v, [&](Vec x) { return scaled<Family>(c.type, x, c.factor, 1); });
    free(v);
  }

  // free changes what is all ones to a NaN that is not.
  DEVICE void free(Vec *v) {
    if (Family::keyed) return;
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int k = 0; k < 4; k++) v[u][k] = v[u][k] == Free ? Family::nan : v[u][k];
  }

  // seal changes a tile of n vectors so that no word is all ones. Most tiles have no such word, and stay as they are. In
  // others all words are XORed with a key, and the first word is replaced by Marked. A tile that begins with Marked is one
  // of the others. It returns what goes to the slot's place for a key, of lane 0: the key, and the first word above it.
  DEVICE u64 seal(const Channel &ch, u32 n, Vec *v) {
    if (!Family::keyed || __builtin_expect(!any(has(ch, n, v, Free) || marked(ch, v)), 1)) return NoKey;
    u32 key = 0;
#pragma unroll 1
    while (any(has(ch, n, v, ~key))) key += nextKey;
    applyKey(v, key);
    const u64 both = (u64)v[0].x << 32 | key;
    if (ch.lane == 0) v[0].x = Marked;
    return both;
  }

  // marked reports to lane 0 whether a tile begins with Marked.
  DEVICE bool marked(const Channel &ch, const Vec *v) { return ch.lane == 0 && v[0].x == Marked; }

  // unseal changes a tile back that tells of a key. Lane 0 waits for that, and makes its place free. It returns false to
  // all lanes if the call has failed.
  DEVICE bool unseal(const Call &c, const Channel &ch, u32 peer, u32 t, u64 slot, Vec *v) {
    u64 both = 0;
    if (ch.lane == 0) both = takeKey(c.keys + slot, c.host, c.failed, c.limit, peer, ch.w, t);
    const u32 key = from((u32)both, 0);
    if (key == Free) return false;
    if (ch.lane == 0) v[0].x = (u32)(both >> 32);
    applyKey(v, key);
    return true;
  }

  // has reports whether a lane's part of a tile has a word.
  DEVICE bool has(const Channel &ch, u32 n, const Vec *v, u32 word) {
    bool found = false;
#pragma unroll
    for (int u = 0; u < U; u++)
      if (ch.lane + u * lanes < n) found |= v[u].x == word || v[u].y == word || v[u].z == word || v[u].w == word;
    return found;
  }

  // applyKey changes a tile by its key, or back.
  DEVICE void applyKey(Vec *v, u32 key) {
#pragma unroll
    for (int u = 0; u < U; u++) v[u] ^= (Vec)(key);
  }

  // give writes n vectors of a tile into a slot at a peer. It changes v.
  DEVICE void give(const Call &c, const Channel &ch, u32 peer, u64 slot, u32 n, Vec *v) {
    const u64 key = seal(ch, n, v);
    fillSlot(c, ch, peer, slot, n, v, key);
  }

  // fillSlot writes what seal has changed.
  DEVICE void fillSlot(const Call &c, const Channel &ch, u32 peer, u64 slot, u32 n, const Vec *v, u64 key) {
    if (Family::keyed && __builtin_expect(key != NoKey, 0) && ch.lane == 0) put(c.peers[peer].keys + slot, key);
    Vec *to = c.peers[peer].slots + slot * slotVecs + ch.lane;
#pragma unroll
    for (int u = 0; u < U; u++)
      if (ch.lane + u * lanes < n) put(to + u * lanes, v[u]);
  }

  // room waits until all peers have room for tile t of the channel. It returns false if the call has failed.
  DEVICE bool room(const Call &c, Channel &ch, u32 t) {
    if (__builtin_expect((i32)(t - ch.limit) >= 0, 0)) {
      Wait wait = {0, 0};
      for (;;) {
        u32 slow = c.rank == 0 ? 1 : 0, least = acquire(c.credit + ch.w * maxRanks + slow);
        for (u32 p = slow + 1; N != 2 && p < c.ranks; p++) {
          if (p == c.rank) continue;
          u32 n = acquire(c.credit + ch.w * maxRanks + p);
          if ((i32)(n - least) < 0) least = n, slow = p;
        }
        ch.limit = least + c.depth;
        if ((i32)(t - ch.limit) < 0) break;
        if (Wait::over(wait, c, slow, ch.w, t)) return false;
      }
    }
    return true;
  }

  // slot is where tile t of a channel is among the slots of a rank: what the channels push at about the same time lies
  // side by side.
  DEVICE u64 slot(const Call &c, const Channel &ch, u32 t) { return (u64)(t & (c.depth - 1)) * c.channels + ch.w; }

  // push gives the same tile i, of n vectors, to a set of peers, when all have room. The other peers get its first
  // vectors, as many as others says. It returns false if the call has failed.
  DEVICE bool push(const Call &c, Channel &ch, u32 i, u32 n, const Vec *same, u32 peers = ~0u, u32 others = 0) {
    const u32 t = ch.cur + i;
    if (!room(c, ch, t)) return false;
    const u32 ranks = N == 2 ? 2 : c.ranks;
    Vec v[U];
    copy(v, same);
    const u64 key = seal(ch, n, v);
    u32 peer = c.rank;
    for (u32 k = 1; k < ranks; k++) {
      peer = peer + 1 == ranks ? 0 : peer + 1;
      const u32 count = peers >> peer & 1 ? n : others;
      if (count != 0) fillSlot(c, ch, peer, slot(c, ch, t), count, v, key);
    }
    return true;
  }

  // slotOf is where tile i of a peer comes.
  DEVICE u64 slotOf(const Call &c, const Channel &ch, u32 peer, u32 i) {
    u32 from = peer < c.rank ? peer : peer - 1;
    return (u64)from * c.depth * c.channels + slot(c, ch, ch.cur + i);
  }

  // take waits for tile i of a peer, gets it, and makes its slot free. It returns false if the call has failed; where
  // there are keys, to all lanes.
  DEVICE bool take(const Call &c, const Channel &ch, u32 peer, u32 i, Vec *v) { return take(c, ch, peer, i, vecs(ch, i), v); }
  DEVICE bool take(const Call &c, const Channel &ch, u32 peer, u32 i, u32 n, Vec *v) {
    const u32 t = ch.cur + i;
    const u64 slot = slotOf(c, ch, peer, i);
    Vec *at = c.slots + slot * slotVecs + ch.lane;
    Wait wait = {0, 0};
    bool ok = true;
    for (;;) {
#pragma unroll
      for (int u = 0; u < U; u++)
        if (ch.lane + u * lanes < n) v[u] = get(at + u * lanes);
      if (!has(ch, n, v, Free)) break;
      if (Wait::over(wait, c, peer, ch.w, t)) {
        ok = false;
        break;
      }
    }
    if (!Family::keyed && !ok) return false;
    if (Family::keyed && __builtin_expect(!all(ok && !marked(ch, v)), 0)) {
      if (!all(ok) || !unseal(c, ch, peer, t, slot, v)) return false;
    }
#pragma unroll
    for (int u = 0; u < U; u++)
      if (ch.lane + u * lanes < n) store(at + u * lanes, (Vec)(Free));
    return true;
  }

  DEVICE void copy(Vec *to, const Vec *from) {
#pragma unroll
    for (int u = 0; u < U; u++) to[u] = from[u];
  }

  // here returns the channel of this warp.
  DEVICE Channel here() {
    const u32 warps = __nvvm_read_ptx_sreg_ntid_x() / lanes;
    Channel ch;
    ch.all = __nvvm_read_ptx_sreg_nctaid_x() * warps;
    ch.w = __nvvm_read_ptx_sreg_ctaid_x() * warps + __nvvm_read_ptx_sreg_tid_x() / lanes;
    ch.lane = lane();
    return ch;
  }

  // deal gives a channel its tiles. It returns how many there are in all, which is few enough for 32 bits.
  DEVICE u32 deal(const Call &c, Channel &ch) {
    const u32 dealt = (u32)((c.part + tile * 16 - 1) / (tile * 16));
    ch.tiles = ch.w < dealt ? (dealt - ch.w + ch.all - 1) / ch.all : 0;
    ch.first = (u64)ch.w * (tile * 16);
    ch.step = (u64)ch.all * (tile * 16);
    const u64 left = (c.part - at(ch, ch.tiles - 1) + 15) / 16;
    ch.last = left < tile ? (u32)left : tile;
    return dealt;
  }

  // begin gets the state of a channel. It returns false if an earlier call has failed.
  DEVICE bool begin(const Call &c, Channel &ch) {
    const u64 state = get(c.state + ch.w);
    if (get(c.failed) != 0) return false;
    ch.cur = (u32)state;
    ch.limit = (u32)(state >> 32) + c.depth;
    return true;
  }

  DEVICE void run(const Call &c) {
    Channel ch = here();
    const u32 dealt = deal(c, ch);
    if (ch.w >= dealt) return;
    if constexpr (N == 2) {
      if (!tiles<false>(c, ch, nullptr, nullptr)) return;
    } else {
      if (!many(c, ch)) return;
    }
    end(c, ch, ch.tiles, dealt < ch.all ? dealt : ch.all);
  }

  // combines does a[u] = a[u] op b[u], or b[u] op a[u].
  DEVICE void combines(const Call &c, Vec *a, const Vec *b, bool swapped) {
    // The sum of two NaNs of float64 is one of them: the order shows.
    const bool shows = Family::keyed && swapped && c.type == Float64;
    if (__builtin_expect(c.op == Sum && !shows, 1)) return add<Family, U>(c.type, a, b);
    Vec y[U];
    copy(y, b);
    inTurn<U>(a, [&](Vec x) {
      const Vec z = y[0];
#pragma unroll
      for (int u = 1; u < U; u++) y[u - 1] = y[u];
      return combine<Family>(c.type, c.op, swapped ? z : x, swapped ? x : z);
    });
  }

  // longTiles is from how many tiles a channel a call is long.
  static const u32 longTiles = 32;

  // tiles does the tiles of a call of two ranks. After a head of one tile, which ch counts, the result is also put to a
  // peer, unless also is null, as long as that has not failed. Only owners get operands; another rank gets one vector of
  // tile 0, because every call takes something from every peer. It returns false if the call has failed.
  template <bool Head> DEVICE bool tiles(const Call &c, Channel &ch, u8 *also, const u32 *failed) {
    const bool parts = c.srcStep != 0;
    const Part ahead = from(c, ch, 1 - c.rank); // what is fetched ahead
    const Part mine = from(c, ch, c.rank), result = to(c, ch, 0);
    Part other = result;
    other.p = also;
    u32 over = Head && also != nullptr ? get(failed) : 0;
    const u32 owners = c.roles >> maxRanks;
    const bool owner = owners >> c.rank & 1, gives = owners >> (1 - c.rank) & 1;

    // Tile i is fetched two rounds before it is combined, and pushed one round before. What
    // the first push needs is asked for at once.
    Vec own[U], next[U], later[U], x[U];
    fetch(c, ch, ahead, 0, next);
    if (!Head && !begin(c, ch)) return false;
    prepare(c, next, Head);
    if (!push(c, ch, 0, gives ? vecs(ch, 0) : 1, next)) return false;
    if (1 < ch.tiles) fetch(c, ch, ahead, 1, later);
    for (u32 i = 0; i < ch.tiles; i++) {
      copy(own, next);
      if (i + 1 < ch.tiles) {
        copy(next, later);
        prepare(c, next, Head);
        if (gives && !push(c, ch, i + 1, vecs(ch, i + 1), next)) return false;
        if (i + 2 < ch.tiles) fetch(c, ch, ahead, i + 2, later);
      }
      if (parts) {
        fetch(c, ch, mine, i, own);
        prepare(c, own, Head);
      }
      if ((owner || i == 0) && !take(c, ch, 1 - c.rank, i, owner ? vecs(ch, i) : 1, x)) return false;
      if (!owner) {
        // It keeps nothing.
      } else if (Gather) {
        keep(c, ch, to(c, ch, c.rank), i, own);
        keep(c, ch, to(c, ch, 1 - c.rank), i, x);
      } else {
        if (Head) add<Family, U>(c.type, own, x);
        else combines(c, own, x, c.rank == 1);
        average<Family, U>(c.type, own, c.by, c.factor);
        keep(c, ch, result, i, own);
        if (Head && also != nullptr) {
          if (i % lookTiles == 0) {
            if (over != 0) {
              report(c.host, c.failed, Aborted, 1 - c.rank, ch.w, ch.cur + i);
              return false;
            }
            over = get(failed);
          }
          keep(c, ch, other, i, own);
        }
      }
      // A rank that only pushes operands hears after each quarter of a ring in long calls. Others would be slower.
      credit(c, ch, i, Head, Gather || (owner && gives) || ch.tiles < longTiles ? 1 : 2);
    }
    return true;
  }

  // What more than two ranks do. A lane asks for what several peers have for it at once, and then looks at the
  // answers: one after the other would take several times as long. It asks some peers, or a crowd of ranks that it may
  // be one of.
  static const u32 some = 3, crowd = some + 1;

  // Many is what a warp has at hand of the tile that it pushes next and of the one after it.
  struct Many {
    Vec own[U], next[U], later[U]; // this rank's part: combined now, and pushed before
    Vec ahead[some][U];            // of the first peers, where each gets a part of its own
  };

  // Shot is who does what in a call of one shot: givers have data or operands, and owners get them. Whoever gets nothing
  // of a rank takes one vector of its tile 0.
  struct Shot {
    static const bool same = true; // the peers may all get the same
    u32 givers, owners, to;
    bool gives, owner;
    METHOD explicit Shot(const Call &c) {
      givers = c.roles & 0xff, owners = c.roles >> maxRanks & 0xff;
      gives = givers >> c.rank & 1, owner = owners >> c.rank & 1, to = gives ? owners : 0;
    }
    METHOD bool own() const { return gives; }
    METHOD bool sends(u32 peer) const { return to >> peer & 1; }
    METHOD bool takes(u32 peer) const { return owner && givers >> peer & 1; }
    METHOD u32 greets(u32 i) const { return i == 0; }
    METHOD u32 first() const { return 0; }
    METHOD u32 part(u32 rank) const { return rank; }
  };

  // Roles is who does what in a call of two shots. Givers have operands, owners combine a part each, and takers get
  // the results. All ranks do all of it in an all_reduce. In a reduce the root is the only taker. In a broadcast it is
  // the only giver, and nothing is combined. Where something is, all ranks are givers. The sets below are of peers.
  struct Roles {
    static const bool same = false;
    u32 givers, owners;
    bool owner, taker, mine; // this rank is an owner, a taker, an owner and a giver
    u32 to, from;            // operands go to these, and come from those
    u32 tells, told;         // results go to these, and come from those
    u32 others;
    METHOD explicit Roles(const Call &c) {
      const u32 me = 1u << c.rank, takers = c.roles >> 2 * maxRanks & 0xff;
      givers = c.roles & 0xff, owners = c.roles >> maxRanks & 0xff;
      owner = (owners & me) != 0, taker = (takers & me) != 0, mine = owner && (givers & me) != 0;
      others = (1u << c.ranks) - 1 & ~me;
      to = givers & me ? owners & others : 0, from = owner ? givers & others : 0;
      tells = owner ? takers & others : 0, told = taker ? owners & others : 0;
    }
    METHOD bool own() const { return mine; }
    METHOD bool sends(u32 peer) const { return to >> peer & 1; }
    METHOD bool takes(u32 peer) const { return from >> peer & 1; }
    METHOD u32 greets(u32) const { return 0; } // see greet
    METHOD u32 first() const { return (u32)__builtin_ctz(givers); }
    METHOD u32 part(u32 rank) const { return (u32)__builtin_popcount(owners & ((1u << rank) - 1)); }
  };

  // after returns the k-th rank after this one.
  DEVICE u32 after(const Call &c, u32 k) { return c.rank + k < c.ranks ? c.rank + k : c.rank + k - c.ranks; }

  // ask begins to fetch tile i of what is pushed, and of this rank's own operand.
  template <class R> DEVICE void ask(const Call &c, const Channel &ch, const R &roles, const Part &mine, u32 i, Many &x) {
    if (roles.own()) fetch(c, ch, mine, i, x.later);
    if (R::same && c.srcStep == 0) return;
#pragma unroll
    for (u32 k = 0; k < some; k++) {
      const u32 peer = after(c, k + 1);
      if (k + 1 < c.ranks && roles.sends(peer)) fetch(c, ch, from(c, ch, roles.part(peer)), i, x.ahead[k]);
    }
  }

  // send pushes tile i, which has been asked for, as tile t of the call.
  template <class R> DEVICE bool send(const Call &c, Channel &ch, const R &roles, u32 i, u32 t, Many &x) {
    if (roles.own()) {
      copy(x.next, x.later);
      prepare(c, x.next);
    }
    if (R::same && c.srcStep == 0) {
      if (roles.to == 0) {
        if (!roles.greets(t)) return true;
#pragma unroll
        for (int u = 0; u < U; u++) x.next[u] = (Vec)(1);
      }
      return push(c, ch, t, vecs(ch, i), x.next, roles.to, roles.greets(t));
    }
    if (!room(c, ch, ch.cur + t)) return false;
    const u64 at = slot(c, ch, ch.cur + t);
#pragma unroll 1
    for (u32 first = 0; first + 1 < c.ranks; first += some) {
#pragma unroll
      for (u32 k = 0; k < some; k++) {
        const u32 peer = after(c, first + k + 1);
        if (first != 0 && first + k + 1 < c.ranks && roles.sends(peer)) fetch(c, ch, from(c, ch, roles.part(peer)), i, x.ahead[k]);
      }
#pragma unroll
      for (u32 k = 0; k < some; k++) {
        const u32 peer = after(c, first + k + 1);
        if (first + k + 1 >= c.ranks || !roles.sends(peer)) continue;
        prepare(c, x.ahead[k]);
        give(c, ch, peer, at, vecs(ch, i), x.ahead[k]);
      }
    }
    return true;
  }

  // takes is take for tiles of several ranks at once, of n[g] vectors each. This rank, and ranks that are not there, have
  // none.
  template <u32 G> DEVICE bool takes(const Call &c, const Channel &ch, const u32 *who, u32 t, const u32 *n, Vec (*v)[U]) {
    u32 asked = 0, missing = 0;
    u64 slots[G];
#pragma unroll
    for (u32 g = 0; g < G; g++) {
      if (who[g] != c.rank && who[g] < c.ranks && n[g] != 0) asked |= 1u << g;
      if ((asked >> g & 1) != 0 && ch.lane < n[g]) missing |= 1u << g;
      slots[g] = slotOf(c, ch, who[g], t);
    }
    Wait wait = {0, 0};
    bool ok = true;
    while (missing != 0) {
#pragma unroll
      for (u32 g = 0; g < G; g++) {
        if ((missing >> g & 1) == 0) continue;
#pragma unroll
        for (int u = 0; u < U; u++)
          if (ch.lane + u * lanes < n[g]) v[g][u] = get(c.slots + slots[g] * slotVecs + ch.lane + u * lanes);
      }
#pragma unroll
      for (u32 g = 0; g < G; g++)
        if (!has(ch, n[g], v[g], Free)) missing &= ~(1u << g);
      if (missing == 0) break;
      u32 slow = 0;
#pragma unroll
      for (u32 g = G; g > 0; g--)
        if (missing >> (g - 1) & 1) slow = who[g - 1];
      if (Wait::over(wait, c, slow, ch.w, ch.cur + t)) {
        ok = false;
        break;
      }
    }
    if (!Family::keyed && !ok) return false;
    if constexpr (Family::keyed) {
      u32 keyed = 0;
#pragma unroll
      for (u32 g = 0; g < G; g++)
        if ((asked >> g & 1) != 0 && marked(ch, v[g])) keyed |= 1u << g;
      if (__builtin_expect(!all(ok && keyed == 0), 0)) {
        if (!all(ok)) return false;
        keyed = from(keyed, 0);
#pragma unroll
        for (u32 g = 0; g < G; g++)
          if ((keyed >> g & 1) != 0 && !unseal(c, ch, who[g], ch.cur + t, slots[g], v[g])) return false;
      }
    }
#pragma unroll
    for (u32 g = 0; g < G; g++) {
      if ((asked >> g & 1) == 0) continue;
#pragma unroll
      for (int u = 0; u < U; u++)
        if (ch.lane + u * lanes < n[g]) store(c.slots + slots[g] * slotVecs + ch.lane + u * lanes, (Vec)(Free));
    }
    return true;
  }

  // gathered takes tile t of the call of the peers that have data for this rank, and keeps it as tile i of their parts.
  // Of the others it takes as many vectors as greets says.
  template <class R> DEVICE bool gathered(const Call &c, const Channel &ch, const R &roles, u32 from, u32 i, u32 t) {
#pragma unroll 1
    for (u32 first = 1; first < c.ranks; first += some) {
      u32 who[some], n[some];
      Vec v[some][U];
#pragma unroll
      for (u32 k = 0; k < some; k++) {
        const u32 peer = after(c, first + k);
        who[k] = first + k < c.ranks ? peer : c.rank;
        n[k] = from >> peer & 1 ? vecs(ch, i) : roles.greets(t);
      }
      if (!takes<some>(c, ch, who, t, n, v)) return false;
#pragma unroll
      for (u32 k = 0; k < some; k++)
        if (who[k] != c.rank && from >> who[k] & 1) keep(c, ch, to(c, ch, roles.part(who[k])), i, v[k]);
    }
    return true;
  }

  // combined takes tile t of the call of the peers that give operands, which is tile i of this rank's part, and
  // combines it with own, in the order of the ranks. A rank that gets no operands only takes.
  template <class R> DEVICE bool combined(const Call &c, const Channel &ch, const R &roles, u32 i, u32 t, Vec *own) {
    Vec sum[U], v[crowd][U];
#pragma unroll 1
    for (u32 first = 0; first < c.ranks; first += crowd) {
      u32 who[crowd], n[crowd];
#pragma unroll
      for (u32 k = 0; k < crowd; k++) {
        who[k] = first + k;
        n[k] = roles.takes(who[k]) ? vecs(ch, i) : roles.greets(t);
      }
      if (!takes<crowd>(c, ch, who, t, n, v)) return false;
      if (!roles.owner) continue;
#pragma unroll
      for (u32 k = 0; k < crowd; k++)
        if (first + k == c.rank) copy(v[k], own);
      if (!Gather && c.op == Sum) {
        Family::each(c.type, [&](auto m) {
#pragma unroll
          for (u32 k = 0; k < crowd; k++) {
            if (first + k == 0) copy(sum, v[k]);
            else if (first + k < c.ranks) combineTile<decltype(m), U, Sum>(sum, v[k]);
          }
        });
        continue;
      }
      // One place for the rest of the arithmetic keeps the kernel short.
#pragma unroll 1
      for (u32 r = first; r < first + crowd && r < c.ranks; r++) {
        if (r == roles.first()) copy(sum, v[0]);
        else if constexpr (!Gather) combines(c, sum, v[0], false);
#pragma unroll
        for (u32 k = 1; k < crowd; k++) copy(v[k - 1], v[k]);
      }
    }
    if (!roles.owner) return true;
    copy(own, sum);
    if (!Gather) average<Family, U>(c.type, own, c.by, c.factor);
    return true;
  }

  // many does the tiles of a call of more than two ranks. It returns false if the call has failed. Tile i is asked
  // for two rounds before it is combined, and pushed one round before.
  DEVICE bool many(const Call &c, Channel &ch) {
    const Shot roles(c);
    const u32 from = roles.owner ? roles.givers : 0;
    const Part mine = Kernel::from(c, ch, c.rank), result = to(c, ch, Gather ? c.rank : 0);
    Many x;
    ask(c, ch, roles, mine, 0, x);
    if (!begin(c, ch) || !send(c, ch, roles, 0, 0, x)) return false;
    if (1 < ch.tiles) ask(c, ch, roles, mine, 1, x);
    for (u32 i = 0; i < ch.tiles; i++) {
      copy(x.own, x.next);
      if (i + 1 < ch.tiles) {
        if (!send(c, ch, roles, i + 1, i + 1, x)) return false;
        if (i + 2 < ch.tiles) ask(c, ch, roles, mine, i + 2, x);
      }
      if (Gather) {
        if ((from != 0 || i == 0) && !gathered(c, ch, roles, from, i, i)) return false;
      } else if ((roles.owner || i == 0) && !combined(c, ch, roles, i, i, x.own)) {
        return false;
      }
      if (roles.owner && roles.gives) keep(c, ch, result, i, x.own);
      credit(c, ch, i);
    }
    return true;
  }

  // both does two shots in one launch: operands go to the owners of the parts, and each tile of a result goes to the
  // takers when it is combined. A round has two tiles of the rings, an operand and a result.
  //
  // With Head, tile 0 of each channel tells the peers where they may write. If all ranks are open, results go
  // straight there, a round has one tile of the rings, and a last tile says that all is there. M is not used
  // otherwise.
  //
  // A lane that has failed returns from the kernel: the others may be at a credit, where they would wait for it.
  template <bool Head> DEVICE void both(const Call &c, const Move *m) {
    Channel ch = here();
    const u32 dealt = deal(c, ch);
    if (ch.w >= dealt) return;
    const Roles roles(c);
    const u32 part = roles.part(c.rank);
    const Part mine = from(c, ch, part), result = to(c, ch, part);
    const u32 channels = dealt < ch.all ? dealt : ch.all;
    Many x;
    ask(c, ch, roles, mine, 0, x);
    if (!begin(c, ch)) return;
    bool open = false;
    u64 out = 0; // a lane has where the peer of its number may be written to
    if constexpr (Head) {
      if (!tell(c, ch, *m) || !send(c, ch, roles, 0, 1, x) || !hear(c, ch, *m, out, open)) return stay(m->told);
    } else {
      if (!send(c, ch, roles, 0, 0, x) || !greet(c, ch, roles)) return;
    }
    const u32 base = Head ? 1 : 0, each = open ? 1 : 2, told = Head ? m->told : 0;
    if (1 < ch.tiles) ask(c, ch, roles, mine, 1, x);
    u32 credited = 0;
    u64 looked = 0;
    for (u32 i = 0;; i++) {
      copy(x.own, x.next);
      if (i + 1 < ch.tiles) {
        if (!send(c, ch, roles, i + 1, base + (i + 1) * each, x)) return stay(told);
        if (i + 2 < ch.tiles) ask(c, ch, roles, mine, i + 2, x);
      }
      const u32 taken = base + i * each + 1;
      if (roles.owner && i < ch.tiles) {
        if (!combined(c, ch, roles, i, taken - 1, x.own)) return stay(told);
        // Results travel as data, and must not be all ones either.
        free(x.own);
        if (roles.taker) keep(c, ch, result, i, x.own);
        if (open) {
          if (!all(there(c, ch, *m, i, looked))) return stay(told);
#pragma unroll 1
          for (u32 k = 1; k < c.ranks; k++) {
            const u32 peer = after(c, k);
            Part theirs = result;
            theirs.p = (u8 *)((u64)from((u32)(out >> 32), peer) << 32 | from((u32)out, peer));
            if (roles.tells >> peer & 1) keep(c, ch, theirs, i, x.own);
          }
        } else if (!push(c, ch, taken, vecs(ch, i), x.own, roles.tells)) {
          return stay(told);
        }
      }
      // The results of a round are taken after the operands of the next one.
      if (!open && i > 0 && !gathered(c, ch, roles, roles.told, i - 1, taken - 2)) return stay(told);
      if (i + open >= ch.tiles) break;
      // The first round needs a credit of its own if the last one of the call before is as old as it can be.
      if (taken - credited >= c.depth / 2 || (i == 0 && !open && 2 < ch.tiles)) publish(c, ch, ch.cur + (credited = taken));
    }
    u32 count = base + ch.tiles * each;
    if (open) {
      // The end is told for all lanes.
      syncWarp();
      asm volatile("fence.acq_rel.sys;" : : : "memory");
      if (!all(true)) return stay(told);
      Vec v[U];
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = (Vec)(1);
      bool ended = push(c, ch, count, 1, v);
      for (u32 k = 1; ended && k < c.ranks; k++) ended = take(c, ch, after(c, k), count, 1, v);
      asm volatile("fence.acq_rel.sys;" : : : "memory");
      if (!all(ended)) return stay(told);
      count++;
    }
    // The next call counts on a credit of less than half a ring ago, or on a call that was shorter than that.
    if (count - credited >= c.depth / 2) publish(c, ch, ch.cur + count);
    end(c, ch, count, channels);
  }

  // greet gives tile 0 to the peers that get nothing else from this rank, and takes it from those of which it gets
  // nothing else. So every call takes something from every peer. It returns false if the call has failed.
  DEVICE bool greet(const Call &c, Channel &ch, const Roles &roles) {
    const u32 to = roles.others & ~(roles.to | roles.tells), from = roles.others & ~(roles.from | roles.told);
    Vec v[U];
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = (Vec)(1);
#pragma unroll 1
    for (u32 p = 0; p < c.ranks; p++)
      if (to >> p & 1) fillSlot(c, ch, p, slot(c, ch, ch.cur), 1, v, NoKey);
#pragma unroll 1
    for (u32 first = 0; first < c.ranks; first += crowd) {
      u32 who[crowd];
      Vec heard[crowd][U];
      if (!hears(c, ch, from, first, who, heard)) return false;
    }
    return true;
  }

  // hears takes one vector of tile 0 from those of a set of peers that are among some ranks from first on. Who says
  // which they are.
  DEVICE bool hears(const Call &c, const Channel &ch, u32 peers, u32 first, u32 *who, Vec (*v)[U]) {
    u32 n[crowd];
#pragma unroll
    for (u32 k = 0; k < crowd; k++) who[k] = peers >> (first + k) & 1 ? first + k : c.rank, n[k] = 1;
    return takes<crowd>(c, ch, who, 0, n, v);
  }

  // there reports that no peer has failed, before tile i is written to them. It looks every so many tiles, and when
  // this rank may have waited for long: a peer that has failed stays for a while only.
  DEVICE bool there(const Call &c, const Channel &ch, const Move &m, u32 i, u64 &looked) {
    const u64 t = now();
    if (i % lookTiles != 0 && t - looked < lookTime) return true;
    looked = t;
    u32 over = 0;
#pragma unroll
    for (u32 k = 1; k < maxRanks; k++)
      if (k < c.ranks && get(m.failed[after(c, k)]) != 0) over = k;
    if (over != 0) report(c.host, c.failed, Aborted, after(c, over), ch.w, ch.cur + i);
    return over == 0;
  }

  // tell gives each peer tile 0: where it may write, and whether all may.
  DEVICE bool tell(const Call &c, Channel &ch, const Move &m) {
    if (!room(c, ch, ch.cur)) return false;
    for (u32 k = 1; k < c.ranks; k++) {
      const u64 into = m.into[after(c, k)];
      Vec v[U];
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = (Vec){(u32)into, (u32)(into >> 32), m.open, 0};
      give(c, ch, after(c, k), slot(c, ch, ch.cur), 1, v);
    }
    return true;
  }

  // hear takes tile 0 of the peers: whether all are open, and then where this rank may write. A lane gets that of the
  // peer of its number. Lane 0 has heard, and the others learn it from there.
  DEVICE bool hear(const Call &c, Channel &ch, const Move &m, u64 &out, bool &open) {
    open = m.open != 0;
#pragma unroll 1
    for (u32 first = 0; first < c.ranks; first += crowd) {
      u32 who[crowd];
      Vec v[crowd][U];
      if (!all(hears(c, ch, (1u << c.ranks) - 1, first, who, v))) return false;
#pragma unroll
      for (u32 k = 0; k < crowd; k++) {
        if (who[k] == c.rank) continue;
        const u64 into = (u64)from(v[k][0].y, 0) << 32 | from(v[k][0].x, 0);
        open = open && from(v[k][0].z, 0) != 0;
        if (open && into != 0 && ch.lane == who[k]) out = get(m.maps[ch.lane] + (into >> 48) - 1) + (into & 0xffffffffffffull);
      }
    }
    return true;
  }

  // stay is what a lane does before it returns whose call has failed, if peers may write to this rank.
  DEVICE void stay(u32 told) {
    if (told != 0) linger();
  }

  // spread does an all_reduce of two ranks, of floats, or a reduce. Tile 0 of each channel tells where the peer may
  // write, or read. If both are open, a last tile says that all is there, or has been read.
  //
  // A lane that has failed returns from the kernel: the others may be at a credit, where they would wait for it.
  DEVICE void spread(const Spread &s) {
    const Call &c = s.one;
    const u32 owners = c.roles >> maxRanks & 3;
    const bool reads = owners != 3, root = owners >> c.rank & 1;
    // A peer must neither write nor read any more when this rank's kernel has failed and ended. Nobody reads from a root.
    const u32 told = reads && root ? 0 : s.open;
    Channel head = here();
    if (!all(begin(c, head))) return;
    head.tiles = head.last = 1;
    Vec v[U];
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = (Vec){(u32)s.into, (u32)(s.into >> 32), s.open, 0};
    // Operands are there before the peer is told so.
    if (reads) asm volatile("fence.acq_rel.sys;" : : : "memory");
    if (!all(push(c, head, 0, 1, v) && take(c, head, 1 - c.rank, 0, v))) return stay(told);
    const u64 into = (u64)from(v[0].y, 0) << 32 | from(v[0].x, 0);
    const bool open = s.open != 0 && from(v[0].z, 0) != 0;
    u8 *theirs = open && into != 0 ? (u8 *)get(s.maps + (into >> 48) - 1) + (into & 0xffffffffffffull) : nullptr;
    Channel ch = head;
    ch.cur = head.cur + 1;
    u32 count = 0;
    if (open && reads) {
      if (root && !pull(c, head, theirs, s.failed)) return;
      count = 1;
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = (Vec)(1);
      if (!all(root ? push(c, head, count, 1, v) : take(c, head, 1 - c.rank, count, v))) return stay(told);
      credit(c, head, count);
      count++;
    } else if (open) {
      deal(s.two, ch);
      count = 1 + ch.tiles;
      if (!tiles<true>(s.two, ch, theirs + (c.rank == 0 ? 0 : s.two.part), s.failed)) return stay(told);
      // The end is told for all lanes.
      syncWarp();
      asm volatile("fence.acq_rel.sys;" : : : "memory");
      if (!all(true)) return stay(told);
      Channel tail = head;
      tail.limit = ch.limit;
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = (Vec)(1);
      const bool ended = push(c, tail, count, 1, v) && take(c, tail, 1 - c.rank, count, v);
      asm volatile("fence.acq_rel.sys;" : : : "memory");
      if (!all(ended)) return stay(told);
      credit(c, head, count);
      count++;
    } else {
      deal(c, ch);
      count = 1 + ch.tiles;
      if (!tiles<true>(c, ch, nullptr, nullptr)) return stay(told);
    }
    end(c, head, count, head.all);
  }

  // So many channels of a root read, and take some tiles in turn. When all 2048 did, each with tiles of its own, a reduce
  // of 256 MiB took three times as long.
  static const u32 readers = 256;

  // pull combines this rank's operand with the peer's, which it reads. It returns false, to all lanes, if the peer has
  // failed: then its operand may have changed. It looks before every fourth turn, because the peer may free its memory. A
  // look before each turn costs 2 % of the call.
  DEVICE bool pull(const Call &c, const Channel &head, u8 *theirs, const u32 *failed) {
    // They are of all blocks: the first 16 blocks alone are up to 5 % slower.
    const u32 each = head.all > readers ? head.all / readers : 1, warps = (head.all + each - 1) / each;
    if (head.w % each != 0) return true;
    Channel ch = head;
    ch.first = 0;
    ch.step = tile * 16;
    ch.tiles = (u32)((c.part + tile * 16 - 1) / (tile * 16));
    const u32 parts = (ch.tiles + lookTiles - 1) / lookTiles;
    const Part mine = from(c, ch, c.rank), result = to(c, ch, 0);
    Part other = mine;
    other.p = theirs;
    // One lane has heard, and all read.
    syncWarp();
    asm volatile("fence.acq_rel.sys;" : : : "memory");
    const u32 batch = 2; // tiles under way
    u32 over = ch.lane == 0 ? get(failed) : 0, then = turn(c, head, 1 - c.rank, parts, warps);
    for (u32 k = 0;; k++) {
      const u32 nth = from(over != 0 ? parts : then, 0);
      if (nth >= parts) break;
      if (ch.lane == 0 && k % 4 == 0) over = get(failed);
      then = turn(c, head, 1 - c.rank, parts, warps);
      const u32 end = nth * lookTiles + lookTiles < ch.tiles ? nth * lookTiles + lookTiles : ch.tiles;
      for (u32 i = nth * lookTiles; i < end; i += batch) {
        Vec own[batch][U], x[batch][U];
#pragma unroll
        for (u32 b = 0; b < batch; b++)
          if (i + b < end) fetch(c, ch, other, i + b, x[b]);
#pragma unroll
        for (u32 b = 0; b < batch; b++)
          if (i + b < end) fetch(c, ch, mine, i + b, own[b]);
#pragma unroll
        for (u32 b = 0; b < batch; b++) {
          if (i + b >= end) continue;
          prepare(c, own[b], true);
          prepare(c, x[b], true);
          add<Family, U>(c.type, own[b], x[b]);
          average<Family, U>(c.type, own[b], c.by, c.factor);
          keep(c, ch, result, i + b, own[b]);
        }
      }
    }
    // All has been read before the peer is told so, and before this rank looks.
    asm volatile("fence.acq_rel.sys;" : : : "memory");
    syncWarp();
    if (!any(get(failed) != 0)) return true;
    report(c.host, c.failed, Aborted, 1 - c.rank, ch.w, ch.cur);
    return false;
  }

  DEVICE u32 from(u32 v, u32 lane) { return (u32)__nvvm_shfl_sync_idx_i32(0xffffffff, (i32)v, (i32)lane, 31); }

  // turn takes the next part of what goes to a peer or comes from there, for lane 0 of one of so many warps. The
  // counters are behind the state of the channels. Each of the warps asks until there is no part left. When the last one
  // has heard that, the counter is 0 again.
  DEVICE u32 turn(const Call &c, const Channel &ch, u32 peer, u32 parts, u32 warps) {
    u32 mine = 0;
    if (ch.lane == 0)
      asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(mine) : "l"((u32 *)(c.state + c.channels) + peer), "r"(parts + warps - 1) : "memory");
    return mine;
  }

  // credit tells the peers each half of a ring that a channel has taken, after tile i. Before it may be a head. With
  // often = 2 it does so each quarter.
  DEVICE void credit(const Call &c, const Channel &ch, u32 i, u32 head = 0, u32 often = 1) {
    if (((i + head + 1) & ((c.depth >> often) - 1)) == 0) publish(c, ch, ch.cur + i + 1);
  }

  // publish tells the peers how many tiles a channel has taken.
  DEVICE void publish(const Call &c, const Channel &ch, u32 taken) {
    syncWarp();
    if (ch.lane < c.ranks && ch.lane != c.rank) release(c.peers[ch.lane].credit + ch.w * maxRanks, taken);
  }

  // end notes the tiles of the call. So many channels come to it. Calls of few tiles give no credit. One that is 2^31
  // tiles old would seem to be new, so it is renewed before.
  DEVICE void end(const Call &c, const Channel &ch, u32 tiles, u32 channels) {
    if (__builtin_expect((ch.cur ^ (ch.cur + tiles)) >> 30 != 0, 0)) publish(c, ch, ch.cur + tiles);
    syncWarp();
    if (ch.lane == 0) c.state[ch.w] = (u64)ch.cur << 32 | (ch.cur + tiles);
    finish(c, ch.lane, channels);
  }
};

#ifdef KERNELS_move

// unlike reports that a peer sends another length than this rank expects.
OUTLINE void unlike(u32 *host, u32 *failed, u32 peer, u32 channel, u32 tile) {
  report(host, failed, Unlike, peer, channel, tile);
}

// Mover is what a kernel does that moves bytes. Tile 0 of every channel goes to all peers: the
// length of what this rank sends there, the longest span that it knows of, and where the peer may write.
// The ranks' longest one says how many tiles the call counts, on all of them, also where they do not travel.
//
// If all ranks are open, and the spans are long, the tiles behind the first ones go straight to where they
// are to be. Such a call counts three tiles: the third says that all is there.
template <int U, int N> struct Mover {
  typedef Kernel<Others, U, N, true> K;

  // fewTiles is up to how many tiles a channel go through the rings: what is written straight has to be fenced, and its
  // end told. All channels do the same, because each one writes tiles of all of them.
  static const u32 fewTiles = 8;

  // So many channels of all ranks write to a rank at a time if a span, counted once for each peer, is longer than
  // farBytes. With more of them writes were three times slower.
  static const u32 fewWriters = N == 2 ? 256 : 192;
  static const u64 farBytes = (N == 2 ? 96 : 24) << 20;

  DEVICE u32 tilesOf(const Channel &ch, u64 bytes) {
    u32 dealt = (u32)((bytes + K::tile * 16 - 1) / (K::tile * 16));
    return dealt > ch.w ? (dealt - ch.w + ch.all - 1) / ch.all : 0;
  }

  // of returns what a channel has of a span. Its tile 0 comes after the call's.
  DEVICE Channel of(const Channel &ch, u64 bytes) {
    Channel x = ch;
    x.cur = ch.cur + 1;
    x.tiles = tilesOf(ch, bytes);
    if (x.tiles == 0) return x;
    const u64 left = (bytes - K::at(x, x.tiles - 1) + 15) / 16;
    x.last = left < K::tile ? (u32)left : K::tile;
    return x;
  }

  DEVICE typename K::Part part(const Call &c, const Channel &x, u8 *p, Span s) {
    typename K::Part a = {p + s.at, s.bytes, 0};
    if ((c.align & 15) == 0) a.whole = x.tiles - (K::at(x, x.tiles - 1) + K::tile * 16 > s.bytes);
    return a;
  }

  // slot is where tile i of the call is in a ring.
  DEVICE u64 slot(const Call &c, const Channel &ch, u32 i) { return K::slot(c, ch, ch.cur + i); }

  // room waits until all peers have room for tile i. It returns false if the call has failed.
  DEVICE bool room(const Call &c, Channel &ch, u32 i) { return K::room(c, ch, ch.cur + i); }

  // push gives tile i of each span to its peer.
  DEVICE bool push(const Move &m, Channel &ch, u32 i) {
    const u32 ranks = N == 2 ? 2 : m.c.ranks;
    u32 peer = m.c.rank;
    bool free = false;
    for (u32 k = 1; k < ranks; k++) {
      peer = peer + 1 == ranks ? 0 : peer + 1;
      Channel x = of(ch, m.send[peer].bytes);
      if (i >= x.tiles) continue;
      if (!free && !room(m.c, ch, i + 1)) return false;
      free = true;
      Vec v[U];
      K::fetch(m.c, x, part(m.c, x, (u8 *)m.c.src, m.send[peer]), i, v);
      K::give(m.c, x, peer, slot(m.c, ch, i + 1), K::vecs(x, i), v);
    }
    return true;
  }

  // listen waits for tile i of a peer with one lane that looks now and then. It returns the same to all lanes.
  DEVICE bool listen(const Call &c, const Channel &x, u32 peer, u32 i) {
    bool ok = true;
    if (x.lane == 0) {
      const Vec *at = c.slots + K::slotOf(c, x, peer, i) * K::slotVecs;
      Wait wait = {0, 0};
      for (Vec v = get(at); ok && (v.x == Free || v.y == Free || v.z == Free || v.w == Free); v = get(at)) {
        pause(100);
        ok = !Wait::over(wait, c, peer, x.w, x.cur + i);
      }
    }
    return __nvvm_shfl_sync_idx_i32(0xffffffff, ok, 0, 31) != 0;
  }

  // take gets tile i of each span that a peer sends, and copies this rank's own. A rank that sends little
  // has many warps that wait, and slows what comes if all their lanes look all the time. Few warps do not.
  DEVICE bool take(const Move &m, const Channel &ch, u32 i) {
    const u32 ranks = N == 2 ? 2 : m.c.ranks;
    u32 peer = m.c.rank;
    if (N == 2 || U > 1) {
      for (u32 k = 0; k < ranks; k++) {
        Channel x = of(ch, m.take[peer].bytes);
        if (i < x.tiles) {
          Vec v[U];
          if (k == 0) {
            K::fetch(m.c, x, part(m.c, x, (u8 *)m.c.src, m.send[peer]), i, v);
          } else {
            if (U > 1 && x.tiles >= 4 && x.all >= 512 && !listen(m.c, x, peer, i)) return false;
            if (!K::take(m.c, x, peer, i, v)) return false;
          }
          K::keep(m.c, x, part(m.c, x, m.c.dst, m.take[peer]), i, v);
        }
        peer = peer + 1 == ranks ? 0 : peer + 1;
      }
      return true;
    }
    // Small calls ask all peers at once.
    Vec own[U];
    const Channel mine = of(ch, m.take[peer].bytes);
    if (i < mine.tiles) {
      K::fetch(m.c, mine, part(m.c, mine, (u8 *)m.c.src, m.send[peer]), i, own);
      K::keep(m.c, mine, part(m.c, mine, m.c.dst, m.take[peer]), i, own);
    }
#pragma unroll 1
    for (u32 first = 0; first < ranks; first += K::crowd) {
      u32 who[K::crowd], n[K::crowd];
      Vec v[K::crowd][U];
#pragma unroll
      for (u32 k = 0; k < K::crowd; k++) {
        who[k] = m.c.rank, n[k] = 0;
        if (first + k >= ranks || first + k == m.c.rank) continue;
        const Channel x = of(ch, m.take[first + k].bytes);
        if (i >= x.tiles) continue;
        who[k] = first + k, n[k] = K::vecs(x, i);
      }
      if (!K::template takes<K::crowd>(m.c, ch, who, i + 1, n, v)) return false;
#pragma unroll
      for (u32 k = 0; k < K::crowd; k++) {
        if (n[k] == 0) continue;
        const Channel x = of(ch, m.take[who[k]].bytes);
        K::keep(m.c, x, part(m.c, x, m.c.dst, m.take[who[k]]), i, v[k]);
      }
    }
    return true;
  }

  // tell gives all peers tile 0: a vector of lane 0, and one of lane 1.
  DEVICE bool tell(const Move &m, Channel &ch) {
    if (!room(m.c, ch, 0)) return false;
    const u32 ranks = N == 2 ? 2 : m.c.ranks;
    u32 peer = m.c.rank;
    for (u32 k = 1; k < ranks; k++) {
      peer = peer + 1 == ranks ? 0 : peer + 1;
      const u64 bytes = m.send[peer].bytes, into = m.into[peer], part = m.c.part;
      const u32 open = m.open;
      const u64 a = ch.lane == 0 ? bytes : into, b = ch.lane == 0 ? part : open;
      Vec v[U];
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = (Vec){(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
      K::give(m.c, ch, peer, slot(m.c, ch, 0), 2, v);
    }
    return true;
  }

  // hear takes tile 0 of all peers, if all is well so far. It returns false if the call has failed, and what the peers
  // have told: the same to all lanes, but for into, of which a lane has what the peer of its number has told.
  DEVICE bool hear(const Move &m, const Channel &ch, bool ok, u64 &longest, u64 &into, bool &open) {
    const u32 ranks = N == 2 ? 2 : m.c.ranks;
    longest = m.c.part;
    open = m.open != 0;
    if (!all(ok)) return false;
    const u32 atOnce = N == 2 ? 1 : K::crowd;
#pragma unroll 1
    for (u32 first = 0; first < ranks; first += atOnce) {
      u32 who[atOnce], n[atOnce];
      Vec v[atOnce][U];
      if constexpr (N == 2) {
        if ((who[0] = first) == m.c.rank) continue;
        ok = K::take(m.c, ch, first, 0, v[0]);
      } else {
#pragma unroll
        for (u32 k = 0; k < atOnce; k++) who[k] = first + k < ranks ? first + k : m.c.rank, n[k] = 2;
        ok = K::template takes<K::crowd>(m.c, ch, who, 0, n, v);
      }
#pragma unroll
      for (u32 k = 0; k < atOnce; k++) {
        if (who[k] == m.c.rank) continue;
        const u32 peer = who[k];
        if (ok && ch.lane == 0 && ((u64)v[k][0].y << 32 | v[k][0].x) != m.take[peer].bytes) {
          unlike(m.c.host, m.c.failed, peer, ch.w, ch.cur);
          ok = false;
        }
        if (!all(ok)) return false;
        u64 theirs = (u64)K::from(v[k][0].w, 0) << 32 | K::from(v[k][0].z, 0);
        if (theirs > longest) longest = theirs;
        const u64 told = (u64)K::from(v[k][0].y, 1) << 32 | K::from(v[k][0].x, 1);
        if (ch.lane == peer) into = told;
        open = open && K::from(v[k][0].z, 1) != 0;
      }
    }
    return true;
  }

  // lay puts tile i of a span at another rank.
  DEVICE void lay(const Channel &x, u8 *to, u64 bytes, u32 i, const Vec *v) {
    u64 o = K::at(x, i) + x.lane * 16;
#pragma unroll
    for (int u = 0; u < U; u++, o += lanes * 16) {
      if (__builtin_expect(o + 16 <= bytes, 1)) store((Vec *)(to + o), v[u]);
      else keepPart<u8>(to + o, reach(bytes, o), true, v[u]);
    }
  }

  // write brings a span to where a peer has told: the tiles behind the first one of each channel. Few writers take
  // some tiles in turn: with shares of equal size the slowest one ends 6 % later. For many writers the turns cost
  // more than that. It returns false, to all lanes, if the peer has failed.
  DEVICE bool write(const Move &m, const Channel &ch, u32 peer, u64 into) {
    const u64 bytes = m.send[peer].bytes;
    const u32 dealt = (u32)((bytes + K::tile * 16 - 1) / (K::tile * 16));
    const bool far = bytes * (N == 2 ? 1 : m.c.ranks - 1) > farBytes;
    const u32 few = fewWriters / m.writers;
    const u32 writers = far && few < ch.all ? few : ch.all;
    if (dealt <= ch.all || ch.w >= writers) return true;
    Channel x = ch;
    x.first = (u64)ch.all * (K::tile * 16);
    x.step = K::tile * 16;
    x.tiles = dealt - ch.all;
    const bool turns = writers <= few;
    // At least 8 turns a writer, if that leaves two tiles a turn.
    const u32 share = turns ? x.tiles / (8 * writers) : 0;
    const u32 some = share > lookTiles ? lookTiles : share < 2 ? 2 : share;
    const u32 parts = (x.tiles + some - 1) / some;
    const typename K::Part a = part(m.c, x, (u8 *)m.c.src, m.send[peer]);
    const u32 *failed = m.failed[peer];
    u8 *to = (u8 *)get(m.maps[peer] + (into >> 48) - 1) + (into & 0xffffffffffffull);
    u32 over = get(failed), looked = lookTiles;
    const u32 batch = 8 / U; // tiles under way
    Vec v[batch][U];
    u32 then = turns ? K::turn(m.c, ch, peer, parts, writers) : ch.w;
    for (;;) {
      const u32 mine = K::from(then, 0);
      if (mine >= parts) return true;
      then = turns ? K::turn(m.c, ch, peer, parts, writers) : mine + writers;
      looked += some;
      if (looked >= lookTiles) {
        // The lanes leave together: they learn from each other what is next.
        if (any(over != 0)) {
          report(m.c.host, m.c.failed, Aborted, peer, x.w, x.cur);
          return false;
        }
        over = get(failed), looked = 0;
      }
      const u32 end = mine * some + some < x.tiles ? mine * some + some : x.tiles;
      for (u32 i = mine * some; i < end; i += batch) {
#pragma unroll
        for (u32 b = 0; b < batch; b++)
          if (i + b < end) K::fetch(m.c, x, a, i + b, v[b]);
#pragma unroll
        for (u32 b = 0; b < batch; b++)
          if (i + b < end) lay(x, to, bytes, i + b, v[b]);
      }
    }
  }

  // straight does a call whose ranks are open, after tile 0. The tiles of data that were pushed with it are
  // taken, and all others are written where they are to be. A lane that has failed returns: the others may be at a
  // credit, or listen, where they would wait for it.
  DEVICE bool straight(const Move &m, Channel &ch, u64 into) {
    const u32 ranks = N == 2 ? 2 : m.c.ranks;
    K::credit(m.c, ch, 0);
    if (!take(m, ch, 0)) return false;
    K::credit(m.c, ch, 1);
    // A lane has from another one where a peer may write.
    if (!all(true)) return false;
    bool ok = true;
    u32 peer = m.c.rank;
    for (u32 k = 1; k < ranks; k++) {
      peer = peer + 1 == ranks ? 0 : peer + 1;
      const u64 to = (u64)K::from((u32)(into >> 32), peer) << 32 | K::from((u32)into, peer);
      ok = ok && write(m, ch, peer, to);
    }
    const Span own = m.take[m.c.rank];
    const Channel x = of(ch, own.bytes);
    for (u32 i = 1; ok && i < x.tiles; i++) {
      Vec v[U];
      K::fetch(m.c, x, part(m.c, x, (u8 *)m.c.src, m.send[m.c.rank]), i, v);
      K::keep(m.c, x, part(m.c, x, m.c.dst, own), i, v);
    }
    syncWarp();
    asm volatile("fence.acq_rel.sys;" : : : "memory");
    // The end is told for all lanes.
    if (!all(ok && room(m.c, ch, 2))) return false;
    ch.last = 1;
    peer = m.c.rank;
    for (u32 k = 1; k < ranks; k++) {
      peer = peer + 1 == ranks ? 0 : peer + 1;
      Vec v[U];
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = (Vec)(1);
      K::give(m.c, ch, peer, slot(m.c, ch, 2), 1, v);
    }
    peer = m.c.rank;
    for (u32 k = 1; ok && k < ranks; k++) {
      peer = peer + 1 == ranks ? 0 : peer + 1;
      Vec v[U];
      ok = all(listen(m.c, ch, peer, 2) && K::take(m.c, ch, peer, 2, v));
    }
    asm volatile("fence.acq_rel.sys;" : : : "memory");
    if (!ok) return false;
    K::credit(m.c, ch, 2);
    return true;
  }

  DEVICE void run(const Move &m) {
    const Call &c = m.c;
    Channel ch = K::here();
    ch.first = (u64)ch.w * (K::tile * 16);
    ch.step = (u64)ch.all * (K::tile * 16);
    const u64 state = get(c.state + ch.w);
    ch.cur = (u32)state;
    ch.limit = (u32)(state >> 32) + c.depth;
    ch.tiles = 1, ch.last = 2; // tile 0 is two vectors

    u64 longest, into = 0;
    bool open;
    const bool well = get(c.failed) == 0;
    bool ok = hear(m, ch, well && tell(m, ch) && push(m, ch, 0), longest, into, open);
    u32 count = 1 + tilesOf(ch, longest);
    if (U > 1 && ok && open && longest > (u64)fewTiles * ch.all * K::tile * 16) {
      if constexpr (U > 1) ok = straight(m, ch, into);
      count = 3;
    } else {
      for (u32 i = 1; ok && i < count; i++) {
        K::credit(c, ch, i - 1);
        ok = push(m, ch, i) && take(m, ch, i - 1);
      }
      if (ok) K::credit(c, ch, count - 1);
    }
    if (!ok) {
      // Peers write nothing for a call of which they were told nothing.
      if (well && m.told != 0) linger();
      return;
    }
    K::end(c, ch, count, ch.all);
  }
};

#endif

// Each text has kernels for two ranks or for more. Tiles are of one vector a lane, or of 4 with two ranks and 2 with
// more. What is seldom wanted has no large tiles.
#define RUN(name, Family, U, N, Gather) \
  KERNEL c10d_direct_##name(Call c) { Kernel<Family, U, N, Gather>::run(c); }
#define BOTH(name, Family, U, Gather) \
  KERNEL c10d_direct_##name(Call c) { Kernel<Family, U, 0, Gather>::template both<false>(c, nullptr); }
#define SPREAD(name, Family, Gather) \
  KERNEL c10d_direct_##name(Move m) { Kernel<Family, 2, 0, Gather>::template both<true>(m.c, &m); }
#define MOVE(name, U, N) \
  KERNEL c10d_direct_##name(Move m) { Mover<U, N>::run(m); }

#if defined KERNELS_gradients && defined TWO
RUN(gradients_small_2, Gradients, 1, 2, false)
RUN(gradients_large_2, Gradients, 4, 2, false)
KERNEL c10d_direct_gradients_spread_2(Spread s) { Kernel<Gradients, 4, 2, false>::spread(s); }
#elif defined KERNELS_gradients
RUN(gradients_small_n, Gradients, 1, 0, false)
RUN(gradients_large_n, Gradients, 2, 0, false)
BOTH(gradients_both_small_n, Gradients, 1, false)
BOTH(gradients_both_large_n, Gradients, 2, false)
SPREAD(gradients_spread_n, Gradients, false)
#elif defined KERNELS_others && defined TWO
RUN(others_small_2, Others, 1, 2, false)
RUN(others_large_2, Others, 4, 2, false)
#elif defined KERNELS_others
RUN(others_small_n, Others, 1, 0, false)
BOTH(others_both_small_n, Others, 1, false)
#elif defined KERNELS_gather && defined TWO
RUN(gather_small_2, Others, 1, 2, true)
RUN(gather_large_2, Others, 4, 2, true)
#elif defined KERNELS_gather
RUN(gather_small_n, Others, 1, 0, true)
#elif defined KERNELS_move && defined TWO
MOVE(move_small_2, 1, 2)
MOVE(move_large_2, 4, 2)
#elif defined KERNELS_move
MOVE(move_small_n, 1, 0)
MOVE(move_large_n, 2, 0)
BOTH(move_both_small_n, Others, 1, true)
SPREAD(move_spread_n, Others, true)
#endif
