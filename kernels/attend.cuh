// Decode attention of a few query rows over a long cache, split into items that are merged in a fixed order.
//
//   score[r,t] = q[r] . k[t]          q already carries log2(e) / sqrt(D)
//   out[r]     = sum_t 2^(score[r,t] - M[r]) v[t] / sum_t 2^(score[r,t] - M[r])
//
// Codes are the mma A operand (K: tokens x channels, V: channels x tokens) and the query rows its columns, so every code is unpacked once for up
// to 32 rows. On Hopper codes of both views are wgmma's A operand in registers where the rows are more than 16. Scales never touch the codes: a key scale multiplies q (per page), a value scale multiplies the probability, zero points become one
// number per row and page (keys) or a running sum per row (values). Four warps, a ring, share a page: warp w scores tokens 32w.. and accumulates
// channels w D/4.. of all tokens; the probabilities cross the warps through shared memory. A row's reference maximum moves only when a score exceeds
// it by more than REACH (scores are base-2 logarithms), so most pages need a vote and no exchange.
//
// An item is a run of pages of one KV head, dealt to the rings of a block in turn, then its share of the recent tokens. On Hopper a block has a
// multiprocessor to itself, or between products of a draft half of one: a producer warp per ring keeps the ring's slots filled by the copy engine, a
// slot holding the keys or the values of one step. Elsewhere a block is one ring whose threads copy for themselves.
//
// Row invariance: a row's bits depend on its position and the cache alone. How pages and recent tokens are dealt to items and rings is a function of
// the position; what a row does not see leaves its state unchanged to the bit (p = 0, factor 1); columns of an mma do not mix; the number of row
// tiles NT only adds columns, and four rows leave every second one out.
#pragma once
#include "layout.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "hopper.cuh"
#endif

constexpr int UPPER = 0, BOTH = 1, FULL = 2;
// p <= 2^REACH, so that p times a value scale stays inside f16 for value ranges up to some thousands.
constexpr float REACH = 4;
#define MASKED __uint_as_float(0xff800000u)      // score of a token that a row does not see: -infinity
constexpr float NOTHING = -1e30f;        // maximum of a row that has seen no token; finite, so that differences are not NaN

// Consecutive rows of one slot whose positions are cut alike.
struct Span {
  int slot, row, queries, position;      // first row in the step, rows, position of the first
  int chunk_pages, chunks;               // pages of an item, items of a KV head
  int first_block;                       // block of 128 tokens with the first recent token, absolute
  int list, listed;                      // pages chosen for a draft: index of the span's list, entries; listed < 0: all pages
  int cap;                               // no row reads more than this many tokens from pages (a list is older than the row); large: the law
  int partial;                           // first row of the span in the partial results
  int fresh;                             // the list is made in this step
};
struct Part { int span, row, rows, first; };     // up to ROWS query rows of a span: row = query * group + head in group; first: its first item

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
  int part_count, items;                 // items over all parts; block b has items b, b + gridDim.x, ...
  int stages;                            // slots of a ring where threads copy. 4: the next page is under way while one is worked on; 2: small shared memory.
                                         // With the copy engine: slots that a ring fills before the kernel ahead has ended
  float centre;                          // Upper view: codes stand for U s + z - centre s
  const uint8_t* behind;                 // what a kernel behind reads first: asked into L2 by the copy engine once the pages are under way
  int behind_bytes, unused;              // a multiple of 16
};

DEV int quantised(int position) { return max(0, position / PAGE - 1) * PAGE; }

// ROWS: query rows, 4 or 8 NT. Four are in the even columns of a tile, so that a lane has one of them and not two: half the work of probabilities.
// STAGES: slots of a ring; 0: as launched, and threads copy (not Hopper). BESIDE: a block has half a multiprocessor.
template <int D_, int VIEW_, int ROWS_, int RINGS_, int STAGES_, bool BESIDE_ = false>
struct Attend {
  static constexpr int D = D_, VIEW = VIEW_, ROWS = ROWS_, NT = (ROWS + 7) / 8, RINGS = RINGS_, STAGES = STAGES_;
  static constexpr int E = ROWS == 4 ? 1 : 2;                                     // rows of a lane in a tile
  static_assert(ROWS == 4 || ROWS == NT * 8);
  static constexpr bool TWO = VIEW == BOTH, FULL_VIEW = VIEW == FULL, ENGINE = STAGES > 0, BESIDE = BESIDE_;
  // Where registers do not suffice for the rows the producers hand theirs over, which whole groups of four warps do.
  static constexpr bool HAND_OVER = ENGINE && (NT >= 3 || D == 256 || BESIDE);
  static constexpr int CONSUMERS = RINGS * 128, THREADS = CONSUMERS + (HAND_OVER ? 128 : ENGINE ? RINGS * 32 : 0);
  static constexpr int STEP = VIEW == UPPER ? 32 : 64, SUB = PAGE / STEP;         // f16 tokens of a step, steps of a page
  static constexpr int K_PARAMS = 4 * D, V_PARAMS = 512, PARAMS = K_PARAMS > V_PARAMS ? K_PARAMS : V_PARAMS, CODES = 64 * D;
  static constexpr int LOWER = PARAMS + CODES;                                    // where a slot's lower codes begin
  static constexpr int PACKED = LOWER + (TWO ? CODES : 0), PLAIN = STEP * D * 2, SLOT = FULL_VIEW || PLAIN > PACKED ? PLAIN : PACKED;
  static constexpr int PITCH = NT & 1 ? NT * 16 : NT * 16 + 16;                   // bytes per token of P: stores and ldmatrix without bank conflicts
  // wgmma for three and four row tiles: one instruction for what mma.sync takes three or four, with the same bits. q * s and P are cores then.
  static constexpr bool WGMMA = ENGINE && TWO && NT >= 3;
  static constexpr bool BY_ROWS = TWO && NT >= 3;                                 // prepare: a warp per row tile, else a warp per 32 channels
  // A proxy fence waits for the loads from a slot (`slot_left`) where a register more is one too many, and where it is faster.
  static constexpr bool FENCED = NT >= 3 || D == 256 || VIEW == UPPER;
  static constexpr int QUERY = NT * 16 * D;                                       // q as B fragments
  // A ring: slots, then q * s, probabilities, maxima or sums of the warps, starts of the scores, barriers. At the item's end O lies where q * s and P were.
  static constexpr int P = FULL_VIEW ? 0 : QUERY, P_SIZE = (FULL_VIEW ? STEP : PAGE) * PITCH, O_SIZE = RINGS > 1 ? 2 * QUERY : 0;
  static constexpr int RED = P + P_SIZE > O_SIZE ? P + P_SIZE : O_SIZE, C0 = RED + ROWS * 16, BARS = C0 + ROWS * 16, REST = (BARS + STAGES * 16 + 127) / 128 * 128;
  // A block: rings, then q, {maximum, sum} of the rings, {end of the pages, position} of the rows.
  static constexpr int EXTREMES = QUERY, LIMITS = EXTREMES + RINGS * ROWS * 8, TAIL = LIMITS + ROWS * 8;
  // Registers of a thread at entry: a block takes a multiprocessor (or half of it), but for what a block of `merge` needs to come up beside it. Each
  // quarter of a multiprocessor has 16,384 for every fourth warp. TAKEN: those of a consumer once the producers have kept KEPT.
  static constexpr int ENTRY = (16384 - 1024) / (BESIDE ? 2 : 1) / ((THREADS / 32 + 3) / 4) / 256 * 8, KEPT = BESIDE ? 48 : 40, TAKEN = (THREADS * ENTRY - 128 * KEPT) / CONSUMERS / 8 * 8;
};

