// The choice of a draft's pages: their scores, and the list of the best.
//
// Neither kernel is unrolled further: a step runs each once per layer, with cold instruction caches, and more code
// would take longer to load than it saves.
#include "layout.cuh"
#include "numbers.cuh"

// ---- scores ----
//
// scores_{HEADS}_{U}(upper, tables, table_pitch, q, choices, scores, score_pitch, ...): scores of pages. The score of a
// page is the largest over the heads of a group of sum(q m) + sqrt(sum((q h)^2)), m and h being the middle and half of
// a channel's range from code 0 to code 15 (core::attend::page_score).
//
//     upper    the layer's upper blocks [page][kv head]
//     tables   [slot][table_pitch] logical -> physical page
//     q        f16 [row][heads][d]
//     choices  [list]
//     scores   f32 [.][kv head][score_pitch]
//
// A page takes d / 8 lanes of eight channels each, and each lane has U pages: 2,048 U / d pages per block. HEADS heads
// are processed together, 1 for a single query head per KV head. Grid (blocks, kv heads, lists), CHOICE_THREADS
// threads, no shared memory. Pages were complete before the step, so their parameters are loaded before q is ready.
constexpr int CHOICE_THREADS = 256;  // of a block of scores_* and of select
// A list to make, written by the host.
struct PageChoice {
  int row, slot;  // row of q
  int pages;      // visible, at least one
  int scored;     // how many of them are chosen among; all later ones are listed
  int scores;     // index of the list's scores
};
// Sums over a page's lanes for four heads: each half of the lanes continues with two sums, each quarter with one.
DEV float quarter_sum(const float (&of_head)[4], int lanes, int lane) {
  const bool half = lane & lanes / 2, quarter = lane & lanes / 4;
  const float a =
      __fadd_rn(half ? of_head[2] : of_head[0], __shfl_xor_sync(~0u, half ? of_head[0] : of_head[2], lanes / 2));
  const float b =
      __fadd_rn(half ? of_head[3] : of_head[1], __shfl_xor_sync(~0u, half ? of_head[1] : of_head[3], lanes / 2));
  float sum = __fadd_rn(quarter ? b : a, __shfl_xor_sync(~0u, quarter ? a : b, lanes / 4));
  for (int step = lanes / 8; step; step >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
  return sum;
}
// The maximum of `best` and of HEADS heads' scores of a page, in every lane of the page. Each of its `lanes` lanes has
// eight channels: q of each head, scales and zero points. Codes stand for U s + z - centre s.
template <int HEADS>
DEV float page_score(const float2 (&q)[HEADS][4], uint4 scale, uint4 zero, float centre, int lanes, int lane,
                     float best) {
  const uint32_t scales[4] = {scale.x, scale.y, scale.z, scale.w}, zeros[4] = {zero.x, zero.y, zero.z, zero.w};
  float sum[HEADS] = {}, square[HEADS] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 s = unpack_half2(scales[i]), z = unpack_half2(zeros[i]);
    const float2 middle = make_float2(__fmaf_rn(7.5f - centre, s.x, z.x), __fmaf_rn(7.5f - centre, s.y, z.y));
    const float2 half = make_float2(7.5f * s.x, 7.5f * s.y);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      const float x = __fmul_rn(q[h][i].x, half.x), y = __fmul_rn(q[h][i].y, half.y);
      sum[h] = __fmaf_rn(q[h][i].y, middle.y, __fmaf_rn(q[h][i].x, middle.x, sum[h]));
      square[h] = __fmaf_rn(y, y, __fmaf_rn(x, x, square[h]));
    }
  }
  if constexpr (HEADS == 1) {
    for (int step = lanes / 2; step; step >>= 1) {
      sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(~0u, sum[0], step));
      square[0] = __fadd_rn(square[0], __shfl_xor_sync(~0u, square[0], step));
    }
    return fmaxf(best, __fadd_rn(sum[0], __fsqrt_rn(square[0])));
  } else {
    static_assert(HEADS == 4, "four sums for four quarters");
    float one = __fadd_rn(quarter_sum(sum, lanes, lane), __fsqrt_rn(quarter_sum(square, lanes, lane)));
    one = fmaxf(one, __shfl_xor_sync(~0u, one, lanes / 4));
    return fmaxf(best, fmaxf(one, __shfl_xor_sync(~0u, one, lanes / 2)));
  }
}
template <int HEADS, int U>
DEV void score_pages(const uint8_t* upper, const int* tables, int table_pitch, const __half* q,
                     const PageChoice* choices, float* scores, int score_pitch, int kv_heads, int group, int d,
                     float centre) {
  grid_trigger();
  const PageChoice choice = choices[blockIdx.z];
  const int lanes = d / 8, lane = threadIdx.x & (lanes - 1);
  const int across = CHOICE_THREADS / lanes;  // pages that a block has at a time
  const int head = blockIdx.y;
  const int first = blockIdx.x * U * across + threadIdx.x / lanes;
  int id[U];
  uint4 scale[U], zero[U];  // of channels 32 (lane / 4) + 2 (lane % 4) + {0, 1, 8, 9, 16, 17, 24, 25}
#pragma unroll
  for (int u = 0; u < U; u++)
    id[u] = tables[(size_t)choice.slot * table_pitch + min(first + u * across, choice.pages - 1)];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const uint8_t* params = upper + ((size_t)id[u] * kv_heads + head) * upper_bytes(d) + lane * 32;
    scale[u] = ldg_plain(params);
    zero[u] = ldg_plain(params + 16);
  }
  grid_wait();
  const __half* row = q + ((size_t)choice.row * kv_heads * group + head * group) * d + lane / 4 * 32 + lane % 4 * 2;
  float best[U];
