// Decode attention of a few query rows over a long cache (docs/design/attention.md).
//
//     score[r,t] = q[r] . k[t]          q already includes log2(e) / sqrt(D)
//     out[r]     = sum_t 2^(score[r,t] - M[r]) v[t] / sum_t 2^(score[r,t] - M[r])
//
// A work item is one split of one KV head: a run of pages and a share of the recent tokens. A warpgroup is four warps
// with their own pipeline stages in shared memory; the warpgroups of a block take a split's pages in turn. A step of a
// warpgroup is a page, or some recent tokens. Its phases, one file each:
//
//     attend_copy.cuh       load: keys and values into pipeline stages, by a producer warp and TMA or by the
//                           warpgroup's own threads
//     attend_page.cuh       prepare: q times the key scales
//                           score: q . k of 32 tokens per warp
//                           accumulate: p . v of a quarter of the channels per warp
//     attend_state.cuh      rescale: the running maximum moves
//                           weigh: scores to probabilities
//                           merge: the warpgroups' states into one partial result
//     attend_warpgroup.cuh  a consumer warp's indices and barriers, and unpacking codes to mma operands
//
// The maximum moves only by more than a threshold, as in FlashAttention-4. Partial results of splits are added by
// `merge_*` of attend.cu, as in Flash-Decoding.
//
// Codes are the mma A operand (K: tokens x channels, V: channels x tokens) and query rows its columns, so every code is
// unpacked once for up to 32 rows. Scales are not applied to codes: a key scale multiplies q (per page), a value scale
// the probability. Zero points become one number per row and page (keys) or a running sum per row (values).
//
// Row invariance: a row's bits depend on its position and the cache alone. The pages and recent tokens of a split and a
// warpgroup are a function of the position. A token that a row does not see leaves its state unchanged to the bit: its
// p is 0 and the factor 1. Columns of an mma are independent, and the number of row tiles NT only adds columns.
//
// In these files lane = 4 g + c (ptx.cuh), t is a tile of eight query rows, e a lane's row in it, kp a slice
// of 32 channels, tp a pair of token tiles. S, M, l and O are scores, reference maxima, sums of p and
// outputs, as in FlashAttention.
#pragma once
#include "layout.cuh"
#include "numbers.cuh"
#include "panel.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "hopper.cuh"
#endif

constexpr int UPPER = 0, BOTH = 1, FULL = 2;

// Consecutive rows of one sequence slot with the same division into splits. Written by the host.
struct Span {
  int slot;
  int row, queries;  // first row in the step, number of rows
  int position;      // of the first row
  int split_pages;   // pages per split
  int splits;        // per KV head
  int first_block;   // block of 128 tokens with the first recent token, from the start of the text
  int list, listed;  // list: index of the span's page list; listed: its length, or < 0 for all pages
  // Most tokens that a row reads from pages: those that were visible when the list was made. Without a list it is
  // larger than any text.
  int cap;
  int partial;  // first row of the span in the partial results
  int fresh;    // 1 if the list is made in this step
};
// Up to ROWS query rows of a span: row = query * group + head in group. Written by the host.
struct QueryTile {
  int span, row, rows;
  int first;  // its first work item
};

struct AttendArgs {
  const uint8_t *upper, *lower, *full;  // this layer's pools: [page][kv head] blocks
  const __half *ring_k, *ring_v;        // this layer's recent tokens [slot][kv head][RING][D]
  const int* tables;                    // [slot][table_pitch] logical -> physical page
  const int* lists;                     // [list][kv head][list_pitch] logical pages, ascending
  const __half* q;                      // [row][heads][D]
  const Span* spans;
  const QueryTile* tiles;
  float* partial;    // [partial row][D]: a span's splits are [kv head][split][query row]
  float2* extremes;  // [partial row] {maximum, sum}
  int table_pitch, list_pitch, kv_heads, group;
  int tile_count, items;  // work items over all tiles; block b has items b, b + gridDim.x, ...
  // Without TMA: stages of a warpgroup, 4 (the next page is loaded during the current one) or 2 (if shared memory is
  // small). With TMA: stages that are filled before the previous kernel has ended.
  int stages;
  float centre;             // Upper view: codes stand for U s + z - centre s
  const uint8_t* prefetch;  // weights that the next GEMM reads first: prefetched into L2 after the pages
  int prefetch_bytes;       // a multiple of 16
  int reach;                // LOCAL: tokens that a row sees, including its own
  // DIRECT, if every row has one split: int8 codes of the output projection's input and their {scale,
  // sum}, of the step's row 0, in `panels` (panel.cuh). Else codes is null, and `merge_*` follows.
  int8_t* codes;
  float2* scales;
  int panels, unused;
};

