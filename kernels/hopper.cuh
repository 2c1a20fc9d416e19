// Hopper's own instructions (sm_90a): mbarriers, TMA, wgmma.
#pragma once
#include "numbers.cuh"

// CUtensorMap, written by the driver's cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// ---- clusters and named barriers ----
DEV uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Orders no memory accesses; where it is used, the fence of `mbar_init_done` does. With .release it
// would become a GPU-wide fence.
DEV void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEV void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// Barrier `id` of `threads` threads; __syncthreads() is barrier 0.
DEV void bar_sync(int id, int threads) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- mbarriers: 8 bytes each, at shared-memory address `bar` ----
DEV void mbar_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA and to the cluster.
DEV void mbar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Initialises a pipeline's barriers [stages], by one thread of the block and before `mbar_init_done`. A stage is full
// when TMA has filled it, and free when `arrivals` threads have arrived. One thread per stage would not be faster: a
// warp's addresses are processed one by one.
DEV void mbar_init_stages(uint32_t full, uint32_t empty, int stages, int arrivals) {
#pragma unroll 1
  for (int i = 0; i < stages; i++) {
    mbar_init(full + i * 8, 1);
    mbar_init(empty + i * 8, arrivals);
  }
}
// Arrives, and lets the phase end only after `bytes` have been copied, too.
DEV void mbar_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void mbar_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(bar) : "memory"); }
// Releases a pipeline stage, so that TMA may refill it; every lane calls this. `seen`: bits of each value that the lane
// loaded from the stage. An arrival does not wait for earlier loads. If other work fills the SM's shared-memory queue,
// they may run after the next copy has landed and read its bytes (`other_work_changes_no_bit` in the tests). A proxy
// fence waits for them, but for prefetched loads as well. So the barrier's address depends on the loaded values:
// gridDim.z is 1 and the mask therefore 0, which the compiler cannot know.
DEV void release_stage(uint32_t bar, uint32_t seen) { mbar_arrive(bar + (seen & (gridDim.z - 1))); }
// Arrives at the same barrier of CTA `rank` of the cluster, at CTA scope: with .release.cluster each arrival becomes a
// membar.gpu, which makes a GEMM much slower. Cluster scope is not needed: reads of the stage are complete (by
// wgmma_wait or `release_stage`), and TMA writes it.
DEV void mbar_arrive_at(uint32_t bar, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r,%0,%1;\nmbarrier.arrive.shared::cluster.b64 _,[r];\n}" ::"r"(bar),
      "r"(rank)
      : "memory");
}
// Waits for the end of the phase with this parity. The first phase has parity 0; waiting for parity 1 of a fresh
// barrier returns at once.
DEV void mbar_wait(uint32_t bar, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// ---- tensor copies ----
//
// Coordinates from the innermost dimension outwards. Elements out of bounds read as zero and are not written. Loads
// signal barrier `bar`; stores belong to a group (`bulk_commit`).
DEV void tma_load(uint32_t dst, const TensorMap* m, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];" ::"r"(
          dst),
      "l"(m), "r"(x), "r"(y), "r"(bar)
      : "memory");
}
DEV void tma_load(uint32_t dst, const TensorMap* m, int x, int y, int z, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3,%4}],[%5];" ::
          "r"(dst),
      "l"(m), "r"(x), "r"(y), "r"(z), "r"(bar)
      : "memory");
}
DEV void tma_load(uint32_t dst, const TensorMap* m, int x, int y, int z, int w, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3,%4,%5}],[%6];" ::
          "r"(dst),
      "l"(m), "r"(x), "r"(y), "r"(z), "r"(w), "r"(bar)
      : "memory");
}
// To the same shared-memory address of every CTA in `mask`, signalling the barrier at the same address.
DEV void tma_load_multicast(uint32_t dst, const TensorMap* m, int x, int y, int z, int w, uint32_t bar, int mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0],[%1,{%2,%3,%4,%5}],[%6],%7;" ::"r"(dst),
      "l"(m), "r"(x), "r"(y), "r"(z), "r"(w), "r"(bar), "h"((short)mask)
      : "memory");
}
DEV void tma_store(const TensorMap* m, int x, int y, uint32_t src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0,{%1,%2}],[%3];" ::"l"(m), "r"(x), "r"(y),
               "r"(src)
               : "memory");
}
DEV void tma_store(const TensorMap* m, int x, int y, int z, uint32_t src) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0,{%1,%2,%3}],[%4];" ::"l"(m), "r"(x),
               "r"(y), "r"(z), "r"(src)
               : "memory");
}
// Adds f32 values from shared memory to a tensor in global memory.
DEV void tma_add(const TensorMap* m, int x, int y, uint32_t src) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0,{%1,%2}],[%3];" ::"l"(m),
               "r"(x), "r"(y), "r"(src)
               : "memory");
}

