// The PTX instructions the kernels use, with replacements on architectures that lack them.
//
// The only headers are cuda_fp16.h and cuda_bf16.h of the toolkit: NVRTC compiles every kernel at build time. A
// constexpr variable of a namespace takes some 36 bytes of the image, an enumerator none.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#define DEV __device__ __forceinline__
#define KERNEL extern "C" __global__ void

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define QS_SM80 1
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define QS_SM90 1
#endif

// ---- programmatic dependent launch ----
//
// Every kernel of a step first calls `grid_trigger`, so that the next kernel's blocks can start early. It calls
// `grid_wait` in every thread before it accesses anything that another kernel of the step writes or reads. Since each
// kernel waits, waiting for the last one waits for all. The first kernel of a step, `embed_*`, is launched without
// overlap, so results of earlier steps are complete and may be read before the wait.
DEV void grid_wait() {
#ifdef QS_SM90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void grid_trigger() {
#ifdef QS_SM90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- bits ----
//
// Any function of three bits, on each bit position. LUT: the function of 0xf0, 0xcc, 0xaa (PTX ISA, `lop3`).
template <int LUT>
DEV uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0,%1,%2,%3,%4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(LUT));
  return r;
}
// (a & mask) | b.
DEV uint32_t and_or(uint32_t a, uint32_t mask, uint32_t b) { return lop3<(0xf0 & 0xcc) | 0xaa>(a, mask, b); }
// Bits of a where `mask` is set, else of b.
DEV uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  return lop3<(0xf0 & 0xaa) | (0xcc & 0x55)>(a, b, mask);
}
DEV uint32_t pack_half2(float low, float high) {
  const half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
DEV float2 unpack_half2(uint32_t v) { return __half22float2(*reinterpret_cast<const half2*>(&v)); }
DEV uint32_t hmul2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV uint32_t hsub2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// 2^x with a relative error of up to 2^-22; subnormal results become zero.
DEV float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}

// ---- memory ----
//
// Shared memory is addressed by bytes in its own window (`shared_address`). lds* and sts* load and store 128, 64 or 32
// bits, which must be aligned to their size.
DEV uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEV uint4 lds128(uint32_t a) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(a) : "memory");
  return r;
}
DEV uint2 lds64(uint32_t a) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "r"(a) : "memory");
  return r;
}
DEV uint32_t lds32(uint32_t a) {
  uint32_t r;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(r) : "r"(a) : "memory");
  return r;
}
DEV void sts128(uint32_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEV void sts64(uint32_t a, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory");
}
DEV void sts32(uint32_t a, uint32_t v) { asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory"); }
// Weights and pages: read once per pass, so they stay out of L1.
DEV uint4 ldg_stream(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}
// Data that another kernel of the step wrote: not through the non-coherent path, whose lines may
// be from before `grid_wait`.
DEV uint4 ldg_plain(const void* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
// Copies 16 bytes to shared memory, asynchronously where cp.async exists: complete after `copy_commit`, `copy_wait`.
DEV void copy16(uint32_t shared, const void* global) {
#ifdef QS_SM80
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared), "l"(global) : "memory");
#else
  sts128(shared, ldg_stream(global));
#endif
}
// Cache policy for data that a pass reads once: it is evicted from L2 first, so that activations stay.
DEV uint64_t evict_first() {
  uint64_t policy = 0;
#ifdef QS_SM80
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
// `ldg_stream` with a policy of `evict_first`.
DEV uint4 ldg_once(const void* p, uint64_t policy) {
#ifdef QS_SM80
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3},[%4],%5;"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p), "l"(policy));
  return r;
#else
  return ldg_stream(p);
#endif
}
// `copy16` with a policy of `evict_first`, on Hopper only. On other architectures ptxas (12.9 and 13.0) adds a uniform
// base to a hinted copy's address. With an offset as well, it encodes an illegal instruction
// (`LDGSTS [R3+UR0+0x1200], desc[UR1]`), which tools/check_sass.py detects.
DEV void copy16_once(uint32_t shared, const void* global, uint64_t policy) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0],[%1],16,%2;" ::"r"(shared), "l"(global), "l"(policy)
               : "memory");
