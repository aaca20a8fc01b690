// The kernel of a ring, compiled by backend/cuda/ptx.sh. direct.cu has the arithmetic and the looks of waits.
//
// It is one kernel for all dtypes: the protocol takes most of its text, and moves bytes. Only the arithmetic differs.
//
// A warp is a channel. Each rank gets tiles from the rank before it in the ring, and sends tiles to the next one. A
// slot has room for a tile. Beside each slot is a flag: the number of the tile that is in it. Nobody tells when a
// slot is free, because a channel has as many slots as there are ranks. doc.go has the rules.

#include "direct.cu"

static const u32 mostRanks = 16; // of a ring

// Ring is the parameters of a launch. ring.go has the same layout.
struct Ring {
  const u8 *src;
  u8 *dst;
  u64 part;         // bytes of the longest part
  const Vec *slots; // where the tiles of the rank before come
  const u32 *flags; // of each slot: the number of its tile, from 1 on
  Vec *nextSlots;   // the same at the next rank
  u32 *nextFlags;
  u32 *state;       // of a channel: tiles before this call
  u32 *failed;      // set when a call has failed; the later ones do nothing. After it: the channels that have ended
  u32 *host;        // the abort word, the report and the number of the last call that has ended, in the host's memory
  u64 factor;       // of scaled calls, and 1 / by if that is exact; as bits
  u64 limit;        // how long a wait may take, in ns
  u32 ranks, place; // in the order of the ring
  u32 before;       // the rank at the place before
  u32 channels;     // that have a slot of each number
  u32 depth;        // slots of a channel, a power of two: as many as ranks, or more
  u32 op;
  u32 by;     // what the outcome is divided by
  u32 scaled; // operands are multiplied by factor
  u32 align;  // all addresses and offsets of parts, or-ed
  u32 number; // of the call, for the host; 0: it is not told
  u32 shots;  // 1: parts are combined, 2: they are gathered, 3: both
  u32 type;   // of the elements
  Span from[mostRanks], to[mostRanks]; // the parts of src and of dst, by place
};
static_assert(sizeof(Ring) == 656, "ring.go counts on it");

// Every is all dtypes.
struct Every {
  template <class F> DEVICE void each(u32 type, F f) {
    if (type <= Float16) Gradients::each(type, f);
    else Others::each(type, f);
  }
};

// await returns when a flag has the number of a tile; false if the call has failed.
OUTLINE bool await(const u32 *flag, u32 t, u32 *host, u32 *failed, u64 limit, u32 peer, u32 channel) {
  u64 since = 0;
  for (u32 polls = 1; acquire(flag) != t; polls++) {
    if ((polls & 1023) != 0) {
      if (polls > eagerPolls) pause(1000);
      continue;
    }
    const u64 time = now();
    if (since == 0) since = time;
    if (look(host, failed, limit, time - since, peer, channel, t) != 0) return false;
  }
  return true;
}

// Ringer is what the kernel does.
struct Ringer {
  static const int U = 4;
  static const u32 tile = U * lanes; // vectors

  // Warp is what a warp has at hand.
  struct Warp {
    u32 w, lane;
    u32 t; // tiles that it has sent
  };

  // slot is where tile t of a channel is: what the channels send at about the same time lies side by side.
  DEVICE u64 slot(const Ring &c, const Warp &x, u32 t) { return (u64)(t & (c.depth - 1)) * c.channels + x.w; }

  // give sends the next tile, of n vectors.
  DEVICE void give(const Ring &c, Warp &x, u32 n, const Vec *v) {
    const u64 s = slot(c, x, x.t);
#pragma unroll
    for (int u = 0; u < U; u++)
      if (x.lane + u * lanes < n) put(c.nextSlots + s * tile + x.lane + u * lanes, v[u]);
    syncWarp(); // all lanes have written this tile, and have read those before
    x.t++;
    if (x.lane == 0) {
      asm volatile("fence.acq_rel.sys;" : : : "memory");
      put(c.nextFlags + s, x.t);
    }
  }

  // take gets the tile of the number that was sent last. It returns false if the call has failed.
  DEVICE bool take(const Ring &c, const Warp &x, u32 n, Vec *v) {
    const u64 s = slot(c, x, x.t - 1);
    bool ok = true;
    if (x.lane == 0) ok = await(c.flags + s, x.t, c.host, c.failed, c.limit, c.before, x.w);
    if (__nvvm_shfl_sync_idx_i32(0xffffffff, ok, 0, 31) == 0) return false;
    syncWarp(); // what lane 0 has acquired is there for all
#pragma unroll
    for (int u = 0; u < U; u++)
      if (x.lane + u * lanes < n) v[u] = get(c.slots + s * tile + x.lane + u * lanes);
    return true;
  }

