// Decode attention of a few query rows over a long cache, split into items that are merged in a fixed order.
//
//   score[r,t] = q[r] . k[t]          q already carries log2(e) / sqrt(D)
//   out[r]     = sum_t 2^(score[r,t] - M[r]) v[t] / sum_t 2^(score[r,t] - M[r])
//
// Codes are the mma A operand (K: tokens x channels, V: channels x tokens) and the query rows its columns, so every code is unpacked once for up
// to 32 rows. Scales never touch the codes: a key scale multiplies q (per page), a value scale multiplies the probability, zero points become one
// number per row and page (keys) or a running sum per row (values). Four warps share a page: warp w scores tokens 32w.. and accumulates channels
// w D/4.. of all tokens; the probabilities cross the warps through shared memory. A row's reference maximum moves only when a score exceeds it by
// 2^REACH, so most pages need a vote and no exchange.
//
// Row invariance: a row's bits depend on its position and the cache alone. An item is either a fixed run of pages or one 128-token block of recent
// tokens; what a row does not see leaves its state unchanged to the bit (p = 0, factor 1); columns of an mma do not mix; the number of row tiles
// NT only adds columns.
#pragma once
#include "layout.cuh"

constexpr int CHUNK_MAX = 128;             // most pages of an item
constexpr int UPPER = 0, BOTH = 1, FULL = 2;
// p <= 2^REACH, so that p times a value scale stays inside f16 for value ranges up to some thousands.
constexpr float REACH = 4;
#define MASKED __uint_as_float(0xff800000u)      // score of a token that a row does not see: -infinity
constexpr float NOTHING = -1e30f;        // maximum of a row that has seen no token; finite, so that differences are not NaN

// Consecutive rows of one slot whose positions have the same chunk length.
struct Span {
  int slot, row, queries, position;      // first row in the step, rows, position of the first
  int chunk_pages, chunks;               // pages of an item, items of pages
  int first_block, blocks;               // recent blocks of 128 tokens, absolute
  int list, listed;                      // pages chosen for a draft: index of the span's list, entries; listed < 0: all pages
  int cap;                               // no row reads more than this many tokens from pages (a list is older than the row); large: the law
  int partial;                           // first row of the span in the partial results
};
struct Part { int span, row, rows, padding; };   // a run of up to 8 NT query rows of a span: row = query * group + head in group

struct AttendArgs {
  const uint8_t *upper, *lower, *full;   // this layer's pools: [page][kv head] blocks
  const __half *ring_k, *ring_v;         // this layer's recent tokens [slot][kv head][RING][D]
  const int* tables;                     // [slot][table_pitch] logical -> physical page
  const int* lists;                      // [list][kv head][list_pitch] logical pages, ascending
  const __half* q;                       // [row][heads][D]
  const Span* spans;
  const Part* parts;
  float* partial;                        // [partial row][D]: a span's items are [kv head][item][query row]
  float2* extremes;                      // [partial row] {maximum, sum}
  int table_pitch, list_pitch, kv_heads, group;
  int stages;                            // 4: the next page is under way while one is worked on; 2: where shared memory is small
  float centre;                          // Upper view: codes stand for U s + z - centre s
};

DEV int quantised(int position) { return max(0, position / PAGE - 1) * PAGE; }

template <int D_, int VIEW_, int NT_>
struct Attend {
  static constexpr int D = D_, VIEW = VIEW_, NT = NT_, ROWS = NT * 8;
  static constexpr bool TWO = VIEW == BOTH;
  static constexpr int STEP = VIEW == UPPER ? 32 : 64;             // f16 tokens of a step
  static constexpr int PARAMS = D * 4 > 512 ? D * 4 : 512, CODES = 64 * D;
  static constexpr int PACKED = PARAMS + CODES * (TWO ? 2 : 1), PLAIN = STEP * D * 2;
  static constexpr int SLOT = VIEW == FULL ? PLAIN : (PACKED > PLAIN ? PACKED : PLAIN);
  static constexpr int PITCH = NT & 1 ? NT * 16 : NT * 16 + 16;    // bytes per token of P: stores and ldmatrix without bank conflicts
  // shared memory after the slots
  static constexpr int Q = 0, QS = Q + NT * 16 * D, P = QS + (VIEW == FULL ? 0 : NT * 16 * D), RED = P + 128 * PITCH, C0 = RED + ROWS * 16, IDS = C0 + ROWS * 32, BYTES = IDS + CHUNK_MAX * 8;
};