DEV float max4(uint4 v) { return fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w))); }
DEV float sum4(uint4 v) { return __fadd_rn(__fadd_rn(__uint_as_float(v.x), __uint_as_float(v.y)), __fadd_rn(__uint_as_float(v.z), __uint_as_float(v.w))); }
DEV uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// A constant that stays in a register: a LOP3 takes one immediate only, and a uniform register costs a copy per use.
DEV uint32_t in_register(uint32_t v) { return __shfl_sync(~0u, v, threadIdx.x & 31); }
struct Magic { uint32_t h1024, bytes; };                   // f16 pairs of 1024, and their upper bytes

// A word of upper codes, or an upper and a lower word, as an f16 A fragment. Both: 1024 + 16 U + (L + 8).
// Upper: an integer n below 1024 in the low bits of an f16 is the subnormal number n 2^-24, which tensor cores take as it is. Rows g are the codes of both
// rows, U + 16 U8, rows g + 8 16 U8 alone, which is taken off the results of the former: so four instructions do for the eight codes of a word.
template <bool TWO>
DEV void unpack(const Magic& m, uint32_t u, uint32_t l, uint32_t (&a)[4]) {
  if (!TWO) {
    a[0] = u & 0x00ff00ff, a[1] = u & 0x00f000f0, a[2] = __byte_perm(u, 0, 0x4341), a[3] = a[2] & 0x00f000f0;
  } else {
    const uint32_t x = select_bits(u, l, 0xf0f0f0f0);                 // bytes of rows g + 8
    uint32_t y = select_bits(l, u, 0xf0f0f0f0);
    y = __funnelshift_l(y, y, 4);                                     // bytes of rows g
    a[0] = and_or(y, 0x00ff00ff, m.h1024), a[1] = and_or(x, 0x00ff00ff, m.h1024);
    a[2] = __byte_perm(y, m.bytes, 0x4341), a[3] = __byte_perm(x, m.bytes, 0x4341);
  }
}

// Sum or maximum over the eight lanes of a column pair, N values at a time: afterwards lane g holds value g / (8 / N). The same tree for every N.
template <int N, class F>
DEV float reduce_scatter(float (&x)[N], F f) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 16, n = N / 2; o >= 4; o >>= 1, n >>= 1) {
    if (n >= 1) {
#pragma unroll
      for (int i = 0; i < n; i++) {
        const bool up = lane & o;
        const float keep = up ? x[i + n] : x[i], send = up ? x[i] : x[i + n];
        x[i] = f(keep, __shfl_xor_sync(~0u, send, o));
      }
    } else {
      x[0] = f(x[0], __shfl_xor_sync(~0u, x[0], o));
    }
  }
  return x[0];
}

// What a ring does for an item: `pages` steps over its pages (steps ring, ring + RINGS, ... of the item), then `recents` over recent tokens.
struct Work {
  Span span;
  Part part;
  int head, item, first_page, pages, recents;
  int recent;                            // first recent step, counted from the start of the text; the next is chunks * RINGS further
};
template <class C>
DEV Work work_at(const AttendArgs& p, int index, int ring) {
  Work w;
  int at = 0;
  if (p.part_count > 1)                  // the last part that begins at or before the item
    for (int base = 0, found = 32; found == 32 && base < p.part_count; base += 32) {
      const int i = base + (threadIdx.x & 31);
      found = __popc(__ballot_sync(~0u, i < p.part_count && p.parts[i].first <= index));
      if (found) at = base + found - 1;
    }
  w.part = p.parts[at], w.span = p.spans[w.part.span];
  const Span& span = w.span;
  const int local = index - w.part.first, last = span.position + span.queries - 1;
  w.head = local / span.chunks, w.item = local - w.head * span.chunks, w.first_page = w.item * span.chunk_pages;
  const int all = span.listed >= 0 ? span.listed : min(quantised(last), span.cap) / PAGE;
  const int steps = max(0, min(span.chunk_pages, all - w.first_page)) * (C::FULL_VIEW ? C::SUB : 1);
  w.pages = (steps - ring + C::RINGS - 1) / C::RINGS;
  // Recent step u belongs to item u modulo the items, and to the rings in turn, beginning with the one that has fewest pages.
  const int first = span.first_block * C::SUB, u = first + (w.item + span.chunks - first % span.chunks) % span.chunks;
  const int of = (span.chunk_pages * (C::FULL_VIEW ? C::SUB : 1) + u / span.chunks) % C::RINGS;
  w.recent = u + (ring + C::RINGS - of) % C::RINGS * span.chunks;
  const int left = last / C::STEP - w.recent;
  w.recents = left < 0 ? 0 : left / (span.chunks * C::RINGS) + 1;
  return w;
}

// Copies the keys (or values) of step n of a ring's work into a slot, by one warp with the copy engine or by the four warps of the ring. Page numbers
// are read a step ahead: keys before values, steps in order.
template <class C>
struct Copier {
  const AttendArgs& p;
  int ring, id, next;                    // physical pages of the step whose keys were copied last, and of the one after it
  uint64_t once;                         // pages are read once: they leave L2 before what is read again

