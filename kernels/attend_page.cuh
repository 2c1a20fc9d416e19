// Matrix multiplications of a step with codes (a packed page) and with f16 tokens: q . k and p .
// v. Included by attend.cuh.
#pragma once

// 1,152 = 1,024 + 8 + 120 as a pair of f16: the offset of unpacked codes and the centre of their range.
enum : uint32_t { CODE_CENTRE = 0x64806480 };

DEV uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// For a packed page with keys at `k` in shared memory: stores q * s as B fragments, and the initial scores q . z. View
// Both subtracts 1032 sum(q * s), because codes are unpacked with an offset of 1,024 + 8 (`unpack`). Slices p of 32
// channels are summed as (p0 + p4 + ..) + (p1 + p5 + ..), plus (p2 + ..) + (p3 + ..), whether by one warp or by four.
template <class C>
DEV void prepare(const Warpgroup<C>& warpgroup, uint32_t k) {
  if constexpr (!C::FULL_VIEW) {
    constexpr int NT = C::NT, E = C::E, KP = C::KP;
    constexpr bool TWO = C::TWO;
    const int g = warpgroup.g, c = warpgroup.c, lane = warpgroup.lane, w4 = warpgroup.warp;
    const uint32_t rest = warpgroup.rest;
    const uint32_t minus1032[4] = {0xe408e408, 0xe408e408, 0xe408e408, 0xe408e408};  // pairs of f16
    uint4 s, z;  // scales and zero points of eight channels
    auto load_params = [&](int kp) {
      s = lds128(k + (kp * 4 + c) * 32);
      z = lds128(k + (kp * 4 + c) * 32 + 16);
      if (!TWO) {
        const uint32_t shift = pack_half2(-warpgroup.p.centre, -warpgroup.p.centre);
        z = make_uint4(hfma2(s.x, shift, z.x), hfma2(s.y, shift, z.y), hfma2(s.z, shift, z.z), hfma2(s.w, shift, z.w));
      }
    };
    auto add_channels = [&](int kp, int t, float (&sum)[2]) {
      // Rows g of this operand hold one half of the channels, rows g + 8 the other; each mma below uses one half of its
      // rows. The assignment of halves saves register moves, for z loaded from memory and for x computed in registers.
      const uint32_t za[4] = {z.x, TWO ? z.y : z.z, TWO ? z.z : z.y, z.w};
      const uint4 x = lds128(warpgroup.tail + ((kp * NT + t) * 32 + lane) * 16);
      const uint4 y = make_uint4(hmul2(x.x, s.x), hmul2(x.y, s.y), hmul2(x.z, s.z), hmul2(x.w, s.w));
      if (C::WGMMA) {  // cores [channel / 8][row tile], K-major
        const uint32_t words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int j = 0; j < 4; j++) sts32(rest + ((kp * 4 + j) * NT + t) * 128 + lane * 4, words[j]);
      } else {
        sts128(rest + ((kp * NT + t) * 32 + lane) * 16, y);
      }
      float zero0[4] = {0, 0, 0, 0}, zero1[4] = {0, 0, 0, 0}, offset[4] = {0, 0, 0, 0};
      mma_f16(zero0, za, x.x, TWO ? x.z : x.y);
      mma_f16(zero1, za, TWO ? x.y : x.z, x.w);
      if (TWO) {
        mma_f16(offset, minus1032, y.x, y.y);
        mma_f16(offset, minus1032, y.z, y.w);
      }
#pragma unroll
      for (int e = 0; e < E; e++)
        sum[e] =
            __fadd_rn(sum[e], __fmaf_rn(__fadd_rn(zero0[e], zero1[2 + e]), 1.f / Warpgroup<C>::SCORE_SCALE, offset[e]));
    };
    if constexpr (C::BY_ROWS) {
      if (w4 >= NT) return;
      float sum[4][2];
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i][0] = sum[i][1] = 0;
#pragma unroll
      for (int kp = 0; kp < KP; kp++) {
        load_params(kp);
        add_channels(kp, w4, sum[kp & 3]);
      }
      if (g == 0)
#pragma unroll
        for (int e = 0; e < E; e++)
          sts32(rest + C::C0 + warpgroup.row_of(w4, e) * 4,
                __float_as_uint(__fadd_rn(__fadd_rn(sum[0][e], sum[1][e]), __fadd_rn(sum[2][e], sum[3][e]))));
    } else {
      float sum[NT][2];
#pragma unroll
      for (int t = 0; t < NT; t++) sum[t][0] = sum[t][1] = 0;
#pragma unroll
      for (int kp = w4; kp < KP; kp += 4) {
        load_params(kp);
#pragma unroll
        for (int t = 0; t < NT; t++) add_channels(kp, t, sum[t]);
      }
      if (g == 0)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int e = 0; e < E; e++)
            sts32(rest + C::C0 + warpgroup.row_of(t, e) * 16 + w4 * 4, __float_as_uint(sum[t][e]));
    }
  }
}