DEV float max4(uint4 v) { return fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w))); }
DEV float sum4(uint4 v) { return __fadd_rn(__fadd_rn(__uint_as_float(v.x), __uint_as_float(v.y)), __fadd_rn(__uint_as_float(v.z), __uint_as_float(v.w))); }
DEV uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// A word of upper codes, or an upper and a lower word, as an f16 A fragment: Upper: rows g 1024 + U, rows g + 8 64 + U. Both: 1024 + 16 U + (L + 8).
template <bool TWO>
DEV void unpack(uint32_t u, uint32_t l, uint32_t (&a)[4]) {
  if (!TWO) {
    const uint32_t s = u >> 8;
    a[0] = and_or(u, 0x000f000f, 0x64006400), a[1] = and_or(u, 0x00f000f0, 0x54005400);
    a[2] = and_or(s, 0x000f000f, 0x64006400), a[3] = and_or(s, 0x00f000f0, 0x54005400);
  } else {
    const uint32_t x = select_bits(u, l, 0xf0f0f0f0);                 // bytes of rows g + 8
    uint32_t y = select_bits(l, u, 0xf0f0f0f0);
    y = __funnelshift_l(y, y, 4);                                     // bytes of rows g
    a[0] = and_or(y, 0x00ff00ff, 0x64006400), a[1] = and_or(x, 0x00ff00ff, 0x64006400);
    a[2] = __byte_perm(y, 0x64646464, 0x4341), a[3] = __byte_perm(x, 0x64646464, 0x4341);
  }
}

// Steps over f16 tokens and over packed pages share their code; which of them a step is, is known when it is compiled.
struct Plain { static constexpr bool value = true; };
struct Packed { static constexpr bool value = false; };