  DEV int page(const Work& w, int n) const {
    const int logical = w.first_page + (ring + n * C::RINGS) / (C::FULL_VIEW ? C::SUB : 1);
    const int* list = p.lists + ((size_t)w.span.list * p.kv_heads + w.head) * p.list_pitch;
    return p.tables[(size_t)w.span.slot * p.table_pitch + (w.span.listed >= 0 ? list[logical] : logical)];
  }
  DEV void begin(const Work& w) {
    if (w.pages > 0) next = page(w, 0);
  }
  DEV void rows(const __half* from, uint32_t to) const {
    constexpr int COPIERS = C::ENGINE ? 32 : 128;
    // 16-byte piece j of token t lies at piece j ^ (t & 7): ldmatrix meets no bank twice
#pragma unroll 4
    for (int i = threadIdx.x % COPIERS; i < C::STEP * C::D / 8; i += COPIERS) {
      const int t = i / (C::D / 8), j = i % (C::D / 8);
      copy16_once(to + (t * (C::D / 8) + (j ^ (t & 7))) * 16, from + i * 8, once);
    }
  }
  // `full`: the slot's barrier
  DEV void copy(const Work& w, int n, int value, uint32_t to, uint32_t full) {
    const bool recent = n >= w.pages;
    if (!value && !recent) {
      id = next;
      if (n + 1 < w.pages) next = page(w, n + 1);
    }
    if (recent || C::FULL_VIEW) {
      if (recent) {
        const int token = (w.recent + (n - w.pages) * w.span.chunks * C::RINGS) * C::STEP;
        rows((value ? p.ring_v : p.ring_k) + (((size_t)w.span.slot * p.kv_heads + w.head) * RING + token % RING) * C::D, to);
      } else {
        const uint8_t* block = p.full + ((size_t)id * p.kv_heads + w.head) * full_bytes(C::D);
        rows(reinterpret_cast<const __half*>(block) + (value * PAGE + (ring + n * C::RINGS) % C::SUB * C::STEP) * C::D, to);
      }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if (C::ENGINE) copy_arrive(full);
#endif
    } else {
      const size_t at = (size_t)id * p.kv_heads + w.head;
      const uint8_t* up = p.upper + at * upper_bytes(C::D) + (value ? v_params_at(C::D) : 0);
      const uint8_t* low = p.lower + at * lower_bytes(C::D) + (value ? lower_v_at(C::D) : 0);
      const int bytes = (value ? C::V_PARAMS : C::K_PARAMS) + C::CODES;
      if constexpr (C::ENGINE) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if (threadIdx.x % 32 == 0) {
          mbar_expect(full, bytes + (C::TWO ? C::CODES : 0));
          bulk_copy(to, up, bytes, full, once);
          if (C::TWO) bulk_copy(to + C::LOWER, low, C::CODES, full, once);
        } else {
          mbar_arrive(full);
        }
#endif
      } else {
        for (int i = threadIdx.x; i < bytes / 16; i += 128) copy16_once(to + i * 16, up + i * 16, once);
        if (C::TWO)
#pragma unroll
          for (int i = 0; i < C::CODES / 2048; i++) copy16_once(to + C::LOWER + (i * 128 + threadIdx.x) * 16, low + (i * 128 + threadIdx.x) * 16, once);
      }
    }
  }
};

// Steps over f16 tokens and over packed pages share their code; which of them a step is, is known when it is compiled.
struct Plain { static constexpr bool value = true; };
struct Packed { static constexpr bool value = false; };

template <class C>
DEV void attend(const AttendArgs& p, uint8_t* shared) {
  constexpr int D = C::D, NT = C::NT, ROWS = C::ROWS, E = C::E, RINGS = C::RINGS, KP = D / 32, TILES_W = D / 64;       // TILES_W: channel tiles of a warp
  constexpr bool TWO = C::TWO, FULL_VIEW = C::FULL_VIEW, ENGINE = C::ENGINE;
  constexpr float SCORE_SCALE = TWO ? 0.0625f : 0x1p24f;      // a score of the units that codes are in
  // Probabilities enter as p * scale * V_SCALE; the target's codes are 16 times finer. O is kept times O_SCALE.
  constexpr float V_SCALE = TWO ? 4.f : 16.f, O_SCALE = TWO ? 64.f : 16.f;
  const int stages = ENGINE ? C::STAGES : p.stages, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t base = shared_address(shared), ring_bytes = stages * C::SLOT + C::REST, tail = base + RINGS * ring_bytes;
  grid_trigger();
  // Descriptions, tables, pages and lists that an earlier step made were complete before the step's first kernel began, so they are read ahead of the
  // kernel before this one. Fresh lists and q are written in this step, and so may recent tokens be: a window may
  // be two spans, whose second sees what the first appended.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (ENGINE) {
    if (threadIdx.x < RINGS) {
      const uint32_t bars = base + threadIdx.x * ring_bytes + C::STAGES * C::SLOT + C::BARS;
      for (int i = 0; i < C::STAGES; i++) mbar_init(bars + i * 8, 32), mbar_init(bars + (C::STAGES + i) * 8, 128);    // slot full, by the producer's lanes; slot left, by the four warps'
      mbar_init_done();
    }
    __syncthreads();
    if (warp >= RINGS * 4) {
      // ---- producer: walks its ring's steps as far ahead as there are slots, over the ends of items ----
      if (C::HAND_OVER) registers_give<C::KEPT>();
      const int ring = warp - RINGS * 4;
      if (ring >= RINGS) return;
      const uint32_t slots = base + ring * ring_bytes, bars = slots + C::STAGES * C::SLOT + C::BARS;
      Copier<C> copier{p, ring, 0, 0, evict_first()};
      int slot = 0, parity = 1, early = p.stages;
      bool waited = false;
      auto wait = [&]() {
        if (!waited) grid_wait(), waited = true;
      };
#pragma unroll 1
      for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const Work w = work_at<C>(p, i, ring);
        if (w.span.fresh) wait();
        copier.begin(w);
#pragma unroll 1
        for (int n = 0; n < w.pages + w.recents; n++) {
          if (n == w.pages) wait();
#pragma unroll 1
          for (int value = 0; value < 2; value++) {
            if (early-- == 0) wait();
            mbar_wait(bars + (C::STAGES + slot) * 8, parity);
            copier.copy(w, n, value, slots + slot * C::SLOT, bars + slot * 8);
            if (++slot == C::STAGES) slot = 0, parity ^= 1;
          }
        }
      }
      // From here on to the first product behind `merge` memory has little to do.
      constexpr int PIECE = 16384;
      if (lane == 0)
#pragma unroll 1
        for (int at = (blockIdx.x * RINGS + ring) * PIECE; at < p.behind_bytes; at += gridDim.x * RINGS * PIECE) bulk_prefetch(p.behind + at, min(PIECE, p.behind_bytes - at));
      return;
    }
    if (C::HAND_OVER) registers_take<C::TAKEN>();
  }
