// GEMMs of a draft step with the operations between them fused in, for one or two rows on Hopper:
//
//     draft_heads_*    norm of the hidden stream, GEMM, RoPE, queries out and keys and values into the rings
//     draft_rows       norm of the hidden stream, GEMM
//     draft_gated      norm of the hidden stream, GEMM, SiLU(gate) * up
//     draft_add_i8     GEMM of int8 inputs, added to the hidden stream
//     draft_add_bf16   GEMM of bfloat16 inputs, added to the hidden stream
//
// A draft step of one row is a chain of short memory reads, and separate kernels between them would take as long as the
// reads. So each block computes the int8 input of its warps itself (a warp needs an eighth) and stores its outputs in
// their final form. Weights do not depend on the previous kernel: a producer warp fills the pipeline stages in half an
// SM's shared memory while that kernel still runs in the other half.
//
// The norm's factor 1 / rms of a row is known only when all warps have synchronised, so it multiplies the
// outputs instead of the inputs.
//
// Weights are separate draft weights (blocks of `linear.cuh`), or the upper plane of a matrix in nibbles (layout.cuh;
// kernels named _planes). Then two blocks of 64 inputs replace one of 128, and zero points multiply sums of 64 codes.
//
// In this file lane = 4 g + c (ptx.cuh), h is a half of a group of 128 inputs, and j an output, 0 to 7, of a tile.
#include "layout.cuh"
#include "linear.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int DRAFT_TOGETHER = 4;     // tiles of a block that share a warp's reads of the inputs
constexpr int DRAFT_STAGE_TILES = 2;  // tiles per stage
// Stages of 17 or 18 KB in flight: first, while the previous kernel runs, and later. A launch has
// at least DRAFT_AHEAD stages.
constexpr int DRAFT_AHEAD_FIRST = 2, DRAFT_AHEAD = 3;
constexpr int DRAFT_ROWS = 2;  // rows are the even columns of an mma, so that a lane has outputs of one row
// Registers per thread: at entry, so that two blocks and a small one fit on an SM; of the loading warps after they
// release theirs; of the computing warps after that.
enum { DRAFT_ENTRY = 80, DRAFT_KEPT = 24, DRAFT_TAKEN = 104 };

// Weights of 16 outputs x 128 inputs of one warp, in bytes. Codes of 64 inputs are CODES apart; parameters begin at
// PARAMS, those of the second half NEXT_PARAMS further.
template <bool PLANES>
struct DraftLayout {
  static constexpr int BLOCK = PLANES ? 2 * UPPER_BLOCK : QUANT_BLOCK<4>;
  static constexpr int HALF = LINEAR_WARPS * BLOCK;
  static constexpr int STAGE = DRAFT_STAGE_TILES * HALF;
  static constexpr int CODES = PLANES ? UPPER_BLOCK : 512;
  static constexpr int PARAMS = PLANES ? UPPER_PARAMS : QUANT_BLOCK<4> - QUANT_PARAMS;
  static constexpr int NEXT_PARAMS = UPPER_BLOCK;
  static constexpr int GROUPS = PLANES ? 2 : 1;  // with parameters of their own
};

