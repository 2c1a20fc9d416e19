// The running softmax of a work item's rows: reference maxima, sums, outputs. Included by attend.cuh.
#pragma once

// A row's reference maximum moves only when a score exceeds it by more than this (scores are base-2 logarithms). So for
// most pages the warps only vote, and exchange no maxima. p <= 2^REACH, so p times a value scale fits in f16 for value
// ranges up to some thousands.
constexpr float REACH = 4;

DEV float max4(uint4 v) {
  return fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w)));
}
DEV float sum4(uint4 v) {
  return __fadd_rn(__fadd_rn(__uint_as_float(v.x), __uint_as_float(v.y)),
                   __fadd_rn(__uint_as_float(v.z), __uint_as_float(v.w)));
}

// Sum or maximum (`f`) of N values over the eight lanes with the same c. The lane with row g then holds
// value g / (8 / N). The order of the operations does not depend on N.
template <int N, class F>
DEV float reduce_scatter(float (&x)[N], F f) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 16, n = N / 2; step >= 4; step >>= 1, n >>= 1) {
    if (n >= 1) {  // exchange half of the values
#pragma unroll
      for (int i = 0; i < n; i++) {
        const bool upper = lane & step;
        const float keep = upper ? x[i + n] : x[i], send = upper ? x[i] : x[i + n];
        x[i] = f(keep, __shfl_xor_sync(~0u, send, step));
      }
    } else {
      x[0] = f(x[0], __shfl_xor_sync(~0u, x[0], step));
    }
  }
  return x[0];
}

// The largest score of a lane's tokens for one of its rows.
template <int TILES, int NT>
DEV float row_maximum(const float (&S)[TILES][NT][4], int t, int e) {
  const float y = fmaxf(S[0][t][e], S[0][t][e + 2]);
  return TILES == 2 ? fmaxf(y, fmaxf(S[TILES - 1][t][e], S[TILES - 1][t][e + 2])) : y;
}

// State of a lane's columns. Tokens of all warps are combined in `rescale` (M) and `merge` (l, z);
// channels belong to one warp.
template <class C>
struct State {
  static constexpr int NT = C::NT, E = C::E, TILES_W = C::TILES_W, NV = Warpgroup<C>::NV;
  float O[NT][TILES_W][4];  // outputs times O_SCALE, without the zero points' contribution
  float M[NT][2];           // reference maxima
  float l[NT][2];           // sums of p over this warp's tokens
  float z[NT][2];           // sums of p times the values' zero points over this warp's tokens

  DEV void reset() {
#pragma unroll
    for (int t = 0; t < NT; t++) {
#pragma unroll
      for (int j = 0; j < TILES_W; j++) O[t][j][0] = O[t][j][1] = O[t][j][2] = O[t][j][3] = 0;
      M[t][0] = M[t][1] = LOG_ZERO;
      l[t][0] = l[t][1] = z[t][0] = z[t][1] = 0;
    }
  }
  DEV void scale_outputs(int t, int e, float a) {
#pragma unroll
    for (int j = 0; j < TILES_W; j++) {
      O[t][j][e] = __fmul_rn(O[t][j][e], a);
      O[t][j][e + 2] = __fmul_rn(O[t][j][e + 2], a);
    }
  }

  // Rows whose score exceeds the reference get the step's maximum over the warpgroup as reference.
  template <int TILES>
  DEV void rescale(const Warpgroup<C>& warpgroup, const float (&S)[TILES][NT][4], float scale) {
    float x[NV];
#pragma unroll
    for (int i = 0; i < NV; i++) x[i] = i < NT * E ? row_maximum(S, warpgroup.tile_of(i), i % E) : minus_infinity();
    warpgroup.scatter(C::RED, reduce_scatter(x, [](float a, float b) { return fmaxf(a, b); }));
    warpgroup.sync();
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < E; e++) {
        const float y = max4(lds128(warpgroup.rest + C::RED + warpgroup.row_of(t, e) * 16));
        const float reference = __fmaf_rn(y, scale, -M[t][e]) > REACH ? __fmul_rn(y, scale) : M[t][e];
        const float factor = exp2_fast(__fadd_rn(M[t][e], -reference));
        M[t][e] = reference;
        l[t][e] = __fmul_rn(l[t][e], factor);
        z[t][e] = __fmul_rn(z[t][e], factor);
        scale_outputs(t, e, factor);
      }
  }

  // Probabilities times value scale, f16 [token][row] in shared memory; sums stay in the token's warp. `values`: the
  // step's values in shared memory; `scale`: that of S.
  template <bool PLAIN, int TILES>
  DEV void weigh(const Warpgroup<C>& warpgroup, const float (&S)[TILES][NT][4], uint32_t values, float scale) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int tile = PLAIN ? warpgroup.warp : warpgroup.warp * 2 + i;
      // Scales and zero points of tokens g and g + 8.
      float2 vs = make_float2(Warpgroup<C>::O_SCALE, Warpgroup<C>::O_SCALE), vz = make_float2(0.f, 0.f);
      if (!PLAIN) {
        const uint2 params = lds64(values + (tile * 8 + warpgroup.g) * 8);
        const float2 f0 = unpack_half2(params.x), f1 = unpack_half2(params.y);
        vs = make_float2(f0.x * Warpgroup<C>::V_SCALE, f1.x * Warpgroup<C>::V_SCALE);
        vz = make_float2(__fmaf_rn(f0.x, warpgroup.v_centre, f0.y), __fmaf_rn(f1.x, warpgroup.v_centre, f1.y));
      }
      constexpr bool CORES = !PLAIN && C::WGMMA;  // [token / 8][row tile], N-major
      const uint32_t place =
          warpgroup.rest + C::P +
          (CORES ? tile * NT * 256 + warpgroup.lane * 4 : (tile * 16 + warpgroup.g) * C::PITCH + warpgroup.c * 4);
      // Bytes from token g to g + 8, and from one row tile to the next.
      constexpr int NEXT_TOKENS = CORES ? NT * 128 : 8 * C::PITCH, NEXT_ROWS = CORES ? 128 : 16;