#endif

  const int g = lane >> 2, c = lane & 3, ring = RINGS == 1 ? 0 : warp >> 2, w4 = RINGS == 1 ? warp : warp & 3;
  const uint32_t slots = base + ring * ring_bytes, rest = slots + stages * C::SLOT, bars = rest + C::BARS;
  const float v_centre = TWO ? 7.5f : -p.centre;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const Cores q_cores(C::WGMMA ? __shfl_sync(~0u, rest, 0) : 0, NT * 128, 128), p_cores(C::WGMMA ? __shfl_sync(~0u, rest + C::P, 0) : 0, NT * 128, 128);
#endif
  auto ring_sync = [&]() { asm volatile("bar.sync %0,128;" ::"r"(ring + 1) : "memory"); };
  auto ring_any = [&](bool v) {
    uint32_t r;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p,%1,0;\nbar.red.or.pred q,%2,128,p;\nselp.u32 %0,1,0,q;\n}" : "=r"(r) : "r"((uint32_t)v), "r"(ring + 1) : "memory");
    return r != 0;
  };
  auto block_sync = [&]() { asm volatile("bar.sync %0,%1;" ::"n"(RINGS + 1), "n"(C::CONSUMERS) : "memory"); };
  auto row_of = [&](int t, int e) { return E == 1 ? c : t * 8 + 2 * c + e; };        // what a lane's columns of tile t are
  auto tile_of = [](int i) { return i / E < NT ? i / E : 0; };                       // of a lane's i-th row
  Magic magic = TWO ? Magic{in_register(0x64006400), in_register(0x64646464)} : Magic{0, 0};
  if (C::WGMMA) {
    // Through shared memory: knowing the constant the compiler would make it an immediate, and copy the permutation from a uniform register every time.
    const uint32_t at = rest + C::RED + w4 * 128;
    sts32(at + lane * 4, magic.bytes);
    __syncwarp();
    magic.bytes = lds32(at + (lane ^ 1) * 4);
  }
  constexpr int NV = NT >= 3 ? 8 : NT * E;                   // values per lane of a column pair, padded
  auto scatter = [&](int area, float v) {                    // [row][warp of the ring]
    const int i = g / (8 / NV);
    if (i < NT * E && g % (8 / NV) == 0) sts32(rest + area + row_of(i / E, i % E) * 16 + w4 * 4, __float_as_uint(v));
  };
  int slot = 0, parity = 0;
  auto ready = [&](int at, int phase) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (ENGINE) mbar_wait(bars + at * 8, phase);
#endif
  };
  auto leave = [&](uint32_t loaded) {                        // bits of everything that this warp loaded from the slot
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (ENGINE) {
      if (C::FENCED) fence_async();
      slot_left(bars + (C::STAGES + slot) * 8, C::FENCED ? 0 : loaded);
    }
#endif
    if (++slot == stages) slot = 0, parity ^= 1;
  };
  const int next_slots = stages - 1;                         // without the engine stages is 2 or 4, and every item begins at slot 0
  bool waited = false;

#pragma unroll 1
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Work w = work_at<C>(p, index, ring);
    const int position = w.span.position, group = p.group, steps = w.pages + w.recents;
    Copier<C> copier{p, ring, 0, 0, evict_first()};
    auto load = [&](int n, int value) {
      if (!ENGINE && n < steps) copier.copy(w, n, value, slots + ((2 * n + value) & next_slots) * C::SLOT, 0);
    };
    // The first keys are on their way before the kernel ahead has ended. Here every list is waited for: asking whether it is fresh would cost registers
    // that heads of 256 channels have not.
    const bool early = !ENGINE && stages == 4 && w.span.listed < 0 && w.pages > 1;
    if (!ENGINE) {
      slot = 0;
      if (w.span.listed >= 0 && !waited) grid_wait(), waited = true;
      copier.begin(w);
      if (early) load(0, 0), copy_commit(), load(0, 1), load(1, 0), copy_commit();
    }
    if (!waited) grid_wait(), waited = true;
    // ---- q as B fragments [kp][t][lane], two k tiles per uint4; where the pages of each row end ----
    for (int i = threadIdx.x; i < KP * NT * 32; i += C::CONSUMERS) {
      const int column = (i & 31) / 4, local = i / 32 % NT * 8 + column / (3 - E), r = w.part.row + local, kp = i / (32 * NT), first = kp * 32 + (i & 3) * 2;
      uint32_t x[4] = {0, 0, 0, 0};
      if (local < w.part.rows && column % (3 - E) == 0) {
        const __half* q = p.q + ((size_t)(w.span.row + r / group) * p.kv_heads * group + w.head * group + r % group) * D + first;
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = *reinterpret_cast<const uint32_t*>(q + j * 8);
      }
      sts128(tail + i * 16, make_uint4(x[0], x[1], x[2], x[3]));
    }
    if (threadIdx.x < ROWS) {
      const int own = position + min(w.span.queries - 1, (w.part.row + (int)threadIdx.x) / group);
      sts32(tail + C::LIMITS + threadIdx.x * 8, min(quantised(own), w.span.cap)), sts32(tail + C::LIMITS + threadIdx.x * 8 + 4, own);
    }
    // Tokens of pages that every row sees. A list was made for its row or an earlier one: what is on it is seen.
    const int seen = w.span.listed >= 0 ? 0x7fffffff : min(quantised(position + w.part.row / group), w.span.cap);
    block_sync();

    float O[NT][TILES_W][4], M[NT][2], l[NT][2], z[NT][2];