// Shared memory: [stages][STAGE] weights, f32 [tile][warp][row][16] sums, f32 [warp][2] squares, barriers
// [2][stages], int8 inputs [row][pitch], [row][groups] {f32 scale, f32 sum} of their groups, or {f32 scale, sums of
// the codes of both halves}.
template <bool PLANES>
struct DraftShared {
  static constexpr int STAGE = DraftLayout<PLANES>::STAGE;
  float *sums, *squares;
  uint32_t stages_at, full, empty, x, xs;
  int groups, pitch;  // pitch: 64 bytes more than a row, so that neighbouring rows are in other banks
  DEV DraftShared(uint8_t* shared, int stages, int groups, int rows) : groups(groups), pitch(groups * 128 + 64) {
    sums = reinterpret_cast<float*>(shared + stages * STAGE);
    squares = sums + DRAFT_TOGETHER * LINEAR_WARPS * 16 * rows;
    stages_at = shared_address(shared);
    full = shared_address(squares + LINEAR_WARPS * DRAFT_ROWS);
    empty = full + stages * 8;
    x = (empty + stages * 8 + 15) & ~15;
    xs = x + rows * pitch;
  }
  // Stores one warp's group of a row. Callers quantise several groups first and then store them, so that the stores do
  // not interrupt the computation.
  DEV void store_group(int row, int group, const Int8Group& codes) const {
    const int lane = threadIdx.x & 31;
    sts32(x + row * pitch + group * 128 + lane * 4, codes.codes);
    if (lane == 0)
      sts64(xs + (row * groups + group) * 8,
            make_uint2(__float_as_uint(codes.scale), PLANES ? codes.halves : __float_as_uint(codes.sum)));
  }
};

// ---- inputs ----
//
// `prefetch` is called before the previous kernel has ended. `stage` then quantises a warp's groups warp, warp + 8, ...
// of every row to int8 in shared memory. NORM: it also stores the warp's sums of squares.
//
// hidden f32 [row][width] times the norm's weight f32 [width]; the squares give the factor 1 / rms.
struct FromHidden {
  static constexpr bool NORM = true;
  const float *hidden, *weight;
  float eps;
  int width;
  static constexpr int AT_ONCE = 4;  // groups of a warp
  float4 factors[AT_ONCE];           // the weight, of groups first, first + 8, ...
  DEV float4 load_factor(int group) const {
    const int k = group * 128 + (threadIdx.x & 31) * 4;
    return k < width ? __ldg(reinterpret_cast<const float4*>(weight + k)) : make_float4(0, 0, 0, 0);
  }
  DEV void prefetch(int first) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) factors[i] = load_factor(first + i * LINEAR_WARPS);
  }
  template <bool PLANES>
  DEV void stage(const DraftShared<PLANES>& s, int rows) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      float square = 0;
#pragma unroll 1
      for (int first = warp; first < s.groups; first += AT_ONCE * LINEAR_WARPS) {
        if (s.groups > AT_ONCE * LINEAR_WARPS && (row || first > warp)) prefetch(first);
        float4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const int k = (first + i * LINEAR_WARPS) * 128 + lane * 4;
          v[i] = k < width ? load4(hidden + (size_t)row * width + k) : make_float4(0, 0, 0, 0);
        }
        Int8Group codes[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          square = __fmaf_rn(v[i].x, v[i].x, square);
          square = __fmaf_rn(v[i].y, v[i].y, square);
          square = __fmaf_rn(v[i].z, v[i].z, square);
          square = __fmaf_rn(v[i].w, v[i].w, square);
          const float4 f = factors[i];
          codes[i] = int8_group(make_float4(v[i].x * f.x, v[i].y * f.y, v[i].z * f.z, v[i].w * f.w));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          if (first + i * LINEAR_WARPS < s.groups) s.store_group(row, first + i * LINEAR_WARPS, codes[i]);
      }
      square = warp_sum(square);
      if (lane == 0) s.squares[warp * DRAFT_ROWS + row] = square;
    }
  }
};
// x bf16 [row][pitch].
struct FromBf16 {
  static constexpr bool NORM = false;
  const uint16_t* x;
  int width, pitch;
  DEV void prefetch(int) {}
  template <bool PLANES>
  DEV void stage(const DraftShared<PLANES>& s, int rows) const {
    constexpr int AT_ONCE = 7;  // twice that, 14,336 inputs, are in flight
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
      uint2 v[AT_ONCE], next[AT_ONCE];
      auto load = [&](uint2(&pairs)[AT_ONCE], int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const int k = (first + i * LINEAR_WARPS) * 128 + lane * 4;
          pairs[i] = k < width ? __ldcg(reinterpret_cast<const uint2*>(x + (size_t)row * pitch + k)) : make_uint2(0, 0);
        }
      };
      load(next, warp);
#pragma unroll 1
      for (int first = warp; first < s.groups; first += AT_ONCE * LINEAR_WARPS) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) v[i] = next[i];
        load(next, first + AT_ONCE * LINEAR_WARPS);
        Int8Group codes[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          codes[i] = int8_group(make_float4(__uint_as_float(v[i].x << 16), __uint_as_float(v[i].x & 0xffff0000u),
                                            __uint_as_float(v[i].y << 16), __uint_as_float(v[i].y & 0xffff0000u)));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          if (first + i * LINEAR_WARPS < s.groups) s.store_group(row, first + i * LINEAR_WARPS, codes[i]);
      }
    }
  }
};
// x int8 [row][groups * 128] and xs float2 [row][groups] {scale, sum}, as `linear_w4_*` reads them.
struct FromInt8 {
  static constexpr bool NORM = false;
  const int8_t* x;
  const float2* xs;
  DEV void prefetch(int) {}
  template <bool PLANES>
  DEV void stage(const DraftShared<PLANES>& s, int rows) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int row = 0; row < rows; row++)
