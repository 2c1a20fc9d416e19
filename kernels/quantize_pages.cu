// The quantiser of the cache: pages into nibble planes, from the recent tokens (flush) and from a prompt (store).
#include "quantize.cuh"

// Parameters of a cache group from its smallest and largest element (core::quantize, roundings balanced and paper).
DEV Group cache_group(float low, float high, bool balanced) {
  if (low == high) return rounded(0.f, low);
  const float range = __fsub_rn(high, low);
  if (!balanced) return rounded(fmaxf(__fdiv_rn(range, 15.f), SCALE_MIN), low);
  const float step = __fdiv_rn(range, 255.f);
  return rounded(fmaxf(__fmul_rn(16.f, step), SCALE_MIN), __fadd_rn(low, __fmul_rn(8.f, step)));
}

// Both nibbles of one element as a byte, U << 4 | L + 8.
DEV uint32_t cache_code(float x, float scale, float zero, bool balanced) {
  if (scale == 0.f) return 8;
  const float offset = __fsub_rn(x, zero);
  if (balanced)
    return (uint32_t)((int)fminf(fmaxf(rintf(__fdiv_rn(offset, __fmul_rn(scale, 0.0625f))), -8.f), 247.f) + 8);
  const float steps = __fdiv_rn(offset, scale), upper = fminf(fmaxf(rintf(steps), 0.f), 15.f);
  const float lower = fminf(fmaxf(rintf(__fmul_rn(16.f, __fsub_rn(steps, upper))), -8.f), 7.f);
  return (uint32_t)upper << 4 | (uint32_t)((int)lower + 8);
}

// Eight bytes of cache_code as the words of the two planes (layout.cuh).
struct Words {
  uint32_t upper = 0, lower = 0;
  DEV void set(int nibble, uint32_t code) {
    upper |= (code >> 4) << (4 * nibble);
    lower |= (code & 15) << (4 * nibble);
  }
  DEV uint32_t lower_word() const { return __funnelshift_r(lower, lower, 4); }
};

struct Page {
  uint8_t *upper, *lower;  // this page's blocks, or null
  uint16_t* full;          // f16
};

// Dynamic shared memory of flush_* and store_* in bytes: PAGE_SHARED_CHANNEL D + PAGE_SHARED.
constexpr int PAGE_SHARED_CHANNEL = 256, PAGE_SHARED = 4096;

// Elements from one token of a page to the next in shared memory: fragments are read without bank conflicts.
constexpr int token_pitch(int d) { return d + 8; }

// Codes, in words in the order of memory: the inverse of k_word and v_word.
template <int D, bool VALUES>
DEV void store_codes(const uint16_t* tile, const float2* params, const Page& page, bool balanced) {
  uint32_t* upper = (uint32_t*)(page.upper + (VALUES ? v_codes_at(D) : k_codes_at(D)));
  uint32_t* lower = page.lower ? (uint32_t*)(page.lower + (VALUES ? lower_v_at(D) : 0)) : nullptr;
  for (int i = threadIdx.x; i < PAGE * D / 8; i += 256) {
    // Word n of a uint4 that lane `owner` = 4 g + c will load, in token tile tt and channel tile ct.
    const int n = i & 3, owner = i >> 2 & 31, quartet = i >> 7, g = owner >> 2, c = owner & 3;
    const int tt = VALUES ? quartet / (D / 32) * 2 + (n >> 1) : quartet / (D / 64);
    const int ct = VALUES ? quartet % (D / 32) * 2 + (n & 1) : quartet % (D / 64) * 4 + n;
    Words w;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      // K tiles: tokens x channels; V tiles: channels x tokens.
      const int row = g + 8 * (e & 1), column = 2 * c + NIBBLE_COLUMN[e];
      const int token = tt * 16 + (VALUES ? column : row), channel = ct * 16 + (VALUES ? row : column);
      const float2 p = params[VALUES ? token : channel];
      w.set(e, cache_code(Half::to_float(tile[token * token_pitch(D) + channel]), p.x, p.y, balanced));
    }
    upper[i] = w.upper;
    if (lower) lower[i] = w.lower_word();
  }
}