#pragma unroll
    for (int t = 0; t < NT; t++) {
#pragma unroll
      for (int j = 0; j < TILES_W; j++) O[t][j][0] = O[t][j][1] = O[t][j][2] = O[t][j][3] = 0;
      M[t][0] = M[t][1] = NOTHING, l[t][0] = l[t][1] = z[t][0] = z[t][1] = 0;
    }

    // q * s as B fragments and the start of the scores, q . z (Both: less 1032 sum(q * s)), by parts of 32 channels: ((0 + 4 + ..) + (1 + 5 + ..)) + (..)
    auto prepare = [&](uint32_t k) {
      if constexpr (!FULL_VIEW) {
        const uint32_t less1032[4] = {0xe408e408, 0xe408e408, 0xe408e408, 0xe408e408};
        uint4 s, zz;
        auto params = [&](int kp) {
          s = lds128(k + (kp * 4 + c) * 32), zz = lds128(k + (kp * 4 + c) * 32 + 16);
          if (!TWO) {
            const uint32_t shift = pack_half2(-p.centre, -p.centre);
            zz = make_uint4(hfma2(s.x, shift, zz.x), hfma2(s.y, shift, zz.y), hfma2(s.z, shift, zz.z), hfma2(s.w, shift, zz.w));
          }
        };
        auto part = [&](int kp, int t, float (&sum)[2]) {
          // Rows g of this operand hold one half of the channels, rows g + 8 the other, and each product below uses one half of its rows. Which half is what
          // costs moves of registers: of zz where it comes from memory, of x where it was computed.
          const uint32_t za[4] = {zz.x, TWO ? zz.y : zz.z, TWO ? zz.z : zz.y, zz.w};
          const uint4 x = lds128(tail + ((kp * NT + t) * 32 + lane) * 16);
          const uint4 y = make_uint4(hmul2(x.x, s.x), hmul2(x.y, s.y), hmul2(x.z, s.z), hmul2(x.w, s.w));
          if (C::WGMMA) {                                    // cores [channel / 8][row tile], K-major
            const uint32_t words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int j = 0; j < 4; j++) sts32(rest + ((kp * 4 + j) * NT + t) * 128 + lane * 4, words[j]);
          } else {
            sts128(rest + ((kp * NT + t) * 32 + lane) * 16, y);
          }
          float cz[4] = {0, 0, 0, 0}, cy[4] = {0, 0, 0, 0}, co[4] = {0, 0, 0, 0};
          mma_f16(cz, za, x.x, TWO ? x.z : x.y), mma_f16(cy, za, TWO ? x.y : x.z, x.w);
          if (TWO) mma_f16(co, less1032, y.x, y.y), mma_f16(co, less1032, y.z, y.w);
#pragma unroll
          for (int e = 0; e < E; e++) sum[e] = __fadd_rn(sum[e], __fmaf_rn(__fadd_rn(cz[e], cy[2 + e]), 1.f / SCORE_SCALE, co[e]));
        };
        if constexpr (C::BY_ROWS) {
          if (w4 >= NT) return;
          float sum[4][2];
#pragma unroll
          for (int i = 0; i < 4; i++) sum[i][0] = sum[i][1] = 0;
#pragma unroll
          for (int kp = 0; kp < KP; kp++) params(kp), part(kp, w4, sum[kp & 3]);
          if (g == 0)
#pragma unroll
            for (int e = 0; e < E; e++)
              sts32(rest + C::C0 + row_of(w4, e) * 4, __float_as_uint(__fadd_rn(__fadd_rn(sum[0][e], sum[1][e]), __fadd_rn(sum[2][e], sum[3][e]))));
        } else {
          float sum[NT][2];
#pragma unroll
          for (int t = 0; t < NT; t++) sum[t][0] = sum[t][1] = 0;
#pragma unroll
          for (int kp = w4; kp < KP; kp += 4) {
            params(kp);
#pragma unroll
            for (int t = 0; t < NT; t++) part(kp, t, sum[t]);
          }
          if (g == 0)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
              for (int e = 0; e < E; e++) sts32(rest + C::C0 + row_of(t, e) * 16 + w4 * 4, __float_as_uint(sum[t][e]));
        }
      }
    };

    // Step n of the ring; `token`: its first token.
    auto run = [&](auto flag, int n, int token) {
      constexpr bool PLAIN = decltype(flag)::value;
      constexpr int TILES = PLAIN ? 1 : 2;                   // token tiles of a warp
      constexpr float SCALE = PLAIN ? 1.f : SCORE_SCALE;
      const bool owner = !PLAIN || w4 < C::STEP / 16;        // this warp has tokens
      const bool recent = n >= w.pages;
      ready(slot, parity);
      const uint32_t k = slots + slot * C::SLOT;
      float S[TILES][NT][4];
      uint32_t loaded = 0;
      // ---- scores ----
      if constexpr (!PLAIN) {
        float start[NT][2];
#pragma unroll
        for (int t = 0; t < NT; t++) {
          const uint2 whole = C::BY_ROWS ? lds64(rest + C::C0 + (t * 8 + 2 * c) * 4) : make_uint2(0, 0);
#pragma unroll
          for (int e = 0; e < E; e++) {
            start[t][e] = C::BY_ROWS ? __uint_as_float(e ? whole.y : whole.x) : sum4(lds128(rest + C::C0 + row_of(t, e) * 16));
#pragma unroll
            for (int i = 0; i < TILES; i++) S[i][t][e] = start[t][e], S[i][t][e + 2] = TWO ? start[t][e] : 0.f;
          }
        }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if constexpr (C::WGMMA) {
          uint32_t a[2][TILES][4];                           // of a step of 16 channels; two steps are under way
          wgmma_fence();
#pragma unroll
          for (int h = 0; h < D / 64; h++) {
            uint4 up[TILES], low[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
              const uint32_t at = k + k_word(w4 * 2 + i, h * 4, lane, D) * 4;
              up[i] = lds128(at + C::K_PARAMS), low[i] = lds128(at + C::LOWER);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
              if (h * 4 + j >= 2) wgmma_wait<1>();
#pragma unroll
              for (int i = 0; i < TILES; i++) {
                const uint32_t u[4] = {up[i].x, up[i].y, up[i].z, up[i].w}, l[4] = {low[i].x, low[i].y, low[i].z, low[i].w};
                unpack<true>(magic, u[j], l[j], a[j & 1][i]);
              }
              wgmma_fence();
#pragma unroll
              for (int i = 0; i < TILES; i++)
                wgmma_columns<NT, 0>([&](int t, int e) -> float& { return S[i][t][e]; }, a[j & 1][i], q_cores + (h * 4 + j) * NT * 256);
              wgmma_commit();
            }
          }
          leave(0);
          wgmma_wait<0>();
        } else
#endif
#pragma unroll
        for (int h = 0; h < D / 64; h++) {
          uint4 up[TILES], low[TILES];
#pragma unroll
          for (int i = 0; i < TILES; i++) {
            const uint32_t at = k + k_word(w4 * 2 + i, h * 4, lane, D) * 4;
            up[i] = lds128(at + C::K_PARAMS), low[i] = make_uint4(0, 0, 0, 0);
            if (TWO) low[i] = lds128(at + C::LOWER);
            loaded |= up[i].x | low[i].x;
          }
#pragma unroll
          for (int kp = 0; kp < 2; kp++) {
            uint4 b[NT];
#pragma unroll
            for (int t = 0; t < NT; t++) b[t] = lds128(rest + (((h * 2 + kp) * NT + t) * 32 + lane) * 16);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
              uint32_t a[4];
              unpack<TWO>(magic, kp ? up[i].z : up[i].x, kp ? low[i].z : low[i].x, a);
#pragma unroll
              for (int t = 0; t < NT; t++) mma_f16(S[i][t], a, b[t].x, b[t].y);
              unpack<TWO>(magic, kp ? up[i].w : up[i].y, kp ? low[i].w : low[i].y, a);
#pragma unroll
              for (int t = 0; t < NT; t++) mma_f16(S[i][t], a, b[t].z, b[t].w);
            }
          }
        }
        if (!TWO)
#pragma unroll
          for (int t = 0; t < NT; t++)
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
              for (int e = 0; e < E; e++) S[i][t][e] = __fadd_rn(S[i][t][e], -S[i][t][e + 2]), S[i][t][e + 2] = __fmaf_rn(S[i][t][e + 2], 0.0625f, start[t][e]);
        if (token + PAGE > seen)                             // a page that only some rows see
#pragma unroll
          for (int t = 0; t < NT; t++)
#pragma unroll
            for (int e = 0; e < E; e++)
              if (token + PAGE > (int)lds32(tail + C::LIMITS + row_of(t, e) * 8))
#pragma unroll
                for (int i = 0; i < TILES; i++) S[i][t][e] = S[i][t][e + 2] = MASKED;
      } else {
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int e = 0; e < 4; e++) S[0][t][e] = owner ? 0.f : MASKED;
        if (owner) {
          const int row = w4 * 16 + (lane & 15);
#pragma unroll
          for (int kp = 0; kp < KP; kp++) {
            uint32_t a0[4], a1[4];
            ldmatrix4(a0, k + (row * (D / 8) + ((kp * 4 + (lane >> 4)) ^ (row & 7))) * 16);
            ldmatrix4(a1, k + (row * (D / 8) + ((kp * 4 + 2 + (lane >> 4)) ^ (row & 7))) * 16);
            loaded |= a0[0] | a1[0];
#pragma unroll
            for (int t = 0; t < NT; t++) {
              const uint4 x = lds128(tail + ((kp * NT + t) * 32 + lane) * 16);
              mma_f16(S[0][t], a0, x.x, x.y), mma_f16(S[0][t], a1, x.z, x.w);
            }
          }
          const int a = token + w4 * 16 + g;
          if (recent || token + C::STEP > seen)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
              for (int e = 0; e < E; e++) {
                const uint2 limit = lds64(tail + C::LIMITS + row_of(t, e) * 8);
                // pages serve [0, limit.x), the ring [limit.x, limit.y]
                const int from = recent ? (int)limit.x : 0, to = recent ? (int)limit.y : (int)limit.x - 1;
                if (a < from || a > to) S[0][t][e] = MASKED;
                if (a + 8 < from || a + 8 > to) S[0][t][e + 2] = MASKED;
              }
        }
      }
      if (PLAIN || !C::WGMMA) leave(loaded);
      // ---- does a score exceed its row's reference by more than REACH? then that row's reference becomes the step's maximum ----
      auto top = [&](int t, int e) {
        const float y = fmaxf(S[0][t][e], S[0][t][e + 2]);
        return TILES == 2 ? fmaxf(y, fmaxf(S[TILES - 1][t][e], S[TILES - 1][t][e + 2])) : y;
      };
      float over = MASKED;
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < E; e++) over = fmaxf(over, __fmaf_rn(top(t, e), SCALE, -M[t][e]));
      if (!ENGINE) copy_wait<0>();                           // values of this step and keys of the next
      const bool moved = ring_any(over > REACH);             // every warp has left this step's keys, the last step's values, P and q * s
      if (!ENGINE && stages == 4) load(n + 1, 1), load(n + 2, 0), copy_commit();
      if (moved) {
        float x[NV];
#pragma unroll
        for (int i = 0; i < NV; i++) x[i] = i < NT * E ? top(tile_of(i), i % E) : MASKED;
        scatter(C::RED, reduce_scatter(x, [](float a, float b) { return fmaxf(a, b); }));
        ring_sync();
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int e = 0; e < E; e++) {
            const float y = max4(lds128(rest + C::RED + row_of(t, e) * 16));
            const float now = __fmaf_rn(y, SCALE, -M[t][e]) > REACH ? __fmul_rn(y, SCALE) : M[t][e], a = exp2_fast(__fadd_rn(M[t][e], -now));
            M[t][e] = now, l[t][e] = __fmul_rn(l[t][e], a), z[t][e] = __fmul_rn(z[t][e], a);
#pragma unroll
            for (int j = 0; j < TILES_W; j++) O[t][j][e] = __fmul_rn(O[t][j][e], a), O[t][j][e + 2] = __fmul_rn(O[t][j][e + 2], a);
          }
      }
      // ---- probabilities times value scale, [token][row] in shared memory; sums stay with the token's warp ----
      ready(slot, parity);
      const uint32_t v = slots + slot * C::SLOT;
      const int after = slot + 1 == stages ? 0 : slot + 1;
      const bool more = !PLAIN && (ENGINE || stages == 4) && n + 1 < w.pages;
      if (more) ready(after, parity ^ (after == 0));
      if (owner)
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          const int tile = PLAIN ? w4 : w4 * 2 + i;
          float2 vs = make_float2(O_SCALE, O_SCALE), vz = make_float2(0.f, 0.f);
          if (!PLAIN) {
            const uint2 sz = lds64(v + (tile * 8 + g) * 8);
            const float2 f0 = unpack_half2(sz.x), f1 = unpack_half2(sz.y);
            vs = make_float2(f0.x * V_SCALE, f1.x * V_SCALE), vz = make_float2(__fmaf_rn(f0.x, v_centre, f0.y), __fmaf_rn(f1.x, v_centre, f1.y));
          }
          constexpr bool CORES = !PLAIN && C::WGMMA;         // [token / 8][row tile], N-major
          const uint32_t at = rest + C::P + (CORES ? tile * NT * 256 + lane * 4 : (tile * 16 + g) * C::PITCH + c * 4);
          constexpr int BELOW = CORES ? NT * 128 : 8 * C::PITCH, BESIDE = CORES ? 128 : 16;