#pragma unroll 1
      for (int first = warp; first < s.groups; first += 4 * LINEAR_WARPS) {
        const int group = first + lane / 8 * LINEAR_WARPS;  // eight lanes a group
        if (group >= s.groups && !PLANES) continue;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (group < s.groups) v = ldg_plain(x + ((size_t)row * s.groups + group) * 128 + lane % 8 * 16);
        uint32_t halves = 0;
        if constexpr (PLANES) {
          // A lane has 16 codes; four lanes hold a half.
          int sum = __dp4a((int)v.x, 0x01010101,
                           __dp4a((int)v.y, 0x01010101, __dp4a((int)v.z, 0x01010101, __dp4a((int)v.w, 0x01010101, 0))));
          halves = (uint32_t)sum << (lane & 4) * 4;
#pragma unroll
          for (int step = 4; step; step >>= 1) halves += __shfl_xor_sync(~0u, halves, step);
          if (group >= s.groups) continue;
        }
        if (lane % 8 == 0) {
          const float2 scale_sum = __ldcg(xs + (size_t)row * s.groups + group);
          sts64(s.xs + (row * s.groups + group) * 8,
                make_uint2(__float_as_uint(scale_sum.x), PLANES ? halves : __float_as_uint(scale_sum.y)));
        }
        sts128(s.x + row * s.pitch + group * 128 + lane % 8 * 16, v);
      }
  }
};