#pragma unroll
  for (int u = 0; u < U; u++) best[u] = minus_infinity();
#pragma unroll 1
  for (int h = 0; h < group; h += HEADS) {  // if fewer than HEADS heads are left, the last one is repeated
    float2 x[HEADS][4];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[i][j] = unpack_half2(__ldcg(reinterpret_cast<const uint32_t*>(row + min(h + i, group - 1) * d + j * 8)));
#pragma unroll
    for (int u = 0; u < U; u++) best[u] = page_score(x, scale[u], zero[u], centre, lanes, lane, best[u]);
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int page = first + u * across;
    if (lane == 0 && page < choice.pages)
      scores[((size_t)choice.scores * kv_heads + head) * score_pitch + page] = best[u];
  }
}
#define SCORES(HEADS, U)                                                                                            \
  KERNEL __launch_bounds__(CHOICE_THREADS) scores_##HEADS##_##U(                                                    \
      const uint8_t* upper, const int* tables, int table_pitch, const __half* q, const PageChoice* choices,         \
      float* scores, int score_pitch, int kv_heads, int group, int d, float centre) {                               \
    score_pages<HEADS, U>(upper, tables, table_pitch, q, choices, scores, score_pitch, kv_heads, group, d, centre); \
  }
SCORES(1, 4)
SCORES(4, 2)
SCORES(4, 4)

// ---- the list of the best pages ----
//
// select(scores, score_pitch, choices, lists, list_pitch, kv_heads, n): writes lists [slot][kv head][list_pitch],
// ascending. Of the pages chosen among it lists the first, the newest and the n - 2 best others (ties to the lower
// number); it also lists all later pages. Without scores the newest pages are the best. Grid (kv heads, lists),
// CHOICE_THREADS threads, static shared memory.
namespace selection {

constexpr int KEPT = 2048;  // keys in shared memory; those of longer contexts are recomputed
constexpr int SLAB = 1024;  // pages listed at a time, a word of 32 for each lane
constexpr int WARPS = CHOICE_THREADS / 32;
// Up to this many pages are ranked by comparing each with every other, which takes fewer barriers than the buckets.
constexpr int RANKED = 512;
enum : uint32_t { ALWAYS = ~0u };  // key of a page that is listed in any case

struct Shared {
  alignas(16) uint32_t keys[KEPT];
  uint32_t lowest, highest;  // of the keys other than ALWAYS
  uint32_t above;            // pages with a key larger than the least
  uint32_t buckets[3][32];
  uint32_t words[2][2][32];
};

// The pages of one list.
struct Pages {
  const float* scores;  // null: the newest are the best
  int count, scored;    // visible pages, and how many of them are chosen among
  int wanted, kept;     // to list: of those chosen among, and of all
  bool dry;             // keys are made up, and nothing is listed
  int* list;

