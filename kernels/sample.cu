// Choosing tokens and judging drafted ones, on the device: the meaning of every step is quantspec_core::sample and ::verify.
//
// Noise is Philox4x32-10, keyed by seed, counter {position, sequence low, sequence high << 2 | stream, token / 4}; the word is token mod 4.
// The choice of a row is a maximum over (score, lower id first), so the number of blocks that search for it changes nothing. Masses are summed in fixed point,
// so no order of threads changes a cut.
#include "layout.cuh"
#include "numbers.cuh"

enum Accept { GREEDY, REPLAY, REJECTION };
enum Stream { SAMPLE, DRAFT, ACCEPT, CORRECT };

// How a slot chooses: samplers[slot]. 48 bytes, written by the host.
struct Sampler {
  float temperature, top_p, min_p;
  int top_k;  // 0: off
  uint32_t seed[2], sequence[2];
  int accept, unused[3];
};

// What the warpers keep of a row: logit > bar, or logit == bar and id <= bar_id; and exp(z) >= min_p, where z = (logit - most) / temperature.
// `total` is the sum of exp(z) over what is kept.
struct Cut {
  float most, bar;
  int bar_id, unused;
  double total;
};

// The rows of a slot in a verify step.
struct Turn {
  int slot, first_row, gamma, position;  // position: of the first drafted token
};
struct Verdict {
  int accepted, token;
};

constexpr float MASS_UNIT = 1.7592186044416e13f;  // 2^44: 2^20 tokens of mass 1 fit into 64 bits, and rounding costs a vocabulary less than 1e-8
constexpr int CHUNK = 8192;                       // tokens of a block that chooses

DEV float minus_infinity() { return __int_as_float(0xff800000); }

// Order-preserving bits of a float; both zeros are one value, not-a-number is below everything.
DEV uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.f));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEV float unordered(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

DEV float scaled(float logit, float most, float temperature) { return logit == most ? 0.f : __fdiv_rn(__fsub_rn(logit, most), temperature); }

DEV uint4 noise(const Sampler& s, int position, Stream stream, uint32_t block) {
  uint32_t a = position, b = s.sequence[0], c = s.sequence[1] << 2 | stream, d = block, k = s.seed[0], l = s.seed[1];
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint32_t left_high = __umulhi(0xD2511F53u, a), left = 0xD2511F53u * a, right_high = __umulhi(0xCD9E8D57u, c), right = 0xCD9E8D57u * c;
    a = right_high ^ b ^ k, b = right, c = left_high ^ d ^ l, d = left;
    k += 0x9E3779B9u, l += 0xBB67AE85u;
  }
  return make_uint4(a, b, c, d);
}
DEV uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// The middle of one of 2^23 equal cells of (0, 1).
DEV float unit(uint32_t word) { return (float)(2 * (word >> 9) + 1) * (1.f / 16777216.f); }
DEV float gumbel(float u) { return (float)-log(-log((double)u)); }
// The same in single precision, within 1e-4; tells which tokens deserve the other.
DEV float gumbel_estimate(float u) { return -logf(-logf(u)); }
constexpr float ESTIMATE_ERROR = 1e-3f;

DEV bool kept(const Cut& cut, const Sampler& s, float logit, int id, float z) {
  if (!(logit > cut.bar || (logit == cut.bar && id <= cut.bar_id)) || logit == minus_infinity()) return false;
  return s.min_p == 0.f || expf(z) >= s.min_p;
}
// Warped probability of a token.
DEV float probability(const Cut& cut, const Sampler& s, float logit, int id) {
  const float z = scaled(logit, cut.most, s.temperature);
  return kept(cut, s, logit, id, z) ? (float)((double)expf(z) / cut.total) : 0.f;
}

// ---- cuts ----

constexpr int LIST = 8192;            // tokens the search of a cut may hold in shared memory
constexpr float LIST_DEPTH = -10.f;   // z from which on they are listed: below lies under 1e-4 of the mass unless the distribution is nearly flat