// ---- outputs ----
//
// A thread has outputs j and j + 8 of a tile. `load_early` loads their other operands before the sums are complete;
// `store` stores the outputs, a and b.
//
// y f32 [row][n].
struct ToRows {
  struct Early {};
  float* y;
  int n;
  DEV Early load_early(int, int, int) const { return {}; }
  DEV void store(int row, int tile, int j, float a, float b, Early) const {
    const int out = tile * 16 + j;
    if (out < n) y[(size_t)row * n + out] = a;
    if (out + 8 < n) y[(size_t)row * n + out + 8] = b;
  }
};
// hidden f32 [row][n] += y + bias; bias f32 [n] or null.
struct ToHidden {
  typedef float2 Early;
  float* hidden;
  const float* bias;
  int n;
  DEV Early load_early(int row, int tile, int j) const {
    const int out = tile * 16 + j;
    auto addend = [&](int o) {
      return o < n ? __ldcg(hidden + (size_t)row * n + o) + (bias ? __ldg(bias + o) : 0.f) : 0.f;
    };
    return make_float2(addend(out), addend(out + 8));
  }
  DEV void store(int row, int tile, int j, float a, float b, Early old) const {
    const int out = tile * 16 + j;
    if (out < n) hidden[(size_t)row * n + out] = old.x + a;
    if (out + 8 < n) hidden[(size_t)row * n + out + 8] = old.y + b;
  }
};
// Gate and up interleaved by eight, as is their bias f32 [2 width] or null -> x bf16 [row][pitch].
struct ToGated {
  typedef float2 Early;
  uint16_t* x;
  const float* bias;
  int width, pitch;
  DEV Early load_early(int, int tile, int j) const {
    const int out = tile * 16 + j;
    return bias && tile * 8 + j < width ? make_float2(__ldg(bias + out), __ldg(bias + out + 8)) : make_float2(0, 0);
  }
  DEV void store(int row, int tile, int j, float a, float b, Early early) const {
    const int k = tile * 8 + j;
    if (k < width) x[(size_t)row * pitch + k] = Bf16::from_float(silu(a + early.x) * (b + early.y));
  }
};
// Queries, keys and values, as `append_*` of elementwise.cu without head norms. Channels c and D / 2 + c of a head are
// outputs j and j + 8 of a tile (`weights_w4_*` with `paired`).
template <int D>
struct ToHeads {
  struct Early {
    float2 bias, angle;
    int slot, position;
  };
  const Row* rows;
  const float* bias;
  const float2* cos_sin;
  uint16_t *q, *ring_k, *ring_v;
  float scale;
  int heads, kv_heads, layer, slots;
  uint32_t* flag;
  static DEV int channel(int tile, int j) { return tile % (D / 16) * 8 + j; }
  DEV Early load_early(int row, int tile, int j) const {
    const int head = tile / (D / 16), c = channel(tile, j);
    Early early = {make_float2(0, 0), make_float2(1, 0), rows[row].slot, rows[row].position};
    if (bias) early.bias = make_float2(__ldg(bias + head * D + c), __ldg(bias + head * D + D / 2 + c));
    if (head < heads + kv_heads) early.angle = __ldcg(cos_sin + row * (D / 2) + c);
    return early;
  }
  DEV void store(int row, int tile, int j, float a, float b, Early early) const {
    const int head = tile / (D / 16), c = channel(tile, j);
    a += early.bias.x;
    b += early.bias.y;
    float x = a * early.angle.x - b * early.angle.y, z = b * early.angle.x + a * early.angle.y;
    uint16_t* out;  // the head's channels
    if (head < heads) {
      out = q + ((size_t)row * heads + head) * D;
      x *= scale;
      z *= scale;
    } else {
      const int kv = (head - heads) % kv_heads;
      out = (head < heads + kv_heads ? ring_k : ring_v) +
            ring_at(layer, early.slot, kv, early.position, slots, kv_heads, D);
    }
    const uint16_t low = Half::from_float(x), high = Half::from_float(z);
    const bool low_finite = (low & 0x7c00) != 0x7c00, high_finite = (high & 0x7c00) != 0x7c00;
    out[c] = low_finite ? low : 0;
    out[D / 2 + c] = high_finite ? high : 0;
    if (!low_finite || !high_finite) atomicOr(flag, FLAG_CACHE);
  }
};