// ---- plain copies of a multiple of 16 bytes; `policy` from `evict_first` ----
DEV void bulk_copy(uint32_t dst, const void* src, int bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(
          dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
DEV void bulk_copy(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}
// To the same shared-memory address of every CTA in `mask`, signalling the barrier at the same address.
DEV void bulk_copy_multicast(uint32_t dst, const void* src, int bytes, uint32_t bar, int mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "h"((short)mask)
      : "memory");
}
// Prefetches bytes that a later kernel will read into L2.
DEV void bulk_prefetch(const void* src, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(src), "r"(bytes) : "memory");
}
// The weights that a later kernel reads first, which a kernel prefetches after its own last load: memory is nearly idle
// from then to the next kernel's first load.
struct NextWeights {
  static constexpr uint32_t PIECE = 16384;  // bytes of a prefetch

  const uint8_t* weights;
  uint32_t bytes;  // a multiple of 16
  // Prefetches the pieces of thread `index` of `threads`.
  DEV void prefetch(uint32_t index, uint32_t threads) const {
#pragma unroll 1
    for (uint32_t offset = index * PIECE; offset < bytes; offset += threads * PIECE)
      bulk_prefetch(weights + offset, min(PIECE, bytes - offset));
  }
};
// Arrives when this thread's earlier copies (copy16) are complete.
DEV void copy_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