#pragma unroll
          for (int t = 0; t < NT; t++) {
            float a[2] = {0, 0}, b[2] = {0, 0};              // tokens g and g + 8
#pragma unroll
            for (int e = 0; e < E; e++) {
              const float x = exp2_fast(__fmaf_rn(S[i][t][e], SCALE, -M[t][e])), y = exp2_fast(__fmaf_rn(S[i][t][e + 2], SCALE, -M[t][e]));
              l[t][e] = __fadd_rn(l[t][e], __fadd_rn(x, y));
              if (!PLAIN) z[t][e] = __fmaf_rn(x, vz.x, __fmaf_rn(y, vz.y, z[t][e]));
              a[e] = __fmul_rn(x, vs.x), b[e] = __fmul_rn(y, vs.y);
            }
            sts32(at + t * BESIDE, pack_half2(a[0], a[1])), sts32(at + BELOW + t * BESIDE, pack_half2(b[0], b[1]));
          }
        }
      if (more) prepare(slots + after * C::SLOT);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if (C::WGMMA) fence_async();
#endif
      ring_sync();
      // ---- outputs of this warp's channels over all tokens ----
      loaded = 0;
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
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if constexpr (!PLAIN && C::WGMMA) {
        uint32_t a[2][2][4];                                 // of 16 tokens and two tiles of channels; two of these are under way
        constexpr int PAIRS = (TILES_W + 1) / 2, ACROSS = TILES_W == 1 ? 1 : 2;
        wgmma_fence();
#pragma unroll
        for (int tp = 0; tp < 4; tp++)
#pragma unroll
          for (int cp = 0; cp < PAIRS; cp++) {
            const int pair = TILES_W == 1 ? w4 / 2 : w4 * (TILES_W / 2) + cp;        // two channel tiles share a uint4; at D = 64 two warps share it
            const uint32_t at = v + v_word(tp * 2, pair * 2, lane, D) * 4;
            const uint4 up = lds128(at + C::V_PARAMS), low = lds128(at + C::LOWER);
            if (tp == 3 && cp == PAIRS - 1) leave(0);
#pragma unroll
            for (int h = 0; h < 2; h++) {
              if ((tp * PAIRS + cp) * 2 + h >= 2) wgmma_wait<1>();
#pragma unroll
              for (int j = 0; j < ACROSS; j++) {
                const bool odd = TILES_W == 1 ? w4 & 1 : j;
                unpack<true>(magic, h ? (odd ? up.w : up.z) : (odd ? up.y : up.x), h ? (odd ? low.w : low.z) : (odd ? low.y : low.x), a[h][j]);
#pragma unroll
                for (int i = 0; i < 4; i++) a[h][j][i] = hsub2(a[h][j][i], 0x64806480);  // 1152
              }
              wgmma_fence();
#pragma unroll
              for (int j = 0; j < ACROSS; j++)
                wgmma_columns<NT, 1>([&](int t, int e) -> float& { return O[t][TILES_W == 1 ? 0 : cp * 2 + j][e]; }, a[h][j], p_cores + (tp * 2 + h) * NT * 256);
              wgmma_commit();
            }
          }
        wgmma_wait<0>();
      } else