// A warp's share of a stage: codes and parameters of 16 outputs x 128 k, for each of two tiles. Without a second tile
// the stage holds stale data, whose sums are not read.
template <bool PLANES>
struct DraftPiece {
  static constexpr int GROUPS = DraftLayout<PLANES>::GROUPS;
  uint4 v[2][2];            // codes [tile][half]
  uint2 params[2][GROUPS];  // [tile][group]
  // Bits of all that was loaded (`release_stage`).
  DEV uint32_t seen() const {
    uint32_t all = v[0][0].x | v[0][1].x | v[1][0].x | v[1][1].x;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) all |= params[0][i].x | params[1][i].x;
    return all;
  }
};
// A warp's position in the pipeline.
template <bool PLANES>
struct DraftReader {
  typedef DraftLayout<PLANES> Layout;
  // Shared memory: this lane's codes in the stage, the stage's barrier, and the ends of the stages' barriers.
  uint32_t codes, bar, first_bar, end_bar;
  int phase;
  DEV DraftReader(const DraftShared<PLANES>& s, int warp, int lane) {
    codes = s.stages_at + warp * Layout::BLOCK + lane * 16;
    bar = first_bar = s.full;
    end_bar = s.empty;
    phase = 0;
  }
  // Loads the warp's share of the next stage.
  DEV void fetch(DraftPiece<PLANES>& piece, int lane) {
    mbar_wait(bar, phase);
    const uint32_t params = codes + Layout::PARAMS - lane * 16 + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      piece.v[i][0] = lds128(codes + i * Layout::HALF);
      piece.v[i][1] = lds128(codes + i * Layout::HALF + Layout::CODES);
#pragma unroll
      for (int h = 0; h < Layout::GROUPS; h++)
        piece.params[i][h] = lds64(params + i * Layout::HALF + h * Layout::NEXT_PARAMS);
    }
    codes += Layout::STAGE;
    bar += 8;
    if (bar == end_bar) {
      codes -= (end_bar - first_bar) / 8 * Layout::STAGE;
      bar = first_bar;
      phase ^= 1;
    }
  }
  // Releases the stage that `fetch` read `ago` calls ago. Barriers of free stages follow those of full ones.
  DEV void release(int ago, const DraftPiece<PLANES>& piece) const {
    const uint32_t full = bar - ago * 8, bytes = end_bar - first_bar;
    release_stage(full + (full < first_bar ? 2 * bytes : bytes), piece.seen());
  }
};
// A warp's input of a group: the codes of row g / 2, for even g. Of row c it has the scale, a sixteenth of the scale,
// and the scale times two sums of codes: with PLANES those of the halves, else twice the group's.
template <bool PLANES>
struct DraftInput {
  uint4 b[2];
  float scale, sixteenth, sum[2];
  DEV DraftInput(const DraftShared<PLANES>& s, int group, int rows, int lane) {
    const int row = lane >> 3, c = lane & 3;
    const uint32_t x = s.x + row * s.pitch + c * 16 + group * 128;
    b[0] = b[1] = make_uint4(0, 0, 0, 0);
    if (!(lane & 4) && row < rows) {
      b[0] = lds128(x);
      b[1] = lds128(x + 64);
    }
    uint2 v = make_uint2(0, 0);
    if (c < rows) v = lds64(s.xs + (c * s.groups + group) * 8);
    scale = __uint_as_float(v.x);
    sixteenth = scale * 0.0625f;
    sum[0] = sum[1] = __uint_as_float(v.y);
    if (PLANES) {
      const int2 sums = half_sums(v.y);
      sum[0] = scale * (float)sums.x;
      sum[1] = scale * (float)sums.y;
    }
  }
};
// Outputs g and g + 8 of two tiles. The A operand of output g is the low nibbles; that of output g + 8 the whole bytes,
// 16 times the high nibbles plus the low ones, which are subtracted.
template <bool PLANES>
DEV void draft_multiply(float (&first)[2], float (&second)[2], const DraftPiece<PLANES>& piece,
                        const DraftInput<PLANES>& in) {
  constexpr uint32_t L = LOW_NIBBLES;
  constexpr int GROUPS = DraftLayout<PLANES>::GROUPS;
  int d[2][GROUPS][4];
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int h = 0; h < GROUPS; h++) d[t][h][0] = d[t][h][1] = d[t][h][2] = d[t][h][3] = INTEGER_BIAS_BITS;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const uint4 v = piece.v[t][h];
        const uint32_t p = half ? v.z : v.x, q = half ? v.w : v.y;
        mma_u8s8(d[t][h % GROUPS], p & L, p, q & L, q, half ? in.b[h].z : in.b[h].x, half ? in.b[h].w : in.b[h].y);
      }
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int h = 0; h < GROUPS; h++) {
      const float2 low = unpack_half2(piece.params[t][h].x), high = unpack_half2(piece.params[t][h].y);
      const float a = __int_as_float(d[t][h][0]), b = __int_as_float(d[t][h][2]);
      float (&acc)[2] = t ? second : first;
      acc[0] = __fmaf_rn(__fadd_rn(a, -integer_bias()), low.x * in.scale, __fmaf_rn(low.y, in.sum[h], acc[0]));
      acc[1] = __fmaf_rn(__fadd_rn(b, -a), high.x * in.sixteenth, __fmaf_rn(high.y, in.sum[h], acc[1]));
    }
}
// A warp's groups of TILES tiles.
template <int TILES, bool PLANES>
DEV void draft_batch(float (&acc)[DRAFT_TOGETHER][2], DraftReader<PLANES>& reader, const DraftShared<PLANES>& s,
                     int warp, int rows, int lane) {
#pragma unroll 1
  for (int group = warp; group - warp < s.groups; group += LINEAR_WARPS) {
    DraftPiece<PLANES> pieces[TILES / 2];
#pragma unroll
    for (int i = 0; i < TILES / 2; i++) reader.fetch(pieces[i], lane);
#pragma unroll
    for (int i = 0; i < TILES / 2; i++) reader.release(TILES / 2 - i, pieces[i]);
    if (group >= s.groups) break;
    const DraftInput<PLANES> input(s, group, rows, lane);
#pragma unroll
    for (int i = 0; i < TILES / 2; i++) draft_multiply(acc[2 * i], acc[2 * i + 1], pieces[i], input);
  }
}