// One page of keys (VALUES false) or values of one head, 256 threads: `src` has PAGE rows of D
// f16, `stride` elements apart.
template <int D, bool VALUES>
DEV void quantize_page(const uint16_t* src, int64_t stride, const Page& page, bool balanced, uint32_t* flag) {
  constexpr int PITCH = token_pitch(D);
  static_assert(PAGE * PITCH * 2 + (VALUES ? PAGE : D) * 8 <= PAGE_SHARED_CHANNEL * D + PAGE_SHARED);
  extern __shared__ __align__(16) uint16_t tile[];
  float2* params = (float2*)(tile + PAGE * PITCH);  // {scale, zero} of each channel or token
  const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
  bool bad = false;
  // ---- the page into shared memory, and into its full block ----
  for (int i = t; i < PAGE * D / 8; i += 256) {
    const int row = i / (D / 8), piece = i % (D / 8);
    const uint4 x = ldg_plain(src + row * stride + piece * 8);
    *(uint4*)(tile + row * PITCH + piece * 8) = x;
    if (page.full) *(uint4*)(page.full + (VALUES ? PAGE * D : 0) + row * D + piece * 8) = x;
    if (!page.upper) bad |= !finite_halves(x);
  }
  if (!page.upper) {
    if (bad) atomicOr(flag, FLAG_CACHE);
    return;
  }
  __syncthreads();
  // ---- parameters ----
  auto include = [&](float& low, float& high, uint16_t bits) {
    const float x = Half::to_float(bits);
    bad |= !is_finite(x);
    low = fminf(low, x);
    high = fmaxf(high, x);
  };
  if (VALUES) {
    uint16_t* out = (uint16_t*)(page.upper + v_params_at(D));
    for (int token = warp; token < PAGE; token += 8) {
      float low = infinity(), high = -low;
      for (int i = lane; i < D; i += 32) include(low, high, tile[token * PITCH + i]);
      warp_range(low, high);
      if (lane == 0) {
        const Group p = cache_group(low, high, balanced);
        bad |= !p.ok;
        params[token] = make_float2(p.scale, p.zero);
        out[v_param(token)] = p.scale_bits;
        out[v_param(token) + 1] = p.zero_bits;
      }
    }
  } else {
    uint16_t* out = (uint16_t*)page.upper;
    for (int channel = t; channel < D; channel += 256) {
      float low = infinity(), high = -low;
      for (int token = 0; token < PAGE; token++) include(low, high, tile[token * PITCH + channel]);
      const Group p = cache_group(low, high, balanced);
      bad |= !p.ok;
      params[channel] = make_float2(p.scale, p.zero);
      out[k_param(channel)] = p.scale_bits;
      out[k_param(channel) + 8] = p.zero_bits;
    }
  }
  if (bad) atomicOr(flag, FLAG_CACHE);
  __syncthreads();
  store_codes<D, VALUES>(tile, params, page, balanced);
}

template <int D>
DEV Page page_at(uint8_t* upper, uint8_t* lower, uint16_t* full, size_t block) {
  return {upper ? upper + block * upper_bytes(D) : nullptr, lower ? lower + block * lower_bytes(D) : nullptr,
          full ? full + block * (full_bytes(D) / 2) : nullptr};
}