DEV uint64_t block_sum64(uint64_t x, uint64_t* scratch) {  // 1024 threads; everyone gets the sum
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

// Tokens to search: the whole row, or those listed.
struct Tokens {
  const float* logits;
  const int* ids;  // null: the place is the id
  int count;
  float most, temperature;
  uint64_t* scratch;
  DEV int id(int i) const { return ids ? ids[i] : i; }
  DEV uint64_t mass(float logit) const { return (uint64_t)(expf(scaled(logit, most, temperature)) * MASS_UNIT); }
  // Sum of 1, or of the mass, over tokens with ordered(logit) >= key.
  DEV uint64_t above(uint64_t key, bool by_mass) const {
    uint64_t sum = 0;
    for (int i = threadIdx.x; i < count; i += 1024) {
      const float x = logits[i];
      if (ordered(x) >= key && x != minus_infinity()) sum += by_mass ? mass(x) : 1;
    }
    return block_sum64(sum, scratch);
  }
  // The greatest key whose tokens and those above it make up `goal`; 0 if all together do not.
  DEV uint32_t reach(uint64_t goal, bool by_mass) const {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; bit--)
      if (above(key | 1u << bit, by_mass) >= goal) key |= 1u << bit;
    return key;
  }
  // The least id that has `n` tokens of this key up to it.
  DEV int nth(uint32_t key, uint64_t n, int vocab) const {
    int low = 0, high = vocab - 1;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      uint64_t sum = 0;
      for (int i = threadIdx.x; i < count; i += 1024) sum += ordered(logits[i]) == key && id(i) <= middle;
      if (block_sum64(sum, scratch) >= n) high = middle;
      else low = middle + 1;
    }
    return low;
  }
};

// sample_cut: the cut of every row whose sampler has a temperature.
//   logits f32 [row][vocab] -> cuts [row]. Grid (rows), block 1024, dynamic shared memory 8 * LIST bytes.
KERNEL __launch_bounds__(1024) sample_cut(const Row* rows, const Sampler* samplers, const float* logits, Cut* cuts, int vocab, uint32_t* flag) {
  extern __shared__ __align__(16) float list_logits[];
  int* list_ids = (int*)(list_logits + LIST);
  __shared__ uint64_t scratch[32];
  __shared__ uint32_t top, listed;
  grid_trigger();
  grid_wait();
  const Sampler s = samplers[rows[blockIdx.x].slot];
  if (s.temperature == 0.f) return;
  const float* row = logits + (size_t)blockIdx.x * vocab;
  if (threadIdx.x == 0) top = listed = 0;
  __syncthreads();
  uint32_t best = 0;
  bool bad = false;
  for (int i = threadIdx.x; i < vocab; i += 1024) {
    const float x = row[i];
    bad |= !(x < __int_as_float(0x7f800000));  // NaN or +infinity
    best = max(best, ordered(x));
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) best = max(best, __shfl_xor_sync(~0u, best, step));
  if ((threadIdx.x & 31) == 0) atomicMax(&top, best);
  bad = __syncthreads_or(bad);
  const float most = unordered(top);
  if (bad || !is_finite(most)) {
    if (threadIdx.x == 0) {
      atomicOr(flag, FLAG_LOGITS);
      cuts[blockIdx.x] = Cut{0.f, minus_infinity(), 0x7fffffff, 0, 1.0};
    }
    return;
  }
  const Tokens all{row, nullptr, vocab, most, s.temperature, scratch};
  Tokens list = all;
  const bool cut_k = s.top_k > 0 && s.top_k < vocab, cut_p = s.top_p < 1.f;
  if (cut_k || cut_p) {
    for (int i = threadIdx.x; i < vocab; i += 1024) {
      const float x = row[i];
      if (scaled(x, most, s.temperature) >= LIST_DEPTH) {
        const uint32_t at = atomicAdd(&listed, 1);
        if (at < LIST) list_logits[at] = x, list_ids[at] = i;
      }
    }
    __syncthreads();
    list.logits = list_logits, list.ids = list_ids, list.count = listed;
  }
  const bool have_list = (cut_k || cut_p) && listed <= LIST;
  uint32_t bar = 0;
  int bar_id = 0x7fffffff;
  bool inside = false;  // everything kept is in the list
  if (cut_k) {
    inside = have_list && listed >= s.top_k;
    bar = (inside ? list : all).reach(s.top_k, false);
  }
  if (cut_p) {
    const uint64_t total = (inside ? list : all).above(bar, true), goal = max(1ull, (unsigned long long)ceil((double)s.top_p * (double)total));
    if (!inside && have_list) inside = list.above(bar, true) >= goal;
    const Tokens& from = inside ? list : all;
    const uint32_t key = from.reach(goal, true);
    if (key > bar || (key == bar && key)) {
      const uint64_t before = from.above((uint64_t)key + 1, true), each = max(1ull, (unsigned long long)from.mass(unordered(key)));
      const uint64_t need = (goal - before + each - 1) / each, equal = from.above(key, false) - from.above((uint64_t)key + 1, false);
      bar = key;
      if (need < equal) bar_id = from.nth(key, need, vocab);
    }
  }
  Cut cut{most, bar ? unordered(bar) : minus_infinity(), bar_id, 0, 1.0};
  const Tokens& from = inside ? list : all;
  uint64_t sum = 0;
  for (int i = threadIdx.x; i < from.count; i += 1024) {
    const float x = from.logits[i];
    if (kept(cut, s, x, from.id(i), scaled(x, most, s.temperature))) sum += from.mass(x);
  }
  sum = block_sum64(sum, scratch);
  if (threadIdx.x == 0) {
    cut.total = (double)sum / (double)MASS_UNIT;
    cuts[blockIdx.x] = cut;
  }
}

