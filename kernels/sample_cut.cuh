// Cuts of rows: which tokens the warpers keep. Included by sample.cu.
//
// One block finds a row's cut: the maximum; a histogram of z in bins of 1/64 nat with counts and masses; the bin at the
// limit; and the position in that bin, by comparing its few tokens. Only if one bin has more than LIST tokens,
// bisection over the whole row finds the limit.
#pragma once

constexpr int BINS = 2048, LIST = 1024;
constexpr float BINS_PER_NAT = 64;
// Units of mass 1, relative to the top of its bin, of a listed token.
DEV float list_unit() { return 0x1p26f; }

// Sum over 1,024 threads; each gets it. `scratch`: 32 words of shared memory.
DEV uint64_t block_sum64(uint64_t x, uint64_t* scratch) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  x = scratch[threadIdx.x & 31];
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// f(id, logit) for every token, several loads in flight.
template <class F>
DEV void each_token(const float* row, int vocab, F f) {
  constexpr int IN_FLIGHT = 16;
  int id = threadIdx.x;
  for (; id + (IN_FLIGHT - 1) * CUT_THREADS < vocab; id += IN_FLIGHT * CUT_THREADS) {
    float x[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) x[i] = row[id + i * CUT_THREADS];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) f(id + i * CUT_THREADS, x[i]);
  }
  for (; id < vocab; id += CUT_THREADS) f(id, row[id]);
}