// w: blocks [tiles][groups] (`DraftLayout`). Blocks take the tiles in turn; of a tile, warp w has groups w, w + 8, ...
// stages: pipeline stages, at least DRAFT_AHEAD.
template <bool PLANES, class In, class Out>
DEV void draft_gemm(const uint8_t* __restrict__ w, int groups, int tiles, int rows, int stages, In in, const Out& out) {
  constexpr int W = LINEAR_WARPS, T = DRAFT_TOGETHER;
  extern __shared__ __align__(128) uint8_t shared[];
  // Shuffled, so that the compiler treats it as uniform in the warp.
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const DraftShared<PLANES> s(shared, stages, groups, rows);
  const int own_tiles = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
  grid_trigger();
  if (threadIdx.x == 0) {
    mbar_init_stages(s.full, s.empty, stages, W * 32);
    mbar_init_done();
  }
  __syncthreads();
  if (warp >= W) {
    registers_give<DRAFT_KEPT>();
    if (threadIdx.x == W * 32)
      fill_weights<DRAFT_STAGE_TILES, T>(Pieces<DraftLayout<PLANES>::BLOCK>{w, groups}, s.stages_at, s.full, s.empty,
                                         stages, groups, own_tiles, DRAFT_AHEAD_FIRST, DRAFT_AHEAD);
    return;
  }
  registers_take<DRAFT_TAKEN>();
  in.prefetch(warp);
  grid_wait();
  in.stage(s, rows);
  __syncwarp();
  // This thread's outputs of a batch of tiles: j and j + 8 of one tile, for one row.
  const int j = threadIdx.x & 7, row = (threadIdx.x >> 3) % rows, batch_tile = (threadIdx.x >> 3) / rows;
  DraftReader<PLANES> reader(s, warp, lane);
#pragma unroll 1
  for (int first = 0; first < own_tiles; first += T) {
    const int count = min(T, own_tiles - first), tile = blockIdx.x + (first + batch_tile) * gridDim.x;
    typename Out::Early early;
    if (batch_tile < count) early = out.load_early(row, tile, j);
    float acc[T][2];
#pragma unroll
    for (int t = 0; t < T; t++) acc[t][0] = acc[t][1] = 0;
    if (count > 2)
      draft_batch<4>(acc, reader, s, warp, rows, lane);
    else
      draft_batch<2>(acc, reader, s, warp, rows, lane);
    if (first) bar_sync(1, W * 32);  // the previous batch's sums have been read
#pragma unroll
    for (int t = 0; t < T; t++)
      if (t < count && c < rows) {
        float* const sum = s.sums + ((t * W + warp) * rows + c) * 16 + g;
        sum[0] = acc[t][0];
        sum[8] = acc[t][1];
      }
    bar_sync(1, W * 32);
    if (batch_tile < count) {
      float lower = 0, upper = 0, square = 0;
#pragma unroll
      for (int i = 0; i < W; i++) {
        const float* sum = s.sums + ((batch_tile * W + i) * rows + row) * 16 + j;
        lower += sum[0];
        upper += sum[8];
        if (In::NORM) square += s.squares[i * DRAFT_ROWS + row];
      }
      if constexpr (In::NORM) {
        const float inverse_rms = __frsqrt_rn(square / (float)in.width + in.eps);
        lower *= inverse_rms;
        upper *= inverse_rms;
      }
      out.store(row, tile, j, lower, upper, early);
    }
  }
}