// ---- choice ----

// A candidate, comparable as one number: the greater score, the lower id among equals.
DEV uint64_t candidate(float score, int id) { return (uint64_t)ordered(score) << 32 | (uint32_t)~id; }

enum Purpose { PROPOSE, JUDGE, FIRST };

// sample_choose: the token after each row.
//   logits f32 [row][vocab]; cuts [row], read where the sampler has a temperature; choices int32 [row].
//   purpose PROPOSE: draft rows; the token also goes to windows[slot * window_pitch + offset + 1], and rejection keeps logits and cut in
//     q_logits f32 [slot][q_pitch][vocab] and q_cuts [slot][q_pitch] at the row's offset. JUDGE: rows of rejection are left to `judge`. FIRST: every row.
//   best uint64 [row] and arrived uint32 [row] are zero before and after. Grid (ceil(vocab / CHUNK), rows), block 256.
KERNEL __launch_bounds__(256) sample_choose(const Row* rows, const Sampler* samplers, const float* logits, const Cut* cuts, int vocab, int purpose, int* choices,
                                            int* windows, int window_pitch, float* q_logits, Cut* q_cuts, int q_pitch, uint64_t* best, uint32_t* arrived,
                                            uint32_t* flag) {
  __shared__ uint64_t found[8];
  grid_trigger();
  grid_wait();
  const int row = blockIdx.y, first = blockIdx.x * CHUNK, last = min(vocab, first + CHUNK);
  const Row r = rows[row];
  const Sampler s = samplers[r.slot];
  if (purpose == JUDGE && s.accept == REJECTION) return;
  const bool greedy = s.temperature == 0.f, keep = purpose == PROPOSE && s.accept == REJECTION;
  const Stream stream = keep ? DRAFT : SAMPLE;
  Cut cut{};
  if (!greedy) cut = cuts[row];
  const float* from = logits + (size_t)row * vocab;
  float* to = q_logits + ((size_t)r.slot * q_pitch + r.offset) * vocab;
  uint64_t top = 0;
  float score = minus_infinity();
  bool bad = false;
  for (int id0 = first + threadIdx.x * 4; id0 < last; id0 += 1024) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = id0 + i < last ? from[id0 + i] : minus_infinity();
    uint4 words;
    if (!greedy) words = noise(s, r.position + 1, stream, id0 / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int id = id0 + i;
      if (id >= last) break;
      bad |= !(x[i] < __int_as_float(0x7f800000));
      if (keep) to[id] = x[i];
      if (greedy) {
        top = max(top, candidate(x[i], id));
      } else {
        const float z = scaled(x[i], cut.most, s.temperature);
        if (!kept(cut, s, x[i], id, z)) continue;
        const float u = unit(word_of(words, i));
        if (z + gumbel_estimate(u) + ESTIMATE_ERROR < score) continue;
        const float exact = __fadd_rn(z, gumbel(u));
        score = fmaxf(score, exact), top = max(top, candidate(exact, id));
      }
    }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) top = max(top, (uint64_t)__shfl_xor_sync(~0u, top, step));
  if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = top;
  bad = __syncthreads_or(bad);
  if (threadIdx.x) return;
#pragma unroll
  for (int i = 1; i < 8; i++) top = max(top, found[i]);
  atomicMax((unsigned long long*)best + row, (unsigned long long)top);
  if (bad) atomicOr(flag, FLAG_LOGITS);
  if (keep && blockIdx.x == 0) q_cuts[r.slot * q_pitch + r.offset] = cut;
  __threadfence();
  if (atomicAdd(arrived + row, 1) + 1 != gridDim.x) return;
  __threadfence();
  top = atomicExch((unsigned long long*)best + row, 0ull);  // the last block: the others' maxima are in
  arrived[row] = 0;
  int token = (int)~(uint32_t)top;
  if (top == 0 || unordered((uint32_t)(top >> 32)) == minus_infinity()) token = 0, atomicOr(flag, FLAG_LOGITS);
  choices[row] = token;
  if (purpose == PROPOSE) windows[r.slot * window_pitch + r.offset + 1] = token;
}