#else
  copy16(shared, global);
#endif
}
// Ends a group of this thread's copies; `copy_wait` waits until all but the last PENDING groups are complete.
DEV void copy_commit() {
#ifdef QS_SM80
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
DEV void copy_wait() {
#ifdef QS_SM80
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
// Loads four (two) 8 x 8 matrices of 16 bits as mma fragments. `a`: the lane's row, 16 bytes; lanes 8i .. 8i + 7 give
// the rows of matrix i. The trans variants transpose each matrix.
DEV void ldmatrix4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
DEV void ldmatrix4_trans(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
DEV void ldmatrix2_trans(uint32_t (&r)[2], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(a)
               : "memory");
}

// ---- mma of one warp ----
//
// Fragments as in the PTX ISA, "Matrix Fragments for mma.m16n8k16" and "m16n8k32". Everywhere in the kernels g and c
// are the row and column index of a lane in a fragment: lane = 4 g + c.
//
// d[16 x 8] += a[16 x 16] * b[16 x 8], in f16 with f32 sums:
//
//     a0 = (row g,     k 2c, 2c + 1)     a2 = (row g,     k 2c + 8, 2c + 9)
//     a1 = (row g + 8, k 2c, 2c + 1)     a3 = (row g + 8, k 2c + 8, 2c + 9)
//     b0 = (k 2c, 2c + 1, column g)      b1 = (k 2c + 8, 2c + 9, column g)
//     d0, d1 = (row g, columns 2c, 2c + 1)     d2, d3 = (row g + 8, the same columns)
DEV void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef QS_SM80
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
// The same in bfloat16. Turing has no bfloat16 tensor cores: there, multiply-adds are done
// one by one, in a fixed order.
DEV void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef QS_SM80
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  auto low = [](uint32_t v) { return __uint_as_float(v << 16); };
  auto high = [](uint32_t v) { return __uint_as_float(v & 0xffff0000u); };
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll 1  // unrolled, it takes minutes to compile
    for (int pair = 0; pair < 4; pair++) {  // of k: 8 half + 2 pair and the next
      const uint32_t row = __shfl_sync(~0u, a[half * 2], g * 4 + pair);
      const uint32_t row8 = __shfl_sync(~0u, a[half * 2 + 1], g * 4 + pair);
      const uint32_t column = __shfl_sync(~0u, half ? b1 : b0, 2 * c * 4 + pair);
      const uint32_t column1 = __shfl_sync(~0u, half ? b1 : b0, (2 * c + 1) * 4 + pair);
      d[0] = __fmaf_rn(high(row), high(column), __fmaf_rn(low(row), low(column), d[0]));
      d[1] = __fmaf_rn(high(row), high(column1), __fmaf_rn(low(row), low(column1), d[1]));
      d[2] = __fmaf_rn(high(row8), high(column), __fmaf_rn(low(row8), low(column), d[2]));
      d[3] = __fmaf_rn(high(row8), high(column1), __fmaf_rn(low(row8), low(column1), d[3]));
    }
#endif
}
// d[16 x 8] += a[16 x 32] * b[32 x 8] in integers, a unsigned and b signed bytes, four k per register:
//
//     a0 = (row g,     k 4c ..)     a2 = (row g,     k 4c + 16 ..)     b0 = (k 4c ..,      column g)
//     a1 = (row g + 8, k 4c ..)     a3 = (row g + 8, k 4c + 16 ..)     b1 = (k 4c + 16 .., column g)
//
// d as above.
DEV void mma_u8s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#ifdef QS_SM80
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  auto half = [](int& x, int& y, uint32_t a, uint32_t b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
        : "+r"(x), "+r"(y)
        : "r"(a), "r"(b));
  };
  half(d[0], d[1], a0, b0);
  half(d[0], d[1], a2, b1);
  half(d[2], d[3], a1, b0);
  half(d[2], d[3], a3, b1);
#endif
}
