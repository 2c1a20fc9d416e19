// A consumer warpgroup: indices of its threads, the stages that it reads, and unpacking codes to mma
// operands. Included by attend.cuh.
#pragma once

// A constant kept in a register: a LOP3 takes one immediate only, and a uniform register costs a copy per use.
DEV uint32_t in_register(uint32_t v) { return __shfl_sync(~0u, v, threadIdx.x & 31); }
// Constants of `unpack`.
struct Magic {
  uint32_t h1024;  // a pair of 1,024 in f16
  uint32_t bytes;  // the upper byte of that f16, four times
};

// A word of upper codes, or an upper and a lower word, as an f16 A fragment.
//
// Both (TWO): 1024 + 16 U + (L + 8); the exponent comes from a constant.
//
// Upper: an integer n below 1,024 in the low bits of an f16 is the subnormal n 2^-24, which tensor cores accept. Rows g
// hold both rows' codes, U + 16 U8; rows g + 8 hold 16 U8 alone, which is subtracted from the results of rows g. So
// four instructions unpack the eight codes of a word.
template <bool TWO>
DEV void unpack(const Magic& m, uint32_t u, uint32_t l, uint32_t (&a)[4]) {
  if (!TWO) {
    a[0] = u & 0x00ff00ff;
    a[1] = u & 0x00f000f0;
    a[2] = __byte_perm(u, 0, 0x4341);
    a[3] = a[2] & 0x00f000f0;
  } else {
    const uint32_t x = select_bits(u, l, 0xf0f0f0f0);  // bytes of rows g + 8
    uint32_t y = select_bits(l, u, 0xf0f0f0f0);
    y = __funnelshift_l(y, y, 4);  // bytes of rows g
    a[0] = and_or(y, 0x00ff00ff, m.h1024);
    a[1] = and_or(x, 0x00ff00ff, m.h1024);
    a[2] = __byte_perm(y, m.bytes, 0x4341);
    a[3] = __byte_perm(x, m.bytes, 0x4341);
  }
}

template <class C>
struct Warpgroup {
  static constexpr float SCORE_SCALE = C::TWO ? 0.0625f : 0x1p24f;  // score per unit of the codes
  // Probabilities are stored as p * scale * V_SCALE; the target's codes are 16 times finer. O is kept times O_SCALE.
  static constexpr float V_SCALE = C::TWO ? 4.f : 16.f, O_SCALE = C::TWO ? 64.f : 16.f;
  static constexpr int NV = C::NT >= 3 ? 8 : C::NT * C::E;  // values per lane of a column pair, padded

  const AttendArgs& p;
  const int stages, lane, g, c;
  const int index;       // of the warpgroup in the block
  const int warp;        // in the warpgroup
  const uint32_t bytes;  // of shared memory of a warpgroup
  // Shared memory: arrays of all warpgroups; this warpgroup's stages, its other arrays and its barriers.
  const uint32_t tail, stages_at, rest, bars;
  const float v_centre;  // added to a value's zero point, in units of its scale
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const Cores q_cores, p_cores;
#endif
  Magic magic;
  int stage, parity;  // the stage that is read next

  DEV Warpgroup(const AttendArgs& p, uint32_t base)
      : p(p),
        stages(C::TMA ? C::STAGES : p.stages),
        lane(threadIdx.x & 31),
        g(lane >> 2),
        c(lane & 3),
        index(C::WARPGROUPS == 1 ? 0 : threadIdx.x >> 7),
        warp(C::WARPGROUPS == 1 ? threadIdx.x >> 5 : threadIdx.x >> 5 & 3),
        bytes(stages * C::STAGE + C::REST),
        tail(base + C::WARPGROUPS * bytes),
        stages_at(base + index * bytes),
        rest(stages_at + stages * C::STAGE),
        bars(rest + C::BARS),
        v_centre(C::TWO ? 7.5f : -p.centre),
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        q_cores(C::WGMMA ? __shfl_sync(~0u, rest, 0) : 0, C::NT * 128, 128),
        p_cores(C::WGMMA ? __shfl_sync(~0u, rest + C::P, 0) : 0, C::NT * 128, 128),
#endif
        magic(C::TWO ? Magic{in_register(0x64006400), in_register(0x64646464)} : Magic{0, 0}),
        stage(0),
        parity(0) {
    if (C::WGMMA) {
      // Through shared memory: a constant known to the compiler would become an immediate, and the permutation would be
      // copied from a uniform register on every use.
      const uint32_t scratch = rest + C::RED + warp * 128;
      sts32(scratch + lane * 4, magic.bytes);
      __syncwarp();
      magic.bytes = lds32(scratch + (lane ^ 1) * 4);
    }
  }