// Scores of tokens of a packed page that a row does not see become minus infinity. Arguments as for `score_codes`.
template <class C>
DEV void mask_page(const Warpgroup<C>& warpgroup, int token, int hidden, int seen, float (&S)[2][C::NT][4]) {
  constexpr int NT = C::NT, E = C::E, TILES = 2;
  if (token + PAGE > seen)  // a page that only some rows see
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < E; e++)
        if (token + PAGE > (int)lds32(warpgroup.tail + C::LIMITS + warpgroup.row_of(t, e) * 8))
#pragma unroll
          for (int i = 0; i < TILES; i++) S[i][t][e] = S[i][t][e + 2] = minus_infinity();
  if (C::LOCAL && token < hidden)  // a page whose first tokens only some rows see
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < E; e++) {
        const int position = (int)lds32(warpgroup.tail + C::LIMITS + warpgroup.row_of(t, e) * 8 + 4);
        const int masked = first_visible(position, warpgroup.p.reach) - token - warpgroup.warp * 32 - warpgroup.g;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          if (i * 16 < masked) S[i][t][e] = minus_infinity();
          if (i * 16 + 8 < masked) S[i][t][e + 2] = minus_infinity();
        }
      }
}

// Codes of 64 channels, from 64 h on, of the warp's two token tiles. `k`: keys in shared memory.
template <class C>
DEV void load_keys(const Warpgroup<C>& warpgroup, uint32_t k, int h, uint4 (&up)[2], uint4 (&low)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t words = k + k_word(warpgroup.warp * 2 + i, h * 4, warpgroup.lane, C::D) * 4;
    up[i] = lds128(words + C::K_PARAMS);
    low[i] = make_uint4(0, 0, 0, 0);
    if (C::TWO) low[i] = lds128(words + C::LOWER);
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// S += codes times q * s by wgmma; releases the stage.
template <class C>
DEV void score_codes_wgmma(Warpgroup<C>& warpgroup, uint32_t k, float (&S)[2][C::NT][4]) {
  constexpr int D = C::D, NT = C::NT, TILES = 2;
  uint32_t a[2][TILES][4];  // for a step of 16 channels, double-buffered
  wgmma_fence();
#pragma unroll
  for (int h = 0; h < D / 64; h++) {
    uint4 up[TILES], low[TILES];
    load_keys(warpgroup, k, h, up, low);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (h * 4 + j >= 2) wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const uint32_t u[4] = {up[i].x, up[i].y, up[i].z, up[i].w}, l[4] = {low[i].x, low[i].y, low[i].z, low[i].w};
        unpack<true>(warpgroup.magic, u[j], l[j], a[j & 1][i]);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < TILES; i++)
        wgmma_columns<NT, 0>([&](int t, int e) -> float& { return S[i][t][e]; }, a[j & 1][i],
                             warpgroup.q_cores + (h * 4 + j) * NT * 256);
      wgmma_commit();
    }
  }
  warpgroup.release(0);
  wgmma_wait<0>();
}
#endif