#pragma unroll
      for (int t = 0; t < NT; t++) {
        float a[2] = {0, 0}, b[2] = {0, 0};  // tokens g and g + 8
#pragma unroll
        for (int e = 0; e < E; e++) {
          const float x = exp2_fast(__fmaf_rn(S[i][t][e], scale, -M[t][e]));
          const float y = exp2_fast(__fmaf_rn(S[i][t][e + 2], scale, -M[t][e]));
          l[t][e] = __fadd_rn(l[t][e], __fadd_rn(x, y));
          if (!PLAIN) z[t][e] = __fmaf_rn(x, vz.x, __fmaf_rn(y, vz.y, z[t][e]));
          a[e] = __fmul_rn(x, vs.x);
          b[e] = __fmul_rn(y, vs.y);
        }
        sts32(place + t * NEXT_ROWS, pack_half2(a[0], a[1]));
        sts32(place + NEXT_TOKENS + t * NEXT_ROWS, pack_half2(b[0], b[1]));
      }
    }
  }

  // Sums over the warpgroup's warps. Outputs get their scale and the zero points' contribution.
  DEV void merge_warps(const Warpgroup<C>& warpgroup) {
    const uint32_t rest = warpgroup.rest;
    float x[NV], y[NV];
#pragma unroll
    for (int i = 0; i < NV; i++) {
      x[i] = i < NT * E ? l[warpgroup.tile_of(i)][i % E] : 0.f;
      y[i] = i < NT * E ? z[warpgroup.tile_of(i)][i % E] : 0.f;
    }
    auto add = [](float a, float b) { return __fadd_rn(a, b); };
    warpgroup.scatter(C::RED, reduce_scatter(x, add));
    warpgroup.scatter(C::C0, reduce_scatter(y, add));
    warpgroup.sync();
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < E; e++) {
        const int r = warpgroup.row_of(t, e);
        l[t][e] = sum4(lds128(rest + C::RED + r * 16));
        z[t][e] = sum4(lds128(rest + C::C0 + r * 16));
        if (C::WARPGROUPS > 1 && warpgroup.warp == 0 && warpgroup.g == 0) {
          const uint32_t extremes = warpgroup.tail + C::EXTREMES + (warpgroup.index * C::ROWS + r) * 8;
          sts32(extremes, __float_as_uint(M[t][e]));
          sts32(extremes + 4, __float_as_uint(l[t][e]));
        }
#pragma unroll
        for (int j = 0; j < TILES_W; j++) {
          O[t][j][e] = __fmaf_rn(O[t][j][e], 1.f / Warpgroup<C>::O_SCALE, z[t][e]);
          O[t][j][e + 2] = __fmaf_rn(O[t][j][e + 2], 1.f / Warpgroup<C>::O_SCALE, z[t][e]);
        }
      }
  }

  // Every warpgroup gets the rows' maxima and sums over all warpgroups. Warpgroups other than 0 store their outputs,
  // scaled to these, in shared memory.
  DEV void merge_warpgroups(const Warpgroup<C>& warpgroup) {
    constexpr int WARPGROUPS = C::WARPGROUPS, ROWS = C::ROWS;
    __syncwarp();
    warpgroup.block_sync();
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < E; e++) {
        const uint32_t extremes = warpgroup.tail + C::EXTREMES + warpgroup.row_of(t, e) * 8;
        float largest = LOG_ZERO, sum = 0;
#pragma unroll
        for (int i = 0; i < WARPGROUPS; i++) largest = fmaxf(largest, __uint_as_float(lds32(extremes + i * ROWS * 8)));
#pragma unroll
        for (int i = 0; i < WARPGROUPS; i++) {
          const uint2 x = lds64(extremes + i * ROWS * 8);
          sum = __fmaf_rn(exp2_fast(__fadd_rn(__uint_as_float(x.x), -largest)), __uint_as_float(x.y), sum);
        }
        const float factor = exp2_fast(__fadd_rn(M[t][e], -largest));
        scale_outputs(t, e, factor);
        M[t][e] = largest;
        l[t][e] = sum;
      }
    if (warpgroup.index)
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < TILES_W; j++)
          sts128(warpgroup.rest + (((t * TILES_W + j) * 4 + warpgroup.warp) * 32 + warpgroup.lane) * 16,
                 make_uint4(__float_as_uint(O[t][j][0]), __float_as_uint(O[t][j][1]), __float_as_uint(O[t][j][2]),
                            __float_as_uint(O[t][j][3])));
    warpgroup.block_sync();
  }

  // End of a work item.
  DEV void merge(const Warpgroup<C>& warpgroup) {
    merge_warps(warpgroup);
    if constexpr (C::WARPGROUPS > 1) merge_warpgroups(warpgroup);
  }

  // Codes of the rows' only work item: O is [row][D] in shared memory, where q * s and P were.
  DEV void store_codes(const Warpgroup<C>& warpgroup, const Work& w) const {
    static_assert(C::ROWS * C::D * 4 <= C::RED, "O fits before the sums");
    const AttendArgs& p = warpgroup.p;
    if (warpgroup.warp == 0 && warpgroup.g == 0)
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < E; e++)
          sts32(warpgroup.tail + C::EXTREMES + warpgroup.row_of(t, e) * 4, __float_as_uint(l[t][e]));
    warpgroup.sync();