#endif
      if constexpr (!PLAIN) {
        // The tensor core truncates its accumulator: over many pages of codes of one sign that bias would reach 3e-2 of the output of diffuse attention at 256k
        // tokens. Both: codes enter centred (16 U + L - 120) and the centre moves into the zero point, which also leaves a rounded probability to err by a
        // value's distance from the middle instead of by all of it. Upper: a page's sums begin at zero and are added to O rounded; drafts can bear the rest.
        float sum[NT][TILES_W][4];
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int j = 0; j < TILES_W; j++) sum[t][j][0] = sum[t][j][1] = sum[t][j][2] = sum[t][j][3] = 0;
#pragma unroll
        for (int tp = 0; tp < 4; tp++)
#pragma unroll
          for (int cp = 0; cp < (TILES_W + 1) / 2; cp++) {
            const int pair = TILES_W == 1 ? w4 / 2 : w4 * (TILES_W / 2) + cp;        // two channel tiles share a uint4; at D = 64 two warps share it
            const uint32_t at = v + v_word(tp * 2, pair * 2, lane, D) * 4;
            const uint4 up = lds128(at + C::V_PARAMS);
            uint4 low = make_uint4(0, 0, 0, 0);
            if (TWO) low = lds128(at + C::LOWER);
            loaded |= up.x | low.x;
            uint32_t two[4];                                 // P of two token tiles, where one row tile is all
            if (NT == 1) ldmatrix4_trans(two, rest + C::P + (tp * 32 + lane) * C::PITCH);
#pragma unroll
            for (int h = 0; h < 2; h++) {
              uint32_t b[NT][2];
              if (NT == 1) b[0][0] = two[h * 2], b[0][1] = two[h * 2 + 1];
              else load_p(tp * 2 + h, b);
#pragma unroll
              for (int j = 0; j < (TILES_W == 1 ? 1 : 2); j++) {
                const bool odd = TILES_W == 1 ? w4 & 1 : j;
                const int tile = TILES_W == 1 ? 0 : cp * 2 + j;
                uint32_t a[4];
                unpack<TWO>(magic, h ? (odd ? up.w : up.z) : (odd ? up.y : up.x), h ? (odd ? low.w : low.z) : (odd ? low.y : low.x), a);
                if (TWO)
#pragma unroll
                  for (int i = 0; i < 4; i++) a[i] = hsub2(a[i], 0x64806480);        // 1152
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
                O[t][j][e] = __fmaf_rn(__fadd_rn(x, -y), 0x1p24f, O[t][j][e]), O[t][j][e + 2] = __fmaf_rn(y, 0x1p20f, O[t][j][e + 2]);
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
            ldmatrix4_trans(a, v + (row * (D / 8) + (((w4 * TILES_W + j) * 2 + (lane >> 3 & 1)) ^ (row & 7))) * 16);
            loaded |= a[0];
#pragma unroll
            for (int t = 0; t < NT; t++) mma_f16(O[t][j], a, b[t][0], b[t][1]);
          }
        }
      }
      if (PLAIN || !C::WGMMA) leave(loaded);
    };

    if (!ENGINE && stages == 4) {
      if (!early) load(0, 0), copy_commit(), load(0, 1), load(1, 0), copy_commit();
      copy_wait<1>();
      ring_sync();
    }
    if (!FULL_VIEW && w.pages > 0 && (ENGINE || stages == 4)) {
      ready(slot, parity);
      prepare(slots + slot * C::SLOT);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if (C::WGMMA) fence_async();
#endif
      ring_sync();
    }
    // Without the engine and with two slots nothing is under way ahead.
    auto fetch = [&](int n) {
      if (ENGINE || stages == 4) return;
      ring_sync();
      load(n, 0), load(n, 1), copy_commit(), copy_wait<0>();
      ring_sync();
      if (!FULL_VIEW && n < w.pages) {
        prepare(slots);
        ring_sync();
      }
    };
    int n = 0;