  // whole reports whether all vectors of a tile are there. At is where this lane's first one is.
  DEVICE bool whole(const Ring &c, Span s, u64 at) {
    return __builtin_expect((c.align & 15) == 0 && at + tile * 16 <= s.bytes + lane() * 16, 1);
  }

  // fetch gets a tile of a part. Beyond its end are zeros.
  DEVICE void fetch(const Ring &c, Span s, u64 at, Vec *v) {
    const u8 *p = c.src + s.at + at;
    if (whole(c, s, at)) {
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = load((const Vec *)p + u * lanes);
      return;
    }
#pragma unroll
    for (int u = 0; u < U; u++, p += lanes * 16, at += lanes * 16)
      v[u] = fetchPart<u8>(p, reach(s.bytes, at), (c.align & 3) == 0);
  }

  // keep puts a tile to a part.
  DEVICE void keep(const Ring &c, Span s, u64 at, const Vec *v) {
    u8 *p = c.dst + s.at + at;
    if (whole(c, s, at)) {
#pragma unroll
      for (int u = 0; u < U; u++) store((Vec *)p + u * lanes, v[u]);
      return;
    }
#pragma unroll
    for (int u = 0; u < U; u++, p += lanes * 16, at += lanes * 16)
      keepPart<u8>(p, reach(s.bytes, at), (c.align & 3) == 0, v[u]);
  }

  // run goes round the ring with one tile of each part at a time. In step s of a combination a rank adds its operand to
  // the part s + 1 places before it. It ends with its own part. In step s of a gather it gets the part s places before.
  DEVICE void run(const Ring &c) {
    const u32 warps = __nvvm_read_ptx_sreg_ntid_x() / lanes, all = __nvvm_read_ptx_sreg_nctaid_x() * warps;
    Warp x;
    x.w = __nvvm_read_ptx_sreg_ctaid_x() * warps + __nvvm_read_ptx_sreg_tid_x() / lanes;
    x.lane = lane();
    const u32 dealt = (u32)((c.part + tile * 16 - 1) / (tile * 16));
    if (x.w >= dealt || get(c.failed) != 0) return;
    x.t = get(c.state + x.w);
    const u32 own = c.shots & 1 ? c.ranks - 1 : 0;          // the step with this rank's part
    const u32 last = own + (c.shots & 2 ? c.ranks - 1 : 0); // the last step
#pragma unroll 1
    for (u32 i = x.w; i < dealt; i += all) {
      const u64 at = (u64)i * (tile * 16), left = (c.part - at + 15) / 16, mine = at + x.lane * 16;
      const u32 n = left < tile ? (u32)left : tile;
#pragma unroll 1
      for (u32 s = 0; s <= last; s++) {
        u32 part = c.place + c.ranks - (s < own ? s + 1 : s - own);
        if (part >= c.ranks) part -= c.ranks;
        Vec v[U], operand[U];
        if (s <= own) fetch(c, c.from[part], mine, operand);
        if (s > 0 && !take(c, x, n, v)) return;
        if (s <= own) {
          const bool sum = s > 0 && c.op == Sum && !c.scaled;
          if (sum) add<Every, U>(c.type, v, operand);
          else
#pragma unroll
            for (int u = 0; u < U; u++) {
              if (c.scaled) operand[u] = scaled<Every>(c.type, operand[u], c.factor, 1);
              v[u] = s == 0 ? operand[u] : combine<Every>(c.type, c.op, v[u], operand[u]);
            }
          if (s == own) average<Every, U>(c.type, v, c.by, c.factor);
        }
        if (s >= own) keep(c, c.to[part], mine, v);
        if (s < last) give(c, x, n, v);
      }
    }
    syncWarp(); // all lanes have written the outcome
    if (x.lane != 0) return;
    c.state[x.w] = x.t;
    if (c.number == 0) return;
    // The last channel tells the host that the call has ended. What all of them have written comes before.
    u32 ended;
    const u32 channels = dealt < all ? dealt : all;
    asm volatile("fence.acq_rel.gpu;" : : : "memory");
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(ended) : "l"(c.failed + 1), "r"(channels - 1) : "memory");
    if (ended + 1 != channels) return;
    asm volatile("fence.acq_rel.sys;" : : : "memory");
    put(c.host + 5, c.number);
  }
};

KERNEL c10d_ring(Ring c) { Ringer::run(c); }