#pragma unroll 1
    for (int r = warpgroup.warp; r < w.tile.rows; r += 4) {
      const int query = w.tile.row + r;
      const int row = w.span.row + query / p.group, head = w.head * p.group + query % p.group;
      const float inverse = __frcp_rn(__uint_as_float(lds32(warpgroup.tail + C::EXTREMES + r * 4)));
      const uint4 v = lds128(warpgroup.rest + (r * C::D + warpgroup.lane * 4) * 4);
      const Int8Group codes =
          int8_group(make_float4(__fmul_rn(__uint_as_float(v.x), inverse), __fmul_rn(__uint_as_float(v.y), inverse),
                                 __fmul_rn(__uint_as_float(v.z), inverse), __fmul_rn(__uint_as_float(v.w), inverse)));
      const size_t index = input_index(row, head, p.kv_heads * p.group, p.panels);
      *reinterpret_cast<uint32_t*>(p.codes + index * 128 + input_code(row, warpgroup.lane, p.panels)) = codes.codes;
      if (warpgroup.lane == 0) p.scales[index] = make_float2(codes.scale, codes.sum);
    }
  }

  // Warpgroup 0 adds the other warpgroups' outputs in order, and writes the work item's partial results, or its codes.
  DEV void store(const Warpgroup<C>& warpgroup, const Work& w) {
    if (warpgroup.index) return;
    const AttendArgs& p = warpgroup.p;
    const bool direct = C::DIRECT && p.codes;
    const int total = w.span.queries * p.group;  // query rows of the span
    const size_t first = (size_t)w.span.partial + ((size_t)w.head * w.span.splits + w.split) * total + w.tile.row;
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int j = 0; j < TILES_W; j++) {
#pragma unroll
        for (int i = 1; i < C::WARPGROUPS; i++) {
          const uint4 x = lds128(warpgroup.rest + i * warpgroup.bytes +
                                 (((t * TILES_W + j) * 4 + warpgroup.warp) * 32 + warpgroup.lane) * 16);
          O[t][j][0] = __fadd_rn(O[t][j][0], __uint_as_float(x.x));
          O[t][j][1] = __fadd_rn(O[t][j][1], __uint_as_float(x.y));
          O[t][j][2] = __fadd_rn(O[t][j][2], __uint_as_float(x.z));
          O[t][j][3] = __fadd_rn(O[t][j][3], __uint_as_float(x.w));
        }
#pragma unroll
        for (int e = 0; e < E; e++) {
          const int r = warpgroup.row_of(t, e);
          const int channel = (warpgroup.warp * TILES_W + j) * 16 + warpgroup.g;
          if (direct) {
            const uint32_t out = warpgroup.rest + (r * C::D + channel) * 4;
            sts32(out, __float_as_uint(O[t][j][e]));
            sts32(out + 32, __float_as_uint(O[t][j][e + 2]));
          } else if (r < w.tile.rows) {
            float* out = p.partial + (first + r) * C::D + channel;
            out[0] = O[t][j][e];
            out[8] = O[t][j][e + 2];
          }
        }
      }
    if constexpr (C::DIRECT)
      if (direct) return store_codes(warpgroup, w);
    if (warpgroup.warp == 0 && warpgroup.g == 0)
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < E; e++) {
          const int r = warpgroup.row_of(t, e);
          if (r < w.tile.rows) p.extremes[first + r] = make_float2(M[t][e], l[t][e]);
        }
  }
};