// S += codes times q * s by mma.sync. Returns bits of all data loaded from the stage.
template <class C>
DEV uint32_t score_codes_mma(const Warpgroup<C>& warpgroup, uint32_t k, float (&S)[2][C::NT][4]) {
  constexpr int NT = C::NT, TILES = 2;
  constexpr bool TWO = C::TWO;
  uint32_t loaded = 0;
#pragma unroll
  for (int h = 0; h < C::D / 64; h++) {
    uint4 up[TILES], low[TILES];
    load_keys(warpgroup, k, h, up, low);
#pragma unroll
    for (int i = 0; i < TILES; i++) loaded |= up[i].x | low[i].x;
#pragma unroll
    for (int kp = 0; kp < 2; kp++) {
      uint4 b[NT];
#pragma unroll
      for (int t = 0; t < NT; t++) b[t] = lds128(warpgroup.rest + (((h * 2 + kp) * NT + t) * 32 + warpgroup.lane) * 16);
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        uint32_t a[4];
        unpack<TWO>(warpgroup.magic, kp ? up[i].z : up[i].x, kp ? low[i].z : low[i].x, a);
#pragma unroll
        for (int t = 0; t < NT; t++) mma_f16(S[i][t], a, b[t].x, b[t].y);
        unpack<TWO>(warpgroup.magic, kp ? up[i].w : up[i].y, kp ? low[i].w : low[i].y, a);
#pragma unroll
        for (int t = 0; t < NT; t++) mma_f16(S[i][t], a, b[t].z, b[t].w);
      }
    }
  }
  return loaded;
}

// Scores of a packed page, 32 tokens per warp. `token`: the page's first; tokens before `hidden` and from `seen` on are
// not seen by every row. Returns bits of all data loaded from the stage, for `Warpgroup::release`; with wgmma it
// releases the stage itself.
template <class C>
DEV uint32_t score_codes(Warpgroup<C>& warpgroup, int token, int hidden, int seen, float (&S)[2][C::NT][4]) {
  constexpr int NT = C::NT, E = C::E, TILES = 2;
  constexpr bool TWO = C::TWO;
  const uint32_t rest = warpgroup.rest, k = warpgroup.stages_at + warpgroup.stage * C::STAGE;
  uint32_t loaded = 0;
  // ---- initial scores ----
  float start[NT][2];
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const uint2 whole = C::BY_ROWS ? lds64(rest + C::C0 + (t * 8 + 2 * warpgroup.c) * 4) : make_uint2(0, 0);
#pragma unroll
    for (int e = 0; e < E; e++) {
      start[t][e] = C::BY_ROWS ? __uint_as_float(e ? whole.y : whole.x)
                               : sum4(lds128(rest + C::C0 + warpgroup.row_of(t, e) * 16));
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        S[i][t][e] = start[t][e];
        S[i][t][e + 2] = TWO ? start[t][e] : 0.f;
      }
    }
  }
  // ---- codes times q * s ----
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (C::WGMMA) {
    score_codes_wgmma(warpgroup, k, S);
  } else
#endif
    loaded = score_codes_mma(warpgroup, k, S);
  if (!TWO)
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int e = 0; e < E; e++) {
          S[i][t][e] = __fadd_rn(S[i][t][e], -S[i][t][e + 2]);
          S[i][t][e + 2] = __fmaf_rn(S[i][t][e + 2], 0.0625f, start[t][e]);
        }
  mask_page(warpgroup, token, hidden, seen, S);
  return loaded;
}

// Scores of f16 tokens, 16 per warp with tokens (`owner`), of the buffer (`recent`) or of a full page.
// Otherwise as `score_codes`.
template <class C>
DEV uint32_t score_halves(const Warpgroup<C>& warpgroup, bool recent, bool owner, int token, int hidden, int seen,
                          float (&S)[1][C::NT][4]) {
  constexpr int D = C::D, NT = C::NT, E = C::E;
  const int lane = warpgroup.lane, w4 = warpgroup.warp;
  const uint32_t k = warpgroup.stages_at + warpgroup.stage * C::STAGE;
  uint32_t loaded = 0;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) S[0][t][e] = owner ? 0.f : minus_infinity();
  if (owner) {
    const int row = w4 * 16 + (lane & 15);
#pragma unroll
    for (int kp = 0; kp < C::KP; kp++) {
      uint32_t a0[4], a1[4];
      ldmatrix4(a0, k + (row * (D / 8) + ((kp * 4 + (lane >> 4)) ^ (row & 7))) * 16);
      ldmatrix4(a1, k + (row * (D / 8) + ((kp * 4 + 2 + (lane >> 4)) ^ (row & 7))) * 16);
      loaded |= a0[0] | a1[0];
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const uint4 x = lds128(warpgroup.tail + ((kp * NT + t) * 32 + lane) * 16);
        mma_f16(S[0][t], a0, x.x, x.y);
        mma_f16(S[0][t], a1, x.z, x.w);
      }
    }
    const int own = token + w4 * 16 + warpgroup.g;  // this lane's first token; the second is 8 later
    if (recent || token + C::STEP > seen || (C::LOCAL && token < hidden))
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < E; e++) {
          const uint2 limit = lds64(warpgroup.tail + C::LIMITS + warpgroup.row_of(t, e) * 8);
          // Tokens [0, limit.x) are read from pages (in a local layer only visible ones),
          // [limit.x, limit.y] from the buffer.
          const int first = recent ? (int)limit.x : C::LOCAL ? first_visible((int)limit.y, warpgroup.p.reach) : 0;
          const int last = recent ? (int)limit.y : (int)limit.x - 1;
          if (own < first || own > last) S[0][t][e] = minus_infinity();
          if (own + 8 < first || own + 8 > last) S[0][t][e + 2] = minus_infinity();
        }
  }
  return loaded;
}