#pragma unroll 1
    for (; n < w.pages; n++) {
      fetch(n);
      if constexpr (FULL_VIEW) run(Plain(), n, w.first_page * PAGE + (ring + n * RINGS) * C::STEP);
      else run(Packed(), n, (w.first_page + ring + n * RINGS) * PAGE);
    }
#pragma unroll 1
    for (; n < steps; n++) {
      fetch(n);
      run(Plain(), n, (w.recent + (n - w.pages) * w.span.chunks * RINGS) * C::STEP);
    }
    if (!ENGINE) copy_wait<0>();

    // ---- end of the item: sums over the ring's warps, then over the rings, and out ----
    {
      float x[NV], y[NV];
#pragma unroll
      for (int i = 0; i < NV; i++) x[i] = i < NT * E ? l[tile_of(i)][i % E] : 0.f, y[i] = i < NT * E ? z[tile_of(i)][i % E] : 0.f;
      auto add = [](float a, float b) { return __fadd_rn(a, b); };
      scatter(C::RED, reduce_scatter(x, add)), scatter(C::C0, reduce_scatter(y, add));
    }
    ring_sync();
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int e = 0; e < E; e++) {
        const int r = row_of(t, e);
        l[t][e] = sum4(lds128(rest + C::RED + r * 16)), z[t][e] = sum4(lds128(rest + C::C0 + r * 16));
        if (RINGS > 1 && w4 == 0 && g == 0) {
          const uint32_t at = tail + C::EXTREMES + (ring * ROWS + r) * 8;
          sts32(at, __float_as_uint(M[t][e])), sts32(at + 4, __float_as_uint(l[t][e]));
        }
#pragma unroll
        for (int j = 0; j < TILES_W; j++) O[t][j][e] = __fmaf_rn(O[t][j][e], 1.f / O_SCALE, z[t][e]), O[t][j][e + 2] = __fmaf_rn(O[t][j][e + 2], 1.f / O_SCALE, z[t][e]);
      }
    if constexpr (RINGS > 1) {
      __syncwarp();
      block_sync();
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int e = 0; e < E; e++) {
          const uint32_t at = tail + C::EXTREMES + row_of(t, e) * 8;
          float most = NOTHING, sum = 0;
#pragma unroll
          for (int i = 0; i < RINGS; i++) most = fmaxf(most, __uint_as_float(lds32(at + i * ROWS * 8)));
#pragma unroll
          for (int i = 0; i < RINGS; i++) {
            const uint2 x = lds64(at + i * ROWS * 8);
            sum = __fmaf_rn(exp2_fast(__fadd_rn(__uint_as_float(x.x), -most)), __uint_as_float(x.y), sum);
          }
          const float a = exp2_fast(__fadd_rn(M[t][e], -most));
#pragma unroll
          for (int j = 0; j < TILES_W; j++) O[t][j][e] = __fmul_rn(O[t][j][e], a), O[t][j][e + 2] = __fmul_rn(O[t][j][e + 2], a);
          M[t][e] = most, l[t][e] = sum;
        }
      if (ring)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int j = 0; j < TILES_W; j++)
            sts128(rest + (((t * TILES_W + j) * 4 + w4) * 32 + lane) * 16,
                   make_uint4(__float_as_uint(O[t][j][0]), __float_as_uint(O[t][j][1]), __float_as_uint(O[t][j][2]), __float_as_uint(O[t][j][3])));
      block_sync();
    }
    if (ring == 0) {
      const int total = w.span.queries * group;              // query rows of the span
      const size_t at = (size_t)w.span.partial + ((size_t)w.head * w.span.chunks + w.item) * total + w.part.row;
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < TILES_W; j++) {
#pragma unroll
          for (int i = 1; i < RINGS; i++) {
            const uint4 x = lds128(rest + i * ring_bytes + (((t * TILES_W + j) * 4 + w4) * 32 + lane) * 16);
            O[t][j][0] = __fadd_rn(O[t][j][0], __uint_as_float(x.x)), O[t][j][1] = __fadd_rn(O[t][j][1], __uint_as_float(x.y));
            O[t][j][2] = __fadd_rn(O[t][j][2], __uint_as_float(x.z)), O[t][j][3] = __fadd_rn(O[t][j][3], __uint_as_float(x.w));
          }
#pragma unroll
          for (int e = 0; e < E; e++) {
            const int r = row_of(t, e);
            float* out = p.partial + (at + r) * D + (w4 * TILES_W + j) * 16 + g;
            if (r < w.part.rows) out[0] = O[t][j][e], out[8] = O[t][j][e + 2];
          }
        }
      if (w4 == 0 && g == 0)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int e = 0; e < E; e++) {
            const int r = row_of(t, e);
            if (r < w.part.rows) p.extremes[at + r] = make_float2(M[t][e], l[t][e]);
          }
    }
    block_sync();                                            // the next item overwrites q, limits and what the rings left
  }
}