// Number of tokens that a row at `position` reads from pages (core::cache::visible_quantised).
DEV int visible_quantised(int position) { return max(0, position / PAGE - 1) * PAGE; }

// One instance of the kernel. ROWS: query rows, 4 or 8 NT. Four rows use the even columns of a tile, so a lane has one
// column instead of two and computes half the probabilities. STAGES: pipeline stages of a warpgroup; 0: set at launch,
// without TMA (not Hopper). TMA: producer warps fill the stages. HALF_SM: a block has half an SM. LOCAL: rows see their
// last `reach` tokens (core::cache::first_visible), and the rows of a span see the same first page.
template <int D_, int VIEW_, int ROWS_, int WARPGROUPS_, int STAGES_, bool HALF_SM_ = false, bool LOCAL_ = false>
struct Attend {
  static constexpr int D = D_;
  static constexpr int VIEW = VIEW_;
  static constexpr int ROWS = ROWS_;
  static constexpr int NT = (ROWS + 7) / 8;
  static constexpr int WARPGROUPS = WARPGROUPS_;
  static constexpr int STAGES = STAGES_;
  static constexpr int E = ROWS == 4 ? 1 : 2;  // rows of a lane in a tile
  static_assert(ROWS == 4 || ROWS == NT * 8);
  // A block writes the codes of a row's only item itself, as `merge_i8` would: a head is a group of 128.
  static constexpr bool DIRECT = VIEW == UPPER && D == 128;
  static constexpr bool TWO = VIEW == BOTH;
  static constexpr bool FULL_VIEW = VIEW == FULL;
  static constexpr bool TMA = STAGES > 0;
  static constexpr bool HALF_SM = HALF_SM_;
  static constexpr bool LOCAL = LOCAL_;
  // If the rows need more registers, producers release theirs; only whole warpgroups can do that.
  static constexpr bool HAND_OVER = TMA && (NT >= 3 || D == 256 || HALF_SM);
  static constexpr int CONSUMERS = WARPGROUPS * 128;
  static constexpr int THREADS = CONSUMERS + (HAND_OVER ? 128 : TMA ? WARPGROUPS * 32 : 0);
  static constexpr int KP = D / 32, TILES_W = D / 64;  // slices of 32 channels; tiles of 16 channels of a warp
  static constexpr int STEP = VIEW == UPPER ? 32 : 64, SUB = PAGE / STEP;  // f16 tokens of a step, steps of a page
  static constexpr int K_PARAMS = 4 * D;
  static constexpr int V_PARAMS = 512;
  static constexpr int PARAMS = K_PARAMS > V_PARAMS ? K_PARAMS : V_PARAMS;
  static constexpr int CODES = 64 * D;
  static constexpr int LOWER = PARAMS + CODES;  // where the lower codes of a stage begin
  // Bytes of a stage: of a packed page, of f16 tokens, and the larger of both.
  static constexpr int PACKED = LOWER + (TWO ? CODES : 0);
  static constexpr int PLAIN = STEP * D * 2;
  static constexpr int STAGE = FULL_VIEW || PLAIN > PACKED ? PLAIN : PACKED;
  // Bytes per token of P: stores and ldmatrix have no bank conflicts.
  static constexpr int PITCH = NT & 1 ? NT * 16 : NT * 16 + 16;
  // wgmma for three and four row tiles: one instruction instead of three or four mma.sync, with the same bits. q * s
  // and P are then stored as core matrices.
  static constexpr bool WGMMA = TMA && TWO && NT >= 3;
  static constexpr bool BY_ROWS = TWO && NT >= 3;  // prepare: a warp per row tile, else a warp per 32 channels
  // A consumer waits for its loads before it releases a stage (`release_stage`): by a proxy fence where that is faster,
  // and where collecting the loaded bits would need one register too many.
  static constexpr bool FENCED = NT >= 3 || D == 256 || VIEW == UPPER;
  static constexpr int QUERY = NT * 16 * D;  // bytes of q as B fragments
  // Shared memory of a warpgroup after its stages: q * s, probabilities (P), maxima or sums of the warps (RED), initial
  // scores (C0), barriers. At the split's end O overwrites q * s and P.
  static constexpr int P = FULL_VIEW ? 0 : QUERY;
  static constexpr int P_SIZE = (FULL_VIEW ? STEP : PAGE) * PITCH;
  static constexpr int O_SIZE = WARPGROUPS > 1 ? 2 * QUERY : 0;
  static constexpr int RED = P + P_SIZE > O_SIZE ? P + P_SIZE : O_SIZE;
  static constexpr int C0 = RED + ROWS * 16;
  static constexpr int BARS = C0 + ROWS * 16;
  static constexpr int REST = (BARS + STAGES * 16 + 127) / 128 * 128;
  // Shared memory of a block: the warpgroups', then q, {maximum, sum} of the warpgroups, {end of the
  // pages, position} of the rows.
  static constexpr int EXTREMES = QUERY, LIMITS = EXTREMES + WARPGROUPS * ROWS * 8, TAIL = LIMITS + ROWS * 8;
  // Registers per thread at entry: a block takes an SM (or half of it), minus what a block of `merge` needs to start
  // next to it. Each quarter of an SM has 16,384 registers and runs every fourth warp. TAKEN: registers of a consumer
  // after the producers have reduced theirs to KEPT.
  static constexpr int ENTRY = (16384 - 1024) / (HALF_SM ? 2 : 1) / ((THREADS / 32 + 3) / 4) / 256 * 8;
  static constexpr int KEPT = HALF_SM ? 48 : 40;
  static constexpr int TAKEN = (THREADS * ENTRY - 128 * KEPT) / CONSUMERS / 8 * 8;
};