  // ---- barriers of the warpgroup's 128 threads, and of all consumers ----
  DEV void sync() const { asm volatile("bar.sync %0,128;" ::"r"(index + 1) : "memory"); }
  // A barrier that returns whether any thread's v is true.
  DEV bool any(bool v) const {
    uint32_t r;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p,%1,0;\nbar.red.or.pred q,%2,128,p;\nselp.u32 %0,1,0,q;\n}"
                 : "=r"(r)
                 : "r"((uint32_t)v), "r"(index + 1)
                 : "memory");
    return r != 0;
  }
  DEV void block_sync() const {
    asm volatile("bar.sync %0,%1;" ::"n"(C::WARPGROUPS + 1), "n"(C::CONSUMERS) : "memory");
  }
  // Makes the warpgroup's stores visible to all its warps, and to wgmma.
  DEV void publish() const {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (C::WGMMA) fence_async();
#endif
    sync();
  }

  // ---- stages ----
  //
  // Waits until stage `i` is full; without TMA, copies are waited for by their threads.
  DEV void ready(int i, int phase) const {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (C::TMA) mbar_wait(bars + i * 8, phase);
#endif
  }
  // Releases the current stage. `loaded`: bits of all data that this lane loaded from it (`release_stage`).
  DEV void release(uint32_t loaded) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (C::TMA) {
      if (C::FENCED) fence_async();
      release_stage(bars + (C::STAGES + stage) * 8, C::FENCED ? 0 : loaded);
    }
#endif
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // ---- query rows: columns of a tile ----
  DEV int row_of(int t, int e) const { return C::E == 1 ? c : t * 8 + 2 * c + e; }  // of a lane's e-th column of tile t
  DEV static int tile_of(int i) { return i / C::E < C::NT ? i / C::E : 0; }         // of a lane's i-th row
  // Stores one value per row and warp, which `reduce_scatter` returned, as f32 [row][warp] at offset `area`.
  DEV void scatter(int area, float v) const {
    const int i = g / (8 / NV);
    if (i < C::NT * C::E && g % (8 / NV) == 0)
      sts32(rest + area + row_of(i / C::E, i % C::E) * 16 + warp * 4, __float_as_uint(v));
  }

  // Stores q of a work item as B fragments [kp][t][lane], two k tiles per uint4, and {end of the pages, position} of
  // each row. By all consumers.
  DEV void load_query(const Work& w) const {
    constexpr int D = C::D, NT = C::NT, E = C::E;
    const int group = p.group;
    for (int i = threadIdx.x; i < C::KP * NT * 32; i += C::CONSUMERS) {
      const int column = (i & 31) / 4;
      const int row = i / 32 % NT * 8 + column / (3 - E);  // of the tile; with E = 1 rows have the even columns
      const int query = w.tile.row + row;                  // of the span
      const int kp = i / (32 * NT);
      const int channel = kp * 32 + (i & 3) * 2;
      uint32_t x[4] = {0, 0, 0, 0};
      if (row < w.tile.rows && column % (3 - E) == 0) {
        const __half* q =
            p.q + ((size_t)(w.span.row + query / group) * p.kv_heads * group + w.head * group + query % group) * D +
            channel;
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = *reinterpret_cast<const uint32_t*>(q + j * 8);
      }
      sts128(tail + i * 16, make_uint4(x[0], x[1], x[2], x[3]));
    }
    if (threadIdx.x < C::ROWS) {
      const int position = w.span.position + min(w.span.queries - 1, (w.tile.row + (int)threadIdx.x) / group);
      sts32(tail + C::LIMITS + threadIdx.x * 8, min(visible_quantised(position), w.span.cap));
      sts32(tail + C::LIMITS + threadIdx.x * 8 + 4, position);
    }
  }
};