// flush_{64,128,256}: quantises logical page `page` of `slot` from the rings, in all layers.
//
//     ring_k, ring_v      f16 [layers][slots][heads][RING][D]
//     upper, lower, full  pools [layers][pages][heads] of blocks (layout.cuh), or null
//     physical            the page's index in the pools
//     balanced            1 for rounding balanced, 0 for paper
//
// Grid (heads, layers, 2: keys, values), 256 threads.
template <int D>
DEV void flush(const uint16_t* ring_k, const uint16_t* ring_v, uint8_t* upper, uint8_t* lower, uint16_t* full,
               int pages, int slots, int slot, int page, int physical, int balanced, uint32_t* flag) {
  const int head = blockIdx.x, layer = blockIdx.y, heads = gridDim.x;
  const size_t first = ring_at(layer, slot, head, page * PAGE, slots, heads, D);
  const size_t block = ((size_t)layer * pages + physical) * heads + head;
  grid_trigger();
  grid_wait();
  const Page blocks = page_at<D>(upper, lower, full, block);
  if (blockIdx.z)
    quantize_page<D, true>(ring_v + first, D, blocks, balanced, flag);
  else
    quantize_page<D, false>(ring_k + first, D, blocks, balanced, flag);
}

// store_{64,128,256}: quantises pages first .. of one layer from prefill's scratch.
//
//     scratch             f16 [token][2 heads D]: keys, then values
//     upper, lower, full  the layer's pools [pages][heads], or null
//     table               physical page of each logical page of the slot
//
// Grid (heads, number of pages, 2), 256 threads.
template <int D>
DEV void store(const uint16_t* scratch, uint8_t* upper, uint8_t* lower, uint16_t* full, const int* table, int first,
               int balanced, uint32_t* flag) {
  const int head = blockIdx.x, page = first + blockIdx.y, heads = gridDim.x;
  const int64_t stride = 2 * heads * D;
  grid_trigger();
  grid_wait();
  const Page blocks = page_at<D>(upper, lower, full, (size_t)table[page] * heads + head);
  const uint16_t* keys = scratch + (int64_t)page * PAGE * stride + head * D;
  if (blockIdx.z)
    quantize_page<D, true>(keys + heads * D, stride, blocks, balanced, flag);
  else
    quantize_page<D, false>(keys, stride, blocks, balanced, flag);
}

// keep_recent: copies tokens first .. first + count - 1 of one layer from prefill's scratch to the rings, for any
// number of heads and any width d that is a multiple of 8. Grid (count, 2: keys, values), 128 threads.
KERNEL __launch_bounds__(128) keep_recent(const uint16_t* scratch, uint16_t* ring_k, uint16_t* ring_v, int layer,
                                          int slots, int slot, int heads, int d, int first, uint32_t* flag) {
  grid_trigger();
  grid_wait();
  const int token = first + blockIdx.x, pieces = heads * d / 8;
  const uint16_t* values = scratch + ((int64_t)token * 2 + blockIdx.y) * heads * d;
  uint16_t* ring = blockIdx.y ? ring_v : ring_k;
  bool bad = false;
  for (int i = threadIdx.x; i < pieces; i += 128) {
    const uint4 x = ldg_plain(values + i * 8);
    *(uint4*)(ring + ring_at(layer, slot, i * 8 / d, token, slots, heads, d) + i * 8 % d) = x;
    bad |= !finite_halves(x);
  }
  if (bad) atomicOr(flag, FLAG_CACHE);
}

#define PAGES(D)                                                                                                   \
  KERNEL __launch_bounds__(256)                                                                                    \
      flush_##D(const uint16_t* ring_k, const uint16_t* ring_v, uint8_t* upper, uint8_t* lower, uint16_t* full,    \
                int pages, int slots, int slot, int page, int physical, int balanced, uint32_t* flag) {            \
    flush<D>(ring_k, ring_v, upper, lower, full, pages, slots, slot, page, physical, balanced, flag);              \
  }                                                                                                                \
  KERNEL __launch_bounds__(256) store_##D(const uint16_t* scratch, uint8_t* upper, uint8_t* lower, uint16_t* full, \
                                          const int* table, int first, int balanced, uint32_t* flag) {             \
    store<D>(scratch, upper, lower, full, table, first, balanced, flag);                                           \
  }
PAGES(64)
PAGES(128)
PAGES(256)