  // In the order of the scores, in which zeros differ as in core's total_cmp; 0 for no page.
  DEV uint32_t make_key(int page) const {
    if (page >= count) return 0;
    if (page == 0 || page >= scored - 1) return ALWAYS;
    if (!scores || dry) return page;
    const uint32_t bits = __float_as_uint(__ldcg(scores + page));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  DEV uint32_t key(const Shared& shared, int page) const { return page < KEPT ? shared.keys[page] : make_key(page); }
};

// Lists the pages of the highest rank, if there are at most RANKED.
DEV void list_ranked(const Pages& p, Shared& shared, int warp, int lane) {
  const int page_words = (p.count + 31) / 32;  // words of 32 pages
  uint32_t* keys = shared.keys;
  if (!p.dry) grid_wait();
#pragma unroll 1
  for (int page = threadIdx.x; page < page_words * 32; page += CHOICE_THREADS) keys[page] = p.make_key(page);
  __syncthreads();
#pragma unroll 1
  for (int word = warp; word < page_words; word += WARPS) {
    const uint32_t own = keys[word * 32 + lane];
    int rank = 0;  // pages above, and ties with a lower number
#pragma unroll 4
    for (int i = 0; i < word * 8; i++) {
      const uint4 k = reinterpret_cast<const uint4*>(keys)[i];
      rank += (k.x >= own) + (k.y >= own) + (k.z >= own) + (k.w >= own);
    }
#pragma unroll 8
    for (int i = 0; i < 32; i++) {
      const uint32_t k = keys[word * 32 + i];
      rank += k > own || (k == own && i < lane);
    }
#pragma unroll 4
    for (int i = word * 8 + 8; i < page_words * 8; i++) {
      const uint4 k = reinterpret_cast<const uint4*>(keys)[i];
      rank += (k.x > own) + (k.y > own) + (k.z > own) + (k.w > own);
    }
    const uint32_t chosen = __ballot_sync(~0u, word * 32 + lane < p.count && (own == ALWAYS || rank < p.kept));
    if (lane == 0) shared.words[0][0][word] = chosen;
  }
  __syncthreads();
#pragma unroll 1
  for (int word = warp; word < page_words; word += WARPS) {
    const uint32_t chosen = shared.words[0][0][word];
    const int before = warp_sum(lane < word ? __popc(shared.words[0][0][lane]) : 0);
    if (!p.dry && chosen >> lane & 1) p.list[before + __popc(chosen & ((1u << lane) - 1))] = word * 32 + lane;
  }
}

// Loads the keys and finds their range.
DEV void load_keys(const Pages& p, Shared& shared, int lane) {
  if (threadIdx.x < 32) shared.buckets[0][lane] = 0;
  if (threadIdx.x == 0) {
    shared.lowest = ~0u;
    shared.highest = 0;
    shared.above = 0;
  }
  __syncthreads();
  if (!p.dry) grid_wait();
  uint32_t low = ~0u, high = 0;
#pragma unroll 1
  for (int page = threadIdx.x; page < p.count; page += CHOICE_THREADS) {
    const uint32_t key = p.make_key(page);
    if (page < KEPT) shared.keys[page] = key;
    if (key != ALWAYS) {
      low = min(low, key);
      high = max(high, key);
    }
  }
  low = warp_min(low);
  high = warp_max(high);
  if (lane == 0) {
    atomicMin(&shared.lowest, low);
    atomicMax(&shared.highest, high);
  }
  __syncthreads();
}

// The smallest key that is kept: at least `kept` pages have it or a larger one. The range of keys is split into 32
// buckets, then the bucket with the smallest kept key is split again, until the kept pages are separated.
DEV uint32_t least_kept(const Pages& p, Shared& shared, int lane) {
  const int wanted = p.wanted - 2;  // in addition to the first and the newest
  uint32_t least = wanted > 0 ? shared.lowest : ALWAYS - 1;
  if (wanted <= 0 || p.kept >= p.count) return least;
  // `above`: pages in higher buckets of earlier turns. A bucket is 32 of the next turn's.
  int above = 0, shift = (31 - __clz(shared.highest - least | 1)) / 5 * 5;
#pragma unroll 1
  for (int turn = 0;; turn = turn == 2 ? 0 : turn + 1, shift -= 5) {
#pragma unroll 1
    for (int page = threadIdx.x; page < p.count; page += CHOICE_THREADS) {
      const uint32_t k = p.key(shared, page), bucket = (k - least) >> shift;
      if (k >= least && k != ALWAYS && bucket < 32) atomicAdd(&shared.buckets[turn][bucket], 1);
    }
    if (threadIdx.x < 32) shared.buckets[turn == 2 ? 0 : turn + 1][lane] = 0;  // not read before the next barrier
    __syncthreads();
    // Pages in this lane's bucket and above, and the highest bucket that has enough pages.
    const int own = shared.buckets[turn][lane];
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int higher = __shfl_down_sync(~0u, sum, step);
      if (lane + step < 32) sum += higher;
    }
    const int bucket = 31 - __clz(__ballot_sync(~0u, above + sum >= wanted));
    least += (uint32_t)bucket << shift;
    const int together = above + __shfl_sync(~0u, sum, bucket);
    above = together - __shfl_sync(~0u, own, bucket);
    if (shift == 0 || together == wanted) return least;
  }
}

// Lists the pages with a larger key than `least`, and in page order the needed number of ties.
DEV void list_from(const Pages& p, Shared& shared, uint32_t least, int warp, int lane) {
  int over = 0;
#pragma unroll 1
  for (int page = threadIdx.x; page < p.count; page += CHOICE_THREADS) over += p.key(shared, page) > least;
  over = warp_sum(over);
  if (lane == 0) atomicAdd(&shared.above, (uint32_t)over);
  int before = 0, before_ties = 0, turn = 0;
#pragma unroll 1
  for (int slab = 0; slab < p.count; slab += SLAB, turn ^= 1) {
    uint32_t (&words)[2][32] = shared.words[turn];  // above, ties
#pragma unroll 1
    for (int word = warp; word < 32; word += WARPS) {
      const int page = slab + word * 32 + lane;
      const uint32_t k = page < p.count ? p.key(shared, page) : 0;
      const uint32_t overs = __ballot_sync(~0u, k > least), equals = __ballot_sync(~0u, k == least);
      if (lane == 0) {
        words[0][word] = overs;
        words[1][word] = equals;
      }
    }
    __syncthreads();
    const int ties = p.kept - (int)shared.above;
    const uint32_t lower = (1u << lane) - 1;
    // Low half: pages above; high half: ties; both counted up to this lane's word.
    const uint32_t own = __popc(words[0][lane]) | __popc(words[1][lane]) << 16;
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t earlier = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += earlier;
    }
#pragma unroll 1
    for (int word = warp; word < 32; word += WARPS) {
      const uint32_t ahead = __shfl_sync(~0u, sum - own, word);
      const uint32_t overs = words[0][word], equals = words[1][word];
      const int tie = before_ties + (ahead >> 16) + __popc(equals & lower);
      const bool is_over = overs >> lane & 1, is_tie = equals >> lane & 1;
      if (!p.dry && (is_over || (is_tie && tie < ties)))
        p.list[before + (ahead & 0xffff) + __popc(overs & lower) + min(tie, ties)] = slab + word * 32 + lane;
    }
    const uint32_t slab_total = __shfl_sync(~0u, sum, 31);
    before += slab_total & 0xffff;
    before_ties += slab_total >> 16;
  }
}

}  // namespace selection