// A warpgroup's share of a work item: `pages` steps over its pages (steps warpgroup, warpgroup + WARPGROUPS, ... of the
// split), then `recents` steps over recent tokens.
struct Work {
  Span span;
  QueryTile tile;
  int head, split, first_page, pages, recents;
  int recent;  // first recent step, counted from the start of the text; the next is splits * WARPGROUPS further
};
// The share of a warpgroup in work item `index`.
template <class C>
DEV Work work_at(const AttendArgs& p, int index, int warpgroup) {
  Work w;
  int tile = 0;  // the last one that begins at or before the item
  if (p.tile_count > 1)
    for (int base = 0, found = 32; found == 32 && base < p.tile_count; base += 32) {
      const int i = base + (threadIdx.x & 31);
      found = __popc(__ballot_sync(~0u, i < p.tile_count && p.tiles[i].first <= index));
      if (found) tile = base + found - 1;
    }
  w.tile = p.tiles[tile];
  w.span = p.spans[w.tile.span];
  const Span& span = w.span;
  const int item = index - w.tile.first;  // of the tile
  const int last = span.position + span.queries - 1;
  w.head = item / span.splits;
  w.split = item - w.head * span.splits;
  w.first_page = w.split * span.split_pages;
  if (C::LOCAL) w.first_page += first_visible(span.position, p.reach) / PAGE;
  const int all = span.listed >= 0 ? span.listed : min(visible_quantised(last), span.cap) / PAGE;
  const int steps = max(0, min(span.split_pages, all - w.first_page)) * (C::FULL_VIEW ? C::SUB : 1);
  w.pages = (steps - warpgroup + C::WARPGROUPS - 1) / C::WARPGROUPS;
  // Recent step u, counted from the start of the text, belongs to split u % splits, and there to warpgroup
  // (page steps + u / splits) % WARPGROUPS: after the pages, the warpgroups take turns. Neither depends on the span's
  // first row, so a row's sums have one order. Here u is the span's first step of this split.
  const int first = span.first_block * C::SUB;
  const int u = first + (w.split + span.splits - first % span.splits) % span.splits;
  const int taker = (span.split_pages * (C::FULL_VIEW ? C::SUB : 1) + u / span.splits) % C::WARPGROUPS;
  w.recent = u + (warpgroup + C::WARPGROUPS - taker) % C::WARPGROUPS * span.splits;
  const int left = last / C::STEP - w.recent;
  w.recents = left < 0 ? 0 : left / (span.splits * C::WARPGROUPS) + 1;
  return w;
}