// ---- groups of TMA stores, and the asynchronous proxy ----
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until sources of all but the last N groups may be overwritten.
template <int N>
DEV void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
DEV void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Needed before TMA or wgmma reads data that ordinary stores wrote.
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers of a warpgroup: N per thread from here on, a multiple of 8 ----
template <int N>
DEV void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEV void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Stores four 8 x 8 matrices of 16 bits, as `ldmatrix4` loads them. `row`: the lane's, 16 bytes.
DEV void stmatrix4(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

// ---- wgmma ----
//
// Matrix descriptors (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout") for the 128-byte swizzle.
// Fields count units of 16 bytes; base addresses are multiples of 1,024.
//
// K-major: rows of 64 consecutive k (128 bytes), 8 rows per swizzle atom of 1,024 bytes. A k step of 16 elements is 32
// bytes further: descriptor + 2.
DEV uint64_t desc_kmajor(uint32_t addr) {
  return (uint64_t)((addr & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// N-major: rows (k) of 64 consecutive n (128 bytes); blocks of 64 columns are `next_n` bytes apart. A k step of 16 rows
// is 2,048 bytes further: descriptor + 128.
DEV uint64_t desc_nmajor(uint32_t addr, int next_n) {
  return (uint64_t)((addr & 0x3ffff) >> 4) | (uint64_t)(next_n >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Accumulators (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): lane = 4 g + c of warp w of the warpgroup
// holds rows 16 w + g and 16 w + g + 8. Of every 8 columns j it holds two, 8 j + 2 c and the next:
// d[4 j] and d[4 j + 1] of the first row, d[4 j + 2] and d[4 j + 3] of the second. Operand A in registers: the same
// elements, packed to pairs.
//
// OUT*: lists of operands, from d[i] on; LIST*: their places in the instruction.
#define OUT8(d, i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define OUT16(d, i) OUT8(d, i), OUT8(d, i + 8)
#define OUT32(d, i) OUT16(d, i), OUT16(d, i + 16)
#define OUT64(d, i) OUT32(d, i), OUT32(d, i + 32)
#define OUT128(d, i) OUT64(d, i), OUT64(d, i + 64)
#define LIST12 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define LIST16 LIST12 ",%12,%13,%14,%15"
#define LIST32 \
  LIST16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST64                                                       \
  LIST32                                                             \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LIST128                                                                  \
  LIST64                                                                         \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d[64 x N] (+)= A[64 x 16] B[N x 16]^T, both from shared memory, K-major; accumulate = 0 overwrites d.
#define WGMMA_SHARED(N, TYPE, LIST, P, A, B, OUT)                                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p," P ",0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE \
               "." TYPE " {" LIST "}," A "," B ",p,1,1,0,0;\n}"                                                \
               : OUT                                                                                           \
               : "l"(a), "l"(b), "r"(accumulate))
// d[64 x N] += A[64 x 16] (registers) B from shared memory, K-major ("0": [N x 16]^T) or N-major ("1": [16 x N]).
#define WGMMA_REGISTERS(N, TYPE, TRANSPOSED, LIST, A, B, OUT)                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "},{" A "}," B \
               ",1,1,1," TRANSPOSED ";"                                                                \
               : OUT                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// `shared`: both operands from shared memory; `registers`: A in registers, added to d. B is K-major.
template <class T>
struct Wgmma;
#define WGMMA_TYPE(T, TYPE)                                                             \
  template <>                                                                           \
  struct Wgmma<T> {                                                                     \
    static DEV void shared(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {   \
      WGMMA_SHARED("256", TYPE, LIST128, "%130", "%128", "%129", OUT128(d, 0));         \
    }                                                                                   \
    static DEV void shared(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {    \
      WGMMA_SHARED("128", TYPE, LIST64, "%66", "%64", "%65", OUT64(d, 0));              \
    }                                                                                   \
    static DEV void shared(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {    \
      WGMMA_SHARED("64", TYPE, LIST32, "%34", "%32", "%33", OUT32(d, 0));               \
    }                                                                                   \
    static DEV void registers(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {     \
      WGMMA_REGISTERS("128", TYPE, "0", LIST64, "%64,%65,%66,%67", "%68", OUT64(d, 0)); \
    }                                                                                   \
    static DEV void registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {     \
      WGMMA_REGISTERS("64", TYPE, "0", LIST32, "%32,%33,%34,%35", "%36", OUT32(d, 0));  \
    }                                                                                   \
    static DEV void registers(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {     \
      WGMMA_REGISTERS("32", TYPE, "0", LIST16, "%16,%17,%18,%19", "%20", OUT16(d, 0));  \
    }                                                                                   \
  }
WGMMA_TYPE(Half, "f16");
WGMMA_TYPE(Bf16, "bf16");

// d[64 x N] += A[64 x 16] (registers, f16) B[16 x N] (shared memory, N-major).
DEV void wgmma_registers(float (&d)[64], const uint32_t* a, uint64_t b) {
  WGMMA_REGISTERS("128", "f16", "1", LIST64, "%64,%65,%66,%67", "%68", OUT64(d, 0));
}
DEV void wgmma_registers(float (&d)[32], const uint32_t* a, uint64_t b) {
  WGMMA_REGISTERS("64", "f16", "1", LIST32, "%32,%33,%34,%35", "%36", OUT32(d, 0));
}

// d[64 x 8 NT] += A[64 x 16] (registers, f16) B[16 x 8 NT] (shared memory, `Cores`) for few columns. d(t, e) are a
// thread's four values of columns 8 t and up; A is laid out as for mma.m16n8k16, 16 rows per warp. The bits are those
// of mma.m16n8k16. TRANSPOSED: B is N-major.
#define OUT_COLUMNS(t) "+f"(d(t, 0)), "+f"(d(t, 1)), "+f"(d(t, 2)), "+f"(d(t, 3))
#define WGMMA_COLUMNS(N, LIST, A, B, T, ...)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32.f16.f16 {" LIST "},{" A "}," B ",1,1,1," T ";" \
               : __VA_ARGS__                                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED))
template <int NT, int TRANSPOSED, class Columns>
DEV void wgmma_columns(const Columns& d, const uint32_t (&a)[4], uint64_t b) {
  static_assert(NT == 3 || NT == 4);
  if constexpr (NT == 3)
    WGMMA_COLUMNS("24", LIST12, "%12,%13,%14,%15", "%16", "%17", OUT_COLUMNS(0), OUT_COLUMNS(1), OUT_COLUMNS(2));
  else
    WGMMA_COLUMNS("32", LIST16, "%16,%17,%18,%19", "%20", "%21", OUT_COLUMNS(0), OUT_COLUMNS(1), OUT_COLUMNS(2),
                  OUT_COLUMNS(3));
}
// Core matrices in shared memory without swizzle, 8 rows of 16 bytes: K-major a row is one n and 8 k, N-major one k and
// 8 n. Neighbouring cores are `next_k` and `next_n` bytes apart. `addr` must be uniform in a warp, visibly to the
// compiler (a shuffle suffices): descriptors are uniform registers.
struct Cores {
  uint32_t low, high;
  DEV Cores(uint32_t addr, int next_k, int next_n)
      : low((addr & 0x3ffff) >> 4 | (uint32_t)(next_k >> 4) << 16), high(next_n >> 4) {}
  DEV uint64_t operator+(int bytes) const {
    uint64_t desc;
    asm("mov.b64 %0,{%1,%2};" : "=l"(desc) : "r"(low + (bytes >> 4)), "r"(high));
    return desc;
  }
};