// Grid min(tiles, SMs), 384 threads, dynamic shared memory as `DraftShared`. Arguments: those of `draft_gemm`, then of
// the input and of the output (`From*`, `To*`).
#define DRAFT KERNEL __maxnreg__(DRAFT_ENTRY)
#define DRAFT_WEIGHTS const uint8_t *w, int groups, int tiles, int rows, int stages
#define DRAFT_HIDDEN const float *hidden, const float *weight, float eps, int width

// Names end in _planes if the weights are the upper plane of a matrix in nibbles.
#define DRAFT_HEADS(D, NAME, PLANES)                                                                                  \
  DRAFT draft_heads_##D##NAME(DRAFT_WEIGHTS, DRAFT_HIDDEN, const Row* step, const float* bias, const float2* cos_sin, \
                              uint16_t* q, uint16_t* ring_k, uint16_t* ring_v, float scale, int heads, int kv_heads,  \
                              int layer, int slots, uint32_t* flag) {                                                 \
    draft_gemm<PLANES>(                                                                                               \
        w, groups, tiles, rows, stages, FromHidden{hidden, weight, eps, width},                                       \
        ToHeads<D>{step, bias, cos_sin, q, ring_k, ring_v, scale, heads, kv_heads, layer, slots, flag});              \
  }
#define DRAFTS(NAME, PLANES)                                                                                           \
  DRAFT_HEADS(64, NAME, PLANES)                                                                                        \
  DRAFT_HEADS(128, NAME, PLANES)                                                                                       \
  DRAFT_HEADS(256, NAME, PLANES)                                                                                       \
  DRAFT draft_rows##NAME(DRAFT_WEIGHTS, DRAFT_HIDDEN, float* y, int n) {                                               \
    draft_gemm<PLANES>(w, groups, tiles, rows, stages, FromHidden{hidden, weight, eps, width}, ToRows{y, n});          \
  }                                                                                                                    \
  DRAFT draft_gated##NAME(DRAFT_WEIGHTS, DRAFT_HIDDEN, const float* bias, uint16_t* x, int inner, int pitch) {         \
    draft_gemm<PLANES>(w, groups, tiles, rows, stages, FromHidden{hidden, weight, eps, width},                         \
                       ToGated{x, bias, inner, pitch});                                                                \
  }                                                                                                                    \
  DRAFT draft_add_i8##NAME(DRAFT_WEIGHTS, const int8_t* x, const float2* xs, float* hidden, const float* bias,         \
                           int n) {                                                                                    \
    draft_gemm<PLANES>(w, groups, tiles, rows, stages, FromInt8{x, xs}, ToHidden{hidden, bias, n});                    \
  }                                                                                                                    \
  DRAFT draft_add_bf16##NAME(DRAFT_WEIGHTS, const uint16_t* x, int width, int pitch, float* hidden, const float* bias, \
                             int n) {                                                                                  \
    draft_gemm<PLANES>(w, groups, tiles, rows, stages, FromBf16{x, width, pitch}, ToHidden{hidden, bias, n});          \
  }
DRAFTS(, false)
DRAFTS(_planes, true)
#endif