#include "attend_copy.cuh"
#include "attend_warpgroup.cuh"
#include "attend_state.cuh"
#include "attend_page.cuh"

// Step n of a warpgroup over a packed page (PLAIN: over f16 tokens, of a full page or of the buffer). `token`: its
// first token. Every row sees the page tokens from `hidden` up to `seen`.
template <class C, bool PLAIN>
DEV void attend_step(Warpgroup<C>& warpgroup, State<C>& state, OwnCopies<C>& copies, const Work& w, int n, int token,
                     int hidden, int seen) {
  constexpr int NT = C::NT, E = C::E, TILES = PLAIN ? 1 : 2;  // token tiles of a warp
  constexpr float SCALE = PLAIN ? 1.f : Warpgroup<C>::SCORE_SCALE;
  const bool owner = !PLAIN || warpgroup.warp < C::STEP / 16;  // this warp has tokens
  warpgroup.ready(warpgroup.stage, warpgroup.parity);
  float S[TILES][NT][4];
  // ---- score ----
  uint32_t loaded;
  if constexpr (PLAIN)
    loaded = score_halves(warpgroup, n >= w.pages, owner, token, hidden, seen, S);
  else
    loaded = score_codes(warpgroup, token, hidden, seen, S);
  if (PLAIN || !C::WGMMA) warpgroup.release(loaded);
  // ---- rescale: if a score exceeds its row's reference maximum by more than REACH ----
  float over = minus_infinity();
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < E; e++) over = fmaxf(over, __fmaf_rn(row_maximum(S, t, e), SCALE, -state.M[t][e]));
  if (!C::TMA) copy_wait<0>();  // values of this step and keys of the next
  // Every warp has finished reading this step's keys, the last step's values, P and q * s.
  const bool moved = warpgroup.any(over > REACH);
  copies.load_ahead(n);
  if (moved) state.rescale(warpgroup, S, SCALE);
  // ---- weigh, overlapped with prepare for the next page ----
  warpgroup.ready(warpgroup.stage, warpgroup.parity);
  const uint32_t values = warpgroup.stages_at + warpgroup.stage * C::STAGE;
  const int following = warpgroup.stage + 1 == warpgroup.stages ? 0 : warpgroup.stage + 1;
  const bool prepares = !PLAIN && (C::TMA || warpgroup.stages == 4) && n + 1 < w.pages;
  if (prepares) warpgroup.ready(following, warpgroup.parity ^ (following == 0));
  if (owner) state.template weigh<PLAIN>(warpgroup, S, values, SCALE);
  if (prepares) prepare(warpgroup, warpgroup.stages_at + following * C::STAGE);
  warpgroup.publish();
  // ---- accumulate ----
  if constexpr (PLAIN)
    loaded = accumulate_halves(warpgroup, state, values);
  else
    loaded = accumulate_codes(warpgroup, state, values);
  if (PLAIN || !C::WGMMA) warpgroup.release(loaded);
}

// Waits for a work item's first keys, and prepares its first page.
template <class C>
DEV void begin_item(Warpgroup<C>& warpgroup, OwnCopies<C>& copies, const Work& w) {
  if (copies.ahead()) {
    copies.wait_first_keys();
    warpgroup.sync();
  }
  if (!C::FULL_VIEW && w.pages > 0 && (C::TMA || warpgroup.stages == 4)) {
    warpgroup.ready(warpgroup.stage, warpgroup.parity);
    prepare(warpgroup, warpgroup.stages_at + warpgroup.stage * C::STAGE);
    warpgroup.publish();
  }
}