// ---- judgement ----

// Draws in proportion to weight(id): the largest weight over -ln u wins, the lower id among equals. 1024 threads; -1 where no weight is positive.
template <class Weight>
DEV int draw(const Sampler& s, int position, Stream stream, int vocab, double* scores, int* ids, Weight weight) {
  double best = 0;
  int winner = -1;
  float bar = 0;
  for (int id0 = threadIdx.x * 4; id0 < vocab; id0 += 4096) {
    const uint4 words = noise(s, position, stream, id0 / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (id0 + i >= vocab) break;
      const float w = weight(id0 + i);
      if (!(w > 0.f)) continue;
      const float u = unit(word_of(words, i));
      if (w / -logf(u) * (1 + ESTIMATE_ERROR) < bar) continue;
      const double score = (double)w / -log((double)u);
      if (score > best) best = score, winner = id0 + i, bar = (float)score;
    }
  }
  auto take = [&](double other, int id) {
    if (id >= 0 && (other > best || (other == best && id < winner) || winner < 0)) best = other, winner = id;
  };
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const double other = __shfl_xor_sync(~0u, best, step);
    take(other, __shfl_xor_sync(~0u, winner, step));
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scores[threadIdx.x >> 5] = best, ids[threadIdx.x >> 5] = winner;
  __syncthreads();
  for (int i = 0; i < 32; i++) take(scores[i], ids[i]);
  return winner;
}

// judge: one verdict per turn.
//   choices int32 [row] of sample_choose (greedy and replay); windows int32 [slot][window_pitch]: drafted token i at place i + 1;
//   logits, cuts: the target's, [row]; q_logits, q_cuts: the draft's, [slot][q_pitch]. Grid (turns), block 1024.
KERNEL __launch_bounds__(1024) judge(const Turn* turns, const Sampler* samplers, const int* choices, const int* windows, int window_pitch, const float* logits,
                                     const Cut* cuts, int vocab, const float* q_logits, const Cut* q_cuts, int q_pitch, Verdict* verdicts) {
  __shared__ double scores[32];
  __shared__ int ids[32], accepted;
  grid_trigger();
  grid_wait();
  const Turn turn = turns[blockIdx.x];
  const Sampler s = samplers[turn.slot];
  const int* drafted = windows + turn.slot * window_pitch + 1;
  if (s.accept != REJECTION) {
    if (threadIdx.x) return;
    int n = 0;
    while (n < turn.gamma && drafted[n] == choices[turn.first_row + n]) n++;
    verdicts[blockIdx.x] = Verdict{n, choices[turn.first_row + n]};
    return;
  }
  auto p = [&](int i, int id) { return probability(cuts[turn.first_row + i], s, logits[(size_t)(turn.first_row + i) * vocab + id], id); };
  auto q = [&](int i, int id) { return probability(q_cuts[turn.slot * q_pitch + i], s, q_logits[((size_t)turn.slot * q_pitch + i) * vocab + id], id); };
  if (threadIdx.x < 32) {
    bool refused = false;
    const int i = threadIdx.x;
    if (i < turn.gamma) refused = !(__fmul_rn(unit(noise(s, turn.position + i, ACCEPT, 0).x), q(i, drafted[i])) < p(i, drafted[i]));
    const uint32_t refusals = __ballot_sync(~0u, refused);
    if (i == 0) accepted = refusals ? __ffs(refusals) - 1 : turn.gamma;
  }
  __syncthreads();
  const int n = accepted, position = turn.position + n;
  int token = -1;
  if (n < turn.gamma) {
    token = draw(s, position, CORRECT, vocab, scores, ids, [&](int id) { return __fsub_rn(p(n, id), q(n, id)); });
    // Rounding left nothing of p - q: they are equal.
    if (token < 0) token = draw(s, position, CORRECT, vocab, scores, ids, [&](int id) { return p(n, id); });
  } else {
    token = draw(s, position, SAMPLE, vocab, scores, ids, [&](int id) { return p(n, id); });
  }
  if (threadIdx.x == 0) verdicts[blockIdx.x] = Verdict{n, max(token, 0)};
}