KERNEL __launch_bounds__(CHOICE_THREADS) select(const float* scores, int score_pitch, const PageChoice* choices,
                                                int* lists, int list_pitch, int kv_heads, int n) {
  using namespace selection;
  __shared__ Shared shared;
  grid_trigger();
  const PageChoice choice = choices[blockIdx.y];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Pages p;
  p.scores = scores ? scores + ((size_t)choice.scores * kv_heads + blockIdx.x) * score_pitch : nullptr;
  p.list = lists + ((size_t)choice.slot * kv_heads + blockIdx.x) * list_pitch;
  // A dry run loads the instructions while the scores are computed. Pays only where kernels overlap.
#ifdef QS_SM90
  const bool waits = scores;
#else
  const bool waits = false;
#endif
#pragma unroll 1
  for (int dry = waits; dry >= 0; dry--) {
    p.dry = dry;
    p.count = dry ? min(choice.pages, 64) : choice.pages;
    p.scored = dry ? p.count : choice.scored;
    p.wanted = dry ? max(p.count / 2, 2) : min(n, p.scored);
    p.kept = p.wanted + p.count - p.scored;
    __syncthreads();
    if (choice.pages <= RANKED) {
      list_ranked(p, shared, warp, lane);
    } else {
      load_keys(p, shared, lane);
      list_from(p, shared, least_kept(p, shared, lane), warp, lane);
    }
  }
}
