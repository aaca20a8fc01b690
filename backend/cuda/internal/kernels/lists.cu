// The kernel that brings a list of tensors in order, and puts it back. backend/cuda/ptx.sh compiles it.

#define DEVICE __attribute__((device)) static inline
#define KERNEL extern "C" __attribute__((global)) void

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u32 Vec __attribute__((ext_vector_type(4)));

// Part is bytes of a tensor, and where they are in order. lists.go has the same layout.
struct Part { u8 *at; u64 off, bytes; };
struct List {
  u8 *packed;
  u64 back; // 0: from the tensors, 1: to them
  Part parts[128];
};
static_assert(sizeof(List) == 3088, "lists.go counts on it");

template <class T> DEVICE u64 copy(u8 *to, const u8 *from, u64 n, u64 first, u64 step) {
  const u64 all = n / sizeof(T);
  for (u64 i = first; i < all; i += step) ((T *)to)[i] = ((const T *)from)[i];
  return all * sizeof(T);
}

// A column of blocks copies a part.
KERNEL c10d_list(List l) {
  const u32 x = __nvvm_read_ptx_sreg_ctaid_x();
  const u64 ntid = __nvvm_read_ptx_sreg_ntid_x();
  const u64 first = __nvvm_read_ptx_sreg_ctaid_y() * ntid + __nvvm_read_ptx_sreg_tid_x();
  const u64 step = __nvvm_read_ptx_sreg_nctaid_y() * ntid;
  u8 *at = l.parts[x].at, *packed = l.packed + l.parts[x].off;
  const u64 n = l.parts[x].bytes;
  u8 *to = l.back ? at : packed;
  const u8 *from = l.back ? packed : at;
  const u64 odd = (u64)to | (u64)from;
  u64 done = 0;
  if ((odd & 15) == 0) done = copy<Vec>(to, from, n, first, step);
  else if ((odd & 3) == 0) done = copy<u32>(to, from, n, first, step);
  copy<u8>(to + done, from + done, n - done, first, step);
}