// The kernel: `shared` is all of its shared memory.
template <class C>
DEV void attend(const AttendArgs& p, uint8_t* shared) {
  constexpr int WARPGROUPS = C::WARPGROUPS;
  const uint32_t base = shared_address(shared);
  grid_trigger();
  // Descriptions, tables, pages and lists of earlier steps were complete before the step's first kernel began, so they
  // are read before the previous kernel has ended. Fresh lists, q and recent tokens may be written in this step, so
  // they are read after `grid_wait`. That holds for all recent tokens: a verify window can be split over two spans, and
  // the second span reads what the first one appended.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (C::TMA) {
    const int warp = threadIdx.x >> 5;
    begin_stages<C>(base);
    if (warp >= WARPGROUPS * 4) {
      if (C::HAND_OVER) registers_give<C::KEPT>();
      if (warp - WARPGROUPS * 4 < WARPGROUPS) produce<C>(p, base, warp - WARPGROUPS * 4);
      return;
    }
    if (C::HAND_OVER) registers_take<C::TAKEN>();
  }
#endif
  Warpgroup<C> warpgroup(p, base);
  bool waited = false;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Work w = work_at<C>(p, index, warpgroup.index);
    OwnCopies<C> copies(p, w, warpgroup.index, warpgroup.stages_at, warpgroup.stages);
    if (!C::TMA) {
      warpgroup.stage = 0;
      if (w.span.listed >= 0 && !waited) {
        grid_wait();
        waited = true;
      }
      copies.begin();
    }
    if (!waited) {
      grid_wait();
      waited = true;
    }
    warpgroup.load_query(w);
    // A list was made for this row or an earlier one, so every listed page is visible.
    const int seen =
        w.span.listed >= 0 ? 0x7fffffff : min(visible_quantised(w.span.position + w.tile.row / p.group), w.span.cap);
    const int hidden =
        C::LOCAL ? first_visible(w.span.position + (w.tile.row + w.tile.rows - 1) / p.group, p.reach) : 0;
    warpgroup.block_sync();

    State<C> state;
    state.reset();
    begin_item(warpgroup, copies, w);
    // Without TMA and with two stages, loads do not overlap computation.
    auto fetch = [&](int n) {
      if (C::TMA || warpgroup.stages == 4) return;
      warpgroup.sync();
      copies.load_step(n);
      warpgroup.sync();
      if (!C::FULL_VIEW && n < w.pages) {
        prepare(warpgroup, warpgroup.stages_at);
        warpgroup.sync();
      }
    };
    int n = 0;
#pragma unroll 1
    for (; n < w.pages; n++) {
      fetch(n);
      if constexpr (C::FULL_VIEW)
        attend_step<C, true>(warpgroup, state, copies, w, n,
                             w.first_page * PAGE + (warpgroup.index + n * WARPGROUPS) * C::STEP, hidden, seen);
      else
        attend_step<C, false>(warpgroup, state, copies, w, n, (w.first_page + warpgroup.index + n * WARPGROUPS) * PAGE,
                              hidden, seen);
    }
#pragma unroll 1
    for (; n < w.pages + w.recents; n++) {
      fetch(n);
      attend_step<C, true>(warpgroup, state, copies, w, n,
                           (w.recent + (n - w.pages) * w.span.splits * WARPGROUPS) * C::STEP, hidden, seen);
    }
    if (!C::TMA) copy_wait<0>();
    state.merge(warpgroup);
    state.store(warpgroup, w);
    warpgroup.block_sync();  // the next item overwrites q, limits and the warpgroups' results
  }
}

// Defines the kernel `name` of an instance Attend<...>, given by the arguments after SHARED. It has BLOCK threads,
// SHARED bytes of shared memory and STAGE_BYTES more per pipeline stage. PER_SM: blocks of an SM, without TMA. build.rs
// copies the rows of the tables for the launcher.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define REGISTERS(C, PER_SM) __maxnreg__((C::ENTRY))
#else
#define REGISTERS(C, PER_SM) __launch_bounds__(128, PER_SM)
#endif
#define ATTEND_KERNEL(name, PER_SM, BLOCK, STAGE_BYTES, SHARED, ...)                                     \
  struct name##_of : Attend<__VA_ARGS__> {};                                                             \
  static_assert(name##_of::THREADS == BLOCK && name##_of::WARPGROUPS * name##_of::STAGE == STAGE_BYTES); \
  static_assert(name##_of::WARPGROUPS * name##_of::REST + name##_of::TAIL == SHARED);                    \
  KERNEL REGISTERS(name##_of, PER_SM) name(const __grid_constant__ AttendArgs args) {                    \
    extern __shared__ __align__(128) uint8_t shared[];                                                   \
    attend<name##_of>(args, shared);                                                                     \
  }