// A row's logits, and searches over all of it.
struct Tokens {
  const float* row;
  int vocab;
  float most, temperature, rate;  // rate: one over the temperature, finite
  uint64_t* scratch;              // of `block_sum64`
  DEV float z(float logit) const { return scaled(logit, most, temperature); }
  // z by multiplication instead of division, for its order and magnitude only: the histogram.
  DEV float depth(float logit) const { return __fmul_rn(__fsub_rn(logit, most), rate); }
  DEV uint64_t mass(float logit) const { return (uint64_t)(expf(z(logit)) * MASS_UNIT); }
  template <class F>
  DEV uint64_t sum(F f) const {
    uint64_t total = 0;
    each_token(row, vocab, [&](int id, float x) { total += f(id, x); });
    return block_sum64(total, scratch);
  }
  // Sum of 1, or of the mass, over tokens with ordered(logit) >= key.
  DEV uint64_t above(uint64_t key, bool by_mass) const {
    return sum(
        [&](int, float x) { return ordered(x) >= key && x != minus_infinity() ? (by_mass ? mass(x) : 1ull) : 0ull; });
  }
  // The largest key whose tokens and those above it make up `goal`; 0 if all together do not.
  DEV uint32_t reach(uint64_t goal, bool by_mass) const {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; bit--)
      if (above(key | 1u << bit, by_mass) >= goal) key |= 1u << bit;
    return key;
  }
  // The smallest id up to which `n` tokens have this key.
  DEV int nth(uint32_t key, uint64_t n) const {
    int low = 0, high = vocab - 1;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (sum([&](int id, float x) { return (uint64_t)(ordered(x) == key && id <= middle); }) >= n)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

struct Histogram {
  uint32_t count[BINS];
  union {
    // sums of exp(z - top of the bin) in units that let a vocabulary fit (`fixed_unit`): independent of order
    uint32_t fixed[BINS];
    double mass[BINS];  // sums of exp(z)
  };
  float list[LIST];  // the tokens of the bin at the edge
  int ids[LIST];
  uint32_t masses[LIST];  // their masses, times `list_unit`
  uint32_t listed;        // tokens of that bin, more than LIST if they do not fit
  int edge;               // the bin at the limit
  int cutoff_id;          // of the cut, as cutoff
  float cutoff;
  double before;  // weight of the bins before `edge`

  static DEV int bin(float z) { return min(BINS - 1, (int)(z * -BINS_PER_NAT)); }
  static DEV float inside(float z, int bin) { return expf(z + bin * (1 / BINS_PER_NAT)); }

  // One over the unit: 2^14 for fewer than 2^18 tokens, 2^13 for fewer than 2^19.
  static DEV float fixed_unit(int vocab) { return vocab < 1 << 18 ? 16384.f : 8192.f; }

  // Fills counts if `counts`, and masses if `masses`.
  DEV void fill(const Tokens& t, bool counts, bool masses) {
    const float unit = fixed_unit(t.vocab);
    for (int i = threadIdx.x; i < BINS; i += CUT_THREADS) count[i] = fixed[i] = 0;
    __syncthreads();
    each_token(t.row, t.vocab, [&](int, float x) {
      if (x == minus_infinity()) return;
      const float z = t.depth(x);
      const int b = bin(z);
      if (counts) atomicAdd(&count[b], 1);
      if (masses) atomicAdd(&fixed[b], __float2uint_rn(inside(z, b) * unit));
    });
    __syncthreads();
    double m[BINS / CUT_THREADS];
#pragma unroll
    for (int i = 0; i < BINS / CUT_THREADS; i++) {
      const int b = threadIdx.x + i * CUT_THREADS;
      m[i] = (double)fixed[b] * (1. / unit) * exp(-b / (double)BINS_PER_NAT);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS / CUT_THREADS; i++) mass[threadIdx.x + i * CUT_THREADS] = m[i];
    __syncthreads();
  }

  // Sum of the weights of all bins, in one order; by the first warp.
  template <class Weight>
  DEV double lane_sum(Weight weight) const {
    double own = 0;
    for (int i = 0; i < BINS / 32; i++) own += weight((int)(threadIdx.x * (BINS / 32) + i));
    return own;
  }

  // Sets `edge` to the first bin whose weight, with that of all bins before it, reaches goal(sum of all);
  // `before` to the weight before it.
  template <class Weight, class Goal>
  DEV void find(Weight weight, Goal goal_of) {
    if (threadIdx.x < 32) {
      const double own = lane_sum(weight);
      double total = 0, earlier = 0;  // of all lanes, of those before this one
      for (int i = 0; i < 32; i++) {
        const double lane_weight = __shfl_sync(~0u, own, i);
        if (i == threadIdx.x) earlier = total;
        total += lane_weight;
      }
      const double goal = goal_of(total);
      const uint32_t reached = __ballot_sync(~0u, earlier + own >= goal), present = __ballot_sync(~0u, own > 0);
      // Below the goal by rounding: the last non-empty bin.
      const int lane = reached ? __ffs(reached) - 1 : 31 - __clz(present);
      if (threadIdx.x == lane) {
        int last = -1;
        double sum = earlier, until = earlier;
        for (int i = 0; i < BINS / 32; i++) {
          const int b = lane * (BINS / 32) + i;
          if (weight(b) <= 0) continue;
          last = b;
          until = sum;
          sum += weight(b);
          if (sum >= goal) break;
        }
        edge = last;
        before = until;
      }
      if (threadIdx.x == 0) listed = 0;
    }
    __syncthreads();
  }

  // Lists the tokens of the bin at the limit; false if there are too many.
  DEV bool collect(const Tokens& t) {
    const int wanted = edge;
    each_token(t.row, t.vocab, [&](int id, float x) {
      if (x == minus_infinity() || bin(t.depth(x)) != wanted) return;
      const uint32_t i = atomicAdd(&listed, 1);
      if (i < LIST) {
        list[i] = x;
        ids[i] = id;
        masses[i] = (uint32_t)(inside(t.depth(x), wanted) * list_unit());
      }
    });
    __syncthreads();
    return listed <= LIST;
  }
};

// The cutoff of top-k among the listed tokens of its bin.
DEV float top_k_of_list(Histogram& h, int top_k) {
  const int need = top_k - (int)h.before, n = h.listed;
  const int i = threadIdx.x;
  if (i < n) {
    int greater = 0, equal = 0;
    for (int j = 0; j < n; j++) {
      greater += h.list[j] > h.list[i];
      equal += h.list[j] == h.list[i];
    }
    // All writing threads store the same value.
    if (greater < need && greater + equal >= need) h.cutoff = h.list[i];
  }
  __syncthreads();
  return h.cutoff;
}

// Removes the masses of tokens below the cutoff of top-k, which is in `bin`.
DEV void keep_top_k(Histogram& h, float cutoff, int bin, bool listed, uint64_t* scratch) {
  double left = 0;  // in that bin
  if (listed) {
    uint64_t sum = threadIdx.x < h.listed && h.list[threadIdx.x] >= cutoff ? h.masses[threadIdx.x] : 0;
    sum = block_sum64(sum, scratch);
    left = (double)sum * (1 / (double)list_unit()) * exp(-bin / (double)BINS_PER_NAT);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += CUT_THREADS)
    if (b >= bin) h.mass[b] = b == bin ? left : 0;
  __syncthreads();
}

// Finds the bin of the cutoff of top-p. `before` becomes the mass inside that bin that is to be reached, times
// `list_unit`.
DEV void find_top_p(Histogram& h, const Sampler& s) {
  h.find([&](int b) { return h.mass[b]; }, [&](double all) { return s.top_p * all; });
  if (threadIdx.x < 32) {
    double own = h.lane_sum([&](int b) { return h.mass[b]; }), all = 0;
    for (int i = 0; i < 32; i++) all += __shfl_sync(~0u, own, i);
    if (threadIdx.x == 0)
      h.before = ceil((s.top_p * all - h.before) * list_unit() * exp(h.edge / (double)BINS_PER_NAT));
  }
  __syncthreads();
}

// The cutoff of top-p among the listed tokens that are not below the cutoff so far.
DEV void top_p_of_list(Histogram& h, float& cutoff, int& cutoff_id, uint64_t* scratch) {
  const int i = threadIdx.x, n = h.listed;
  const bool in = i < n && h.list[i] >= cutoff;
  const uint64_t own = in ? h.masses[i] : 0, kept_mass = block_sum64(own, scratch);
  const uint64_t need = min(kept_mass, max(1ull, (unsigned long long)fmax(h.before, 1.0)));
  uint64_t before = 0;
  if (in)
    for (int j = 0; j < n; j++) {
      const float x = h.list[j];
      if (x >= cutoff && (x > h.list[i] || (x == h.list[i] && h.ids[j] < h.ids[i]))) before += h.masses[j];
    }
  __syncthreads();
  if (in && before < need && before + own >= need) {
    h.cutoff = h.list[i];
    h.cutoff_id = h.ids[i];
  }
  __syncthreads();
  cutoff = h.cutoff;
  cutoff_id = h.cutoff_id;
}

// The same by bisection, over the whole row.
DEV void top_p_of_row(const Tokens& t, float top_p, float& cutoff, int& cutoff_id) {
  const uint32_t floor = ordered(cutoff);
  const uint64_t total = t.above(floor, true);
  const uint64_t goal = max(1ull, (unsigned long long)ceil((double)top_p * (double)total));
  const uint32_t key = max(floor, t.reach(goal, true));
  const uint64_t before = t.above((uint64_t)key + 1, true);
  const uint64_t each = max(1ull, (unsigned long long)t.mass(unordered(key)));
  const uint64_t need = goal > before ? (goal - before + each - 1) / each : 1;
  const uint64_t equal = t.above(key, false) - t.above((uint64_t)key + 1, false);
  cutoff = unordered(key);
  if (need < equal) cutoff_id = t.nth(key, need);
}

// sample_cut: the cut of every row whose sampler has a temperature.
//
//     logits  f32 [row][vocab], at most SAMPLE_VOCAB_MAX tokens
//     cuts    [row]; `total` is set for samplers of rejection only
//
// Grid (rows), CUT_THREADS threads, static shared memory.
KERNEL __launch_bounds__(CUT_THREADS)
    sample_cut(const Row* rows, const Sampler* samplers, const float* logits, Cut* cuts, int vocab, uint32_t* flag) {
  __shared__ Histogram h;
  __shared__ uint64_t scratch[32];
  __shared__ uint32_t top;
  grid_trigger();
  grid_wait();
  const Sampler s = samplers[rows[blockIdx.x].slot];
  if (s.temperature == 0.f) return;
  const float* row = logits + (size_t)blockIdx.x * vocab;
  if (threadIdx.x == 0) top = 0;
  __syncthreads();
  uint32_t best = 0;
  bool bad = false;
  each_token(row, vocab, [&](int, float x) {
    bad |= !(x < infinity());  // or NaN
    best = max(best, ordered(x));
  });
#pragma unroll
  for (int step = 16; step; step >>= 1) best = max(best, __shfl_xor_sync(~0u, best, step));
  if ((threadIdx.x & 31) == 0) atomicMax(&top, best);
  bad = __syncthreads_or(bad);
  const float most = unordered(top);
  if (bad || !is_finite(most)) {
    if (threadIdx.x == 0) {
      atomicOr(flag, bad ? FLAG_LOGITS : FLAG_NO_TOKEN);
      cuts[blockIdx.x] = Cut{0.f, minus_infinity(), 0x7fffffff, 0, 1.0};
    }
    return;
  }
  const Tokens t{row, vocab, most, s.temperature, fminf(1 / s.temperature, 1e30f), scratch};
  const bool cut_k = s.top_k > 0 && s.top_k < vocab, cut_p = s.top_p < 1.f;
  float cutoff = minus_infinity();
  int cutoff_id = 0x7fffffff, bin_k = BINS;
  bool listed = false;
  if (cut_k || cut_p) h.fill(t, cut_k, cut_p);
  if (cut_k) {
    h.find([&](int b) { return (double)h.count[b]; }, [&](double) { return (double)s.top_k; });
    bin_k = h.edge;
    listed = h.collect(t);
    if (listed)
      cutoff = top_k_of_list(h, s.top_k);
    else
      cutoff = unordered(t.reach(s.top_k, false));
  }
  if (cut_p) {
    if (cut_k) keep_top_k(h, cutoff, bin_k, listed, scratch);
    if (!cut_k || listed) {
      find_top_p(h, s);
      listed = h.collect(t);
    } else {
      listed = false;
    }
    if (listed)
      top_p_of_list(h, cutoff, cutoff_id, scratch);
    else
      top_p_of_row(t, s.top_p, cutoff, cutoff_id);
  }
  Cut cut{most, cutoff, cutoff_id, 0, 1.0};
  if (s.accept == REJECTION)
    cut.total = (double)t.sum([&](int id, float x) {
      return kept(cut, least_kept(s), x, id, t.z(x)) ? t.mass(x) : 0ull;
    }) / (double)MASS_UNIT;
  if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
}