template <class C>
DEV void attend(const AttendArgs& p, uint8_t* shared) {
  constexpr int D = C::D, NT = C::NT, ROWS = C::ROWS, KP = D / 32, TILES_W = D / 64;       // TILES_W: channel tiles of a warp
  constexpr bool TWO = C::TWO, FULL_VIEW = C::VIEW == FULL;
  constexpr float SCORE_SCALE = TWO ? 0.0625f : 1.f;
  // Probabilities enter as p * scale * V_SCALE; the target's codes are 16 times finer. O is kept times O_SCALE.
  constexpr float V_SCALE = TWO ? 4.f : 16.f, O_SCALE = TWO ? 64.f : 16.f;
  // Value codes enter centred (16U + L - 120, U - 8) and the centre moves into the zero point: the tensor core truncates its accumulator, and
  // with codes of mean 120 that bias reached 3e-2 of the output of diffuse attention at 256k tokens.
  const float v_centre = TWO ? 7.5f : 8.f - p.centre;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, head = blockIdx.y;
  const uint32_t slots = shared_address(shared), rest = slots + p.stages * C::SLOT;

  grid_trigger();
  // Descriptions, tables and pages were complete before the step's first kernel began, so they are read ahead of the kernel before this one.
  // Lists of chosen pages, q and the ring are written in this step.
  const Part part = p.parts[blockIdx.z];
  const Span span = p.spans[part.span];
  const int items = span.blocks + span.chunks, item = blockIdx.x;
  if (item >= items) return;
  if (span.listed >= 0) grid_wait();
  const bool recent = item < span.blocks;
  const int total = span.queries * p.group;                 // query rows of the span
  auto row_position = [&](int t, int e) { return span.position + min(span.queries - 1, (part.row + t * 8 + 2 * c + e) / p.group); };
  auto from_pages = [&](int position) { return min(quantised(position), span.cap); };

  // ---- the item's steps; part 2s is the keys of step s, part 2s + 1 its values ----
  const int first_page = (item - span.blocks) * span.chunk_pages;
  const int last_position = span.position + span.queries - 1;
  const int pages = recent ? 1 : min(span.listed >= 0 ? span.listed : from_pages(last_position) / PAGE, first_page + span.chunk_pages) - first_page;
  constexpr int SUB = PAGE / C::STEP;                        // f16 steps of a page
  const int block = span.first_block + item;                 // recent: absolute block
  // The last recent block ends at the newest token.
  const int steps = recent ? min(SUB, (last_position - block * PAGE + C::STEP) / C::STEP) : FULL_VIEW ? pages * SUB : pages;
  const int* list = p.lists + ((size_t)span.list * p.kv_heads + head) * p.list_pitch;
  // Logical and physical numbers of the item's pages go to shared memory, so that a copy does not wait for two dependent loads.
  if (!recent)
    for (int i = threadIdx.x; i < pages; i += 128) {
      const int page = span.listed >= 0 ? list[first_page + i] : first_page + i;
      sts32(rest + C::IDS + i * 8, page), sts32(rest + C::IDS + i * 8 + 4, p.tables[(size_t)span.slot * p.table_pitch + page]);
    }
  __syncthreads();
  auto logical = [&](int i) { return (int)lds32(rest + C::IDS + i * 8); };
  auto physical = [&](int i) { return (int)lds32(rest + C::IDS + i * 8 + 4); };
  const bool plain = recent || FULL_VIEW;                    // uniform in the block
  auto load = [&](int s, int value) {                        // keys or values of step s into their slot
    if (s < steps) {
      const uint32_t to = slots + ((2 * s + value) % p.stages) * C::SLOT;
      if (plain) {
        const __half* from;
        if (recent) {
          from = (value ? p.ring_v : p.ring_k) + (((size_t)span.slot * p.kv_heads + head) * RING + (block * PAGE) % RING + s * C::STEP) * D;
        } else {
          const uint8_t* at = p.full + ((size_t)physical(s / SUB) * p.kv_heads + head) * full_bytes(D);
          from = reinterpret_cast<const __half*>(at) + (value * PAGE + s % SUB * C::STEP) * D;
        }
        // 16-byte piece j of token t lies at piece j ^ (t & 7): ldmatrix meets no bank twice
        for (int i = threadIdx.x; i < C::STEP * D / 8; i += 128) {
          const int t = i / (D / 8), j = i % (D / 8);
          copy16(to + (t * (D / 8) + (j ^ (t & 7))) * 16, from + i * 8);
        }
      } else if constexpr (!FULL_VIEW) {
        const size_t at = (size_t)physical(s) * p.kv_heads + head;
        const uint8_t* up = p.upper + at * upper_bytes(D) + (value ? v_params_at(D) : 0);
        const int params = value ? 512 : 4 * D;
        for (int i = threadIdx.x; i < params / 16; i += 128) copy16(to + i * 16, up + i * 16);
#pragma unroll
        for (int i = 0; i < C::CODES / 2048; i++) copy16(to + C::PARAMS + (i * 128 + threadIdx.x) * 16, up + params + (i * 128 + threadIdx.x) * 16);
        if (TWO) {
          const uint8_t* low = p.lower + at * lower_bytes(D) + (value ? lower_v_at(D) : 0);
#pragma unroll
          for (int i = 0; i < C::CODES / 2048; i++) copy16(to + C::PARAMS + C::CODES + (i * 128 + threadIdx.x) * 16, low + (i * 128 + threadIdx.x) * 16);
        }
      }
    }
  };

  float O[NT][TILES_W][4], M[NT][2], l[NT][2], z[NT][2];
#pragma unroll
  for (int t = 0; t < NT; t++) {
#pragma unroll
    for (int j = 0; j < TILES_W; j++) O[t][j][0] = O[t][j][1] = O[t][j][2] = O[t][j][3] = 0;
    M[t][0] = M[t][1] = NOTHING, l[t][0] = l[t][1] = z[t][0] = z[t][1] = 0;
  }

  // q * s as B fragments and the start of the scores, q . z - offset * sum(q * s), in parts of the warps (32 or 64 channels each)
  auto prepare = [&](uint32_t k) {
    if constexpr (!FULL_VIEW) {
      constexpr uint32_t OA = TWO ? 0xe408e408u : 0xe400e400u, OB = TWO ? 0xe408e408u : 0xd400d400u;       // -1032 | -1024 and -64
      const uint32_t offset[4] = {OA, OB, OA, OB};
      float sum[NT][4];
#pragma unroll
      for (int t = 0; t < NT; t++) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0;
#pragma unroll
      for (int kp = warp; kp < KP; kp += 4) {
        const uint4 s = lds128(k + (kp * 4 + c) * 32);
        uint4 zz = lds128(k + (kp * 4 + c) * 32 + 16);
        if (!TWO) {
          const uint32_t shift = pack_half2(-p.centre, -p.centre);
          zz = make_uint4(hfma2(s.x, shift, zz.x), hfma2(s.y, shift, zz.y), hfma2(s.z, shift, zz.z), hfma2(s.w, shift, zz.w));
        }
        // Rows g of this operand hold channels 2c of both k tiles, rows g + 8 channels 2c + 8: each product below uses one half of its rows.
        const uint32_t za[4] = {zz.x, zz.y, zz.z, zz.w};
#pragma unroll
        for (int t = 0; t < NT; t++) {
          const uint4 x = lds128(rest + C::Q + ((kp * NT + t) * 32 + lane) * 16);
          const uint4 y = make_uint4(hmul2(x.x, s.x), hmul2(x.y, s.y), hmul2(x.z, s.z), hmul2(x.w, s.w));
          sts128(rest + C::QS + ((kp * NT + t) * 32 + lane) * 16, y);
          float cz[4] = {0, 0, 0, 0}, cy[4] = {0, 0, 0, 0}, co[4] = {0, 0, 0, 0};
          mma_f16(cz, za, x.x, x.z), mma_f16(cy, za, x.y, x.w), mma_f16(co, offset, y.x, y.y), mma_f16(co, offset, y.z, y.w);
#pragma unroll
          for (int e = 0; e < 4; e++) sum[t][e] = __fadd_rn(sum[t][e], __fmaf_rn(__fadd_rn(cz[e & 1], cy[2 + (e & 1)]), 1.f / SCORE_SCALE, co[e]));
        }
      }
      if (g == 0)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const uint32_t at = rest + C::C0 + (t * 8 + 2 * c + e) * 32 + warp * 4;
            sts32(at, __float_as_uint(sum[t][e])), sts32(at + 16, __float_as_uint(sum[t][e + 2]));
          }
    }
  };

  auto run = [&](auto flag, int s) {
    constexpr bool PLAIN = decltype(flag)::value;
    constexpr int TILES = PLAIN ? 1 : 2;                     // token tiles of a warp
    constexpr float SCALE = PLAIN ? 1.f : SCORE_SCALE;
    const bool owner = !PLAIN || warp < C::STEP / 16;        // this warp has tokens
    const uint32_t k = slots + (2 * s % p.stages) * C::SLOT, v = slots + ((2 * s + 1) % p.stages) * C::SLOT, next = slots + ((2 * s + 2) % p.stages) * C::SLOT;
    float S[TILES][NT][4];
    // ---- scores ----
    if constexpr (!PLAIN) {
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const uint32_t at = rest + C::C0 + (t * 8 + 2 * c + e) * 32;
          const float a = sum4(lds128(at)), b = TWO ? a : sum4(lds128(at + 16));
#pragma unroll
          for (int i = 0; i < TILES; i++) S[i][t][e] = a, S[i][t][e + 2] = b;
        }
#pragma unroll
      for (int h = 0; h < D / 64; h++) {
        uint4 u[TILES], w[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          const uint32_t at = k + C::PARAMS + k_word(warp * 2 + i, h * 4, lane, D) * 4;
          u[i] = lds128(at), w[i] = make_uint4(0, 0, 0, 0);
          if (TWO) w[i] = lds128(at + C::CODES);
        }
#pragma unroll
        for (int kp = 0; kp < 2; kp++) {
          uint4 b[NT];
#pragma unroll
          for (int t = 0; t < NT; t++) b[t] = lds128(rest + C::QS + (((h * 2 + kp) * NT + t) * 32 + lane) * 16);
#pragma unroll
          for (int i = 0; i < TILES; i++) {
            uint32_t a[4];
            unpack<TWO>(kp ? u[i].z : u[i].x, kp ? w[i].z : w[i].x, a);
#pragma unroll
            for (int t = 0; t < NT; t++) mma_f16(S[i][t], a, b[t].x, b[t].y);
            unpack<TWO>(kp ? u[i].w : u[i].y, kp ? w[i].w : w[i].y, a);
#pragma unroll
            for (int t = 0; t < NT; t++) mma_f16(S[i][t], a, b[t].z, b[t].w);
          }
        }
      }
      const int end = (logical(s) + 1) * PAGE;
      if (end > from_pages(span.position))                   // a page that only some rows see
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (end > from_pages(row_position(t, e)))
#pragma unroll
              for (int i = 0; i < TILES; i++) S[i][t][e] = S[i][t][e + 2] = MASKED;
    } else {
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) S[0][t][e] = owner ? 0.f : MASKED;
      if (owner) {
        const int row = warp * 16 + (lane & 15);
#pragma unroll
        for (int kp = 0; kp < KP; kp++) {
          uint32_t a0[4], a1[4];
          ldmatrix4(a0, k + (row * (D / 8) + ((kp * 4 + (lane >> 4)) ^ (row & 7))) * 16);
          ldmatrix4(a1, k + (row * (D / 8) + ((kp * 4 + 2 + (lane >> 4)) ^ (row & 7))) * 16);
#pragma unroll
          for (int t = 0; t < NT; t++) {
            const uint4 x = lds128(rest + C::Q + ((kp * NT + t) * 32 + lane) * 16);
            mma_f16(S[0][t], a0, x.x, x.y), mma_f16(S[0][t], a1, x.z, x.w);
          }
        }
        const int first = recent ? block * PAGE + s * C::STEP : logical(s / SUB) * PAGE + s % SUB * C::STEP;
        const int a = first + warp * 16 + g;
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int position = row_position(t, e), edge = from_pages(position);
            // pages serve [0, edge), the ring [edge, position]
            const int low = recent ? edge : 0, high = recent ? position : edge - 1;
            if (a < low || a > high) S[0][t][e] = MASKED;
            if (a + 8 < low || a + 8 > high) S[0][t][e + 2] = MASKED;
          }
      }
    }
    // ---- does a score exceed its row's reference by more than REACH? then that row's reference becomes the step's maximum ----
    float top[NT][2];
    bool over = false;
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float y = fmaxf(S[0][t][e], S[0][t][e + 2]);
        if (TILES == 2) y = fmaxf(y, fmaxf(S[TILES - 1][t][e], S[TILES - 1][t][e + 2]));
        top[t][e] = y, over |= __fmaf_rn(y, SCALE, -M[t][e]) > REACH;
      }
    copy_wait<0>();                                          // values of this step and keys of the next
    const bool moved = __syncthreads_or(over);               // every warp has left this step's keys, the last step's values, P and q * s
    if (p.stages == 4) load(s + 1, 1), load(s + 2, 0), copy_commit();
    if (moved) {
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float y = top[t][e];
#pragma unroll
          for (int o = 4; o <= 16; o *= 2) y = fmaxf(y, __shfl_xor_sync(~0u, y, o));
          if (g == 0) sts32(rest + C::RED + (t * 8 + 2 * c + e) * 16 + warp * 4, __float_as_uint(y));
        }
      __syncthreads();
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float y = max4(lds128(rest + C::RED + (t * 8 + 2 * c + e) * 16));
          const float now = __fmaf_rn(y, SCALE, -M[t][e]) > REACH ? __fmul_rn(y, SCALE) : M[t][e], a = exp2_fast(__fadd_rn(M[t][e], -now));
          M[t][e] = now, l[t][e] = __fmul_rn(l[t][e], a), z[t][e] = __fmul_rn(z[t][e], a);