// P of 16 tokens as a B operand.
template <class C>
DEV void load_p(const Warpgroup<C>& warpgroup, int tile, uint32_t (&b)[C::NT][2]) {
  constexpr int NT = C::NT;
  const uint32_t tokens = warpgroup.rest + C::P + (tile * 16 + (warpgroup.lane & 15)) * C::PITCH;
#pragma unroll
  for (int t = 0; t < NT; t += 2)
    if (t + 1 < NT) {
      uint32_t r[4];
      ldmatrix4_trans(r, tokens + (t + (warpgroup.lane >> 4)) * 16);
      b[t][0] = r[0];
      b[t][1] = r[1];
      b[t + 1 < NT ? t + 1 : t][0] = r[2];
      b[t + 1 < NT ? t + 1 : t][1] = r[3];
    } else {
      ldmatrix2_trans(b[t], tokens + t * 16);
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// `accumulate_codes` by wgmma; it releases the stage.
template <class C>
DEV void accumulate_codes_wgmma(Warpgroup<C>& warpgroup, State<C>& state, uint32_t v) {
  constexpr int D = C::D, NT = C::NT, TILES_W = C::TILES_W;
  const int lane = warpgroup.lane, w4 = warpgroup.warp;
  auto& O = state.O;
  uint32_t a[2][2][4];  // for 16 tokens and two channel tiles, double-buffered
  constexpr int PAIRS = (TILES_W + 1) / 2, ACROSS = TILES_W == 1 ? 1 : 2;
  wgmma_fence();
#pragma unroll
  for (int tp = 0; tp < 4; tp++)
#pragma unroll
    for (int cp = 0; cp < PAIRS; cp++) {
      // two channel tiles share a uint4; at D = 64 two warps share it
      const int pair = TILES_W == 1 ? w4 / 2 : w4 * (TILES_W / 2) + cp;
      const uint32_t words = v + v_word(tp * 2, pair * 2, lane, D) * 4;
      const uint4 up = lds128(words + C::V_PARAMS), low = lds128(words + C::LOWER);
      if (tp == 3 && cp == PAIRS - 1) warpgroup.release(0);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if ((tp * PAIRS + cp) * 2 + h >= 2) wgmma_wait<1>();
#pragma unroll
        for (int j = 0; j < ACROSS; j++) {
          const bool odd = TILES_W == 1 ? w4 & 1 : j;
          unpack<true>(warpgroup.magic, h ? (odd ? up.w : up.z) : (odd ? up.y : up.x),
                       h ? (odd ? low.w : low.z) : (odd ? low.y : low.x), a[h][j]);
#pragma unroll
          for (int i = 0; i < 4; i++) a[h][j][i] = hsub2(a[h][j][i], CODE_CENTRE);
        }
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
          wgmma_columns<NT, 1>([&](int t, int e) -> float& { return O[t][TILES_W == 1 ? 0 : cp * 2 + j][e]; }, a[h][j],
                               warpgroup.p_cores + (tp * 2 + h) * NT * 256);
        wgmma_commit();
      }
    }
  wgmma_wait<0>();
}
#endif

// O += p . v of a packed page with values at `v`, a quarter of the channels per warp. Returns and
// releases as `score_codes` does.
//
// The tensor core truncates its accumulator. Over many pages of codes of one sign the bias would reach 3e-2 of the
// output of diffuse attention at 256k tokens. Both: codes are centred (16 U + L - 120) and the centre moves into the
// zero point. This also bounds the effect of a rounded probability by a value's distance from the centre. Upper: a
// page's sums start at zero and are added to O with rounding; drafts tolerate the remaining error.
template <class C>
DEV uint32_t accumulate_codes(Warpgroup<C>& warpgroup, State<C>& state, uint32_t v) {
  constexpr int D = C::D, NT = C::NT, E = C::E, TILES_W = C::TILES_W;
  constexpr bool TWO = C::TWO;
  const int lane = warpgroup.lane, w4 = warpgroup.warp;
  auto& O = state.O;
  uint32_t loaded = 0;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (C::WGMMA) {
    accumulate_codes_wgmma(warpgroup, state, v);
    return loaded;
  }
#endif
  float sum[NT][TILES_W][4];
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int j = 0; j < TILES_W; j++) sum[t][j][0] = sum[t][j][1] = sum[t][j][2] = sum[t][j][3] = 0;
#pragma unroll
  for (int tp = 0; tp < 4; tp++)
#pragma unroll
    for (int cp = 0; cp < (TILES_W + 1) / 2; cp++) {
      // two channel tiles share a uint4; at D = 64 two warps share it
      const int pair = TILES_W == 1 ? w4 / 2 : w4 * (TILES_W / 2) + cp;
      const uint32_t words = v + v_word(tp * 2, pair * 2, lane, D) * 4;
      const uint4 up = lds128(words + C::V_PARAMS);
      uint4 low = make_uint4(0, 0, 0, 0);
      if (TWO) low = lds128(words + C::LOWER);
      loaded |= up.x | low.x;
      uint32_t two[4];  // P of two token tiles, with a single row tile
      if (NT == 1) ldmatrix4_trans(two, warpgroup.rest + C::P + (tp * 32 + lane) * C::PITCH);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t b[NT][2];
        if (NT == 1) {
          b[0][0] = two[h * 2];
          b[0][1] = two[h * 2 + 1];
        } else
          load_p(warpgroup, tp * 2 + h, b);
#pragma unroll
        for (int j = 0; j < (TILES_W == 1 ? 1 : 2); j++) {
          const bool odd = TILES_W == 1 ? w4 & 1 : j;
          const int tile = TILES_W == 1 ? 0 : cp * 2 + j;
          uint32_t a[4];
          unpack<TWO>(warpgroup.magic, h ? (odd ? up.w : up.z) : (odd ? up.y : up.x),
                      h ? (odd ? low.w : low.z) : (odd ? low.y : low.x), a);
          if (TWO)
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = hsub2(a[i], CODE_CENTRE);
#pragma unroll
          for (int t = 0; t < NT; t++) mma_f16(TWO ? O[t][tile] : sum[t][tile], a, b[t][0], b[t][1]);
        }
      }
    }
  if (!TWO)
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int j = 0; j < TILES_W; j++)
#pragma unroll
        for (int e = 0; e < E; e++) {
          const float x = sum[t][j][e], y = sum[t][j][e + 2];
          O[t][j][e] = __fmaf_rn(__fadd_rn(x, -y), 0x1p24f, O[t][j][e]);
          O[t][j][e + 2] = __fmaf_rn(y, 0x1p20f, O[t][j][e + 2]);
        }
  return loaded;
}

// O += p . v of f16 tokens.
template <class C>
DEV uint32_t accumulate_halves(const Warpgroup<C>& warpgroup, State<C>& state, uint32_t v) {
  constexpr int D = C::D, NT = C::NT, TILES_W = C::TILES_W;
  const int lane = warpgroup.lane;
  uint32_t loaded = 0;
#pragma unroll
  for (int tile = 0; tile < C::STEP / 16; tile++) {
    uint32_t b[NT][2];
    load_p(warpgroup, tile, b);
    const int row = tile * 16 + (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (int j = 0; j < TILES_W; j++) {
      uint32_t a[4];
      ldmatrix4_trans(a,
                      v + (row * (D / 8) + (((warpgroup.warp * TILES_W + j) * 2 + (lane >> 3 & 1)) ^ (row & 7))) * 16);
      loaded |= a[0];
#pragma unroll
      for (int t = 0; t < NT; t++) mma_f16(state.O[t][j], a, b[t][0], b[t][1]);
    }
  }
  return loaded;
}