#pragma unroll
          for (int j = 0; j < TILES_W; j++) O[t][j][e] = __fmul_rn(O[t][j][e], a), O[t][j][e + 2] = __fmul_rn(O[t][j][e + 2], a);
        }
    }
    // ---- probabilities times value scale, [token][row] in shared memory; sums stay with the token's warp ----
    if (owner)
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const int tile = PLAIN ? warp : warp * 2 + i;
        float2 vs = make_float2(O_SCALE, O_SCALE), vz = make_float2(0.f, 0.f);
        if (!PLAIN) {
          const uint2 sz = lds64(v + (tile * 8 + g) * 8);
          const float2 f0 = unpack_half2(sz.x), f1 = unpack_half2(sz.y);
          vs = make_float2(f0.x * V_SCALE, f1.x * V_SCALE), vz = make_float2(__fmaf_rn(f0.x, v_centre, f0.y), __fmaf_rn(f1.x, v_centre, f1.y));
        }
        const uint32_t at = rest + C::P + (tile * 16 + g) * C::PITCH + c * 4;
#pragma unroll
        for (int t = 0; t < NT; t++) {
          const float p0 = exp2_fast(__fmaf_rn(S[i][t][0], SCALE, -M[t][0])), p1 = exp2_fast(__fmaf_rn(S[i][t][1], SCALE, -M[t][1]));
          const float p2 = exp2_fast(__fmaf_rn(S[i][t][2], SCALE, -M[t][0])), p3 = exp2_fast(__fmaf_rn(S[i][t][3], SCALE, -M[t][1]));
          l[t][0] = __fadd_rn(l[t][0], __fadd_rn(p0, p2)), l[t][1] = __fadd_rn(l[t][1], __fadd_rn(p1, p3));
          z[t][0] = __fmaf_rn(p0, vz.x, __fmaf_rn(p2, vz.y, z[t][0])), z[t][1] = __fmaf_rn(p1, vz.x, __fmaf_rn(p3, vz.y, z[t][1]));
          sts32(at + t * 16, pack_half2(__fmul_rn(p0, vs.x), __fmul_rn(p1, vs.x)));
          sts32(at + 8 * C::PITCH + t * 16, pack_half2(__fmul_rn(p2, vs.y), __fmul_rn(p3, vs.y)));
        }
      }
    if (!PLAIN && p.stages == 4 && s + 1 < steps) prepare(next);
    __syncthreads();
    // ---- outputs of this warp's channels over all tokens ----
    auto load_p = [&](int tile, uint32_t (&b)[NT][2]) {
      const uint32_t at = rest + C::P + (tile * 16 + (lane & 15)) * C::PITCH;
#pragma unroll
      for (int t = 0; t < NT; t += 2)
        if (t + 1 < NT) {
          uint32_t r[4];
          ldmatrix4_trans(r, at + (t + (lane >> 4)) * 16);
          b[t][0] = r[0], b[t][1] = r[1], b[t + 1 < NT ? t + 1 : t][0] = r[2], b[t + 1 < NT ? t + 1 : t][1] = r[3];
        } else {
          ldmatrix2_trans(b[t], at + t * 16);
        }
    };
    if constexpr (!PLAIN) {
#pragma unroll
      for (int tp = 0; tp < 4; tp++)
#pragma unroll
        for (int cp = 0; cp < (TILES_W + 1) / 2; cp++) {
          const int pair = TILES_W == 1 ? warp / 2 : warp * (TILES_W / 2) + cp;      // two channel tiles share a uint4; at D = 64 two warps share it
          const uint32_t at = v + C::PARAMS + v_word(tp * 2, pair * 2, lane, D) * 4;
          const uint4 u = lds128(at);
          uint4 w = make_uint4(0, 0, 0, 0);
          if (TWO) w = lds128(at + C::CODES);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            uint32_t b[NT][2];
            load_p(tp * 2 + h, b);
#pragma unroll
            for (int j = 0; j < (TILES_W == 1 ? 1 : 2); j++) {
              const bool odd = TILES_W == 1 ? warp & 1 : j;
              uint32_t a[4];
              unpack<TWO>(h ? (odd ? u.w : u.z) : (odd ? u.y : u.x), h ? (odd ? w.w : w.z) : (odd ? w.y : w.x), a);
              constexpr uint32_t CA = TWO ? 0x64806480u : 0x64086408u, CB = TWO ? 0x64806480u : 0x54805480u;       // 1152 | 1032 and 72
              a[0] = hsub2(a[0], CA), a[1] = hsub2(a[1], CB), a[2] = hsub2(a[2], CA), a[3] = hsub2(a[3], CB);
#pragma unroll
              for (int t = 0; t < NT; t++) mma_f16(O[t][TILES_W == 1 ? 0 : cp * 2 + j], a, b[t][0], b[t][1]);
            }
          }
        }
    } else {
#pragma unroll
      for (int tile = 0; tile < C::STEP / 16; tile++) {
        uint32_t b[NT][2];
        load_p(tile, b);
        const int row = tile * 16 + (lane & 7) + (lane >> 4) * 8;
#pragma unroll
        for (int j = 0; j < TILES_W; j++) {
          uint32_t a[4];
          ldmatrix4_trans(a, v + (row * (D / 8) + (((warp * TILES_W + j) * 2 + (lane >> 3 & 1)) ^ (row & 7))) * 16);
#pragma unroll
          for (int t = 0; t < NT; t++) mma_f16(O[t][j], a, b[t][0], b[t][1]);
        }
      }
    }
  };

  // The slots hold keys and values of step s and keys of step s + 1; the values of s + 1 and keys of s + 2 are asked for inside step s.
  const bool early = p.stages == 4 && !recent;
  if (early) load(0, 0), copy_commit(), load(0, 1), load(1, 0), copy_commit();
  grid_wait();
  // ---- q as B fragments [kp][t][lane]: two k tiles per uint4 ----
  for (int i = threadIdx.x; i < KP * NT * 32; i += 128) {
    const int r = part.row + i / 32 % NT * 8 + (i & 31) / 4, kp = i / (32 * NT), first = kp * 32 + (i & 3) * 2;
    uint32_t w[4] = {0, 0, 0, 0};
    if (i / 32 % NT * 8 + (i & 31) / 4 < part.rows) {
      const __half* q = p.q + ((size_t)(span.row + r / p.group) * p.kv_heads * p.group + head * p.group + r % p.group) * D + first;
#pragma unroll
      for (int j = 0; j < 4; j++) w[j] = *reinterpret_cast<const uint32_t*>(q + j * 8);
    }
    sts128(rest + C::Q + i * 16, make_uint4(w[0], w[1], w[2], w[3]));
  }
  if (p.stages == 4) {
    if (!early) load(0, 0), copy_commit(), load(0, 1), load(1, 0), copy_commit();
    copy_wait<1>();
    __syncthreads();
    if (!plain) {
      prepare(slots);
      __syncthreads();
    }
  }
  for (int s = 0; s < steps; s++) {
    if (p.stages != 4) {
      __syncthreads();
      load(s, 0), load(s, 1), copy_commit(), copy_wait<0>();
      __syncthreads();
      if (!plain) {
        prepare(slots + (2 * s % p.stages) * C::SLOT);
        __syncthreads();
      }
    }
    if constexpr (FULL_VIEW) run(Plain(), s);
    else if (plain) run(Plain(), s);
    else run(Packed(), s);
  }
  copy_wait<0>();

  // ---- sums over the warps, and out ----
  __syncthreads();
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int o = 4; o <= 16; o *= 2) l[t][e] = __fadd_rn(l[t][e], __shfl_xor_sync(~0u, l[t][e], o)), z[t][e] = __fadd_rn(z[t][e], __shfl_xor_sync(~0u, z[t][e], o));
      if (g == 0) {
        const uint32_t at = rest + C::C0 + (t * 8 + 2 * c + e) * 32 + warp * 4;
        sts32(at, __float_as_uint(l[t][e])), sts32(at + 16, __float_as_uint(z[t][e]));
      }
    }
  __syncthreads();
  const size_t base = (size_t)span.partial + ((size_t)head * items + item) * total + part.row;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = t * 8 + 2 * c + e;
      const uint32_t at = rest + C::C0 + r * 32;
      const float sum = sum4(lds128(at)), zero = sum4(lds128(at + 16));
      if (r < part.rows) {
        if (warp == 0 && g == 0) p.extremes[base + r] = make_float2(M[t][e], sum);
#pragma unroll
        for (int j = 0; j < TILES_W; j++) {
          float* out = p.partial + (base + r) * D + (warp * TILES_W + j) * 16 + g;
          out[0] = __fmaf_rn(O[t][j][e], 1.f / O_SCALE, zero), out[8] = __fmaf_rn(O[t][j][e + 2], 1.f / O_SCALE, zero);
        }
      }
    }
}
