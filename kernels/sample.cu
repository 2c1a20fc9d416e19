// Choosing tokens and judging drafted ones on the device, as defined by quantspec_core::sample and ::verify.
//
// Noise is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), keyed by seed, with counter
// {position, sequence low, sequence high << 2 | stream, offset << 24 | token / 4}. A token uses word token mod 4. The
// offset is that of a drafted token in its round, 0 for SAMPLE. The choice of a row is the largest (score, then lower
// id), so the number of blocks that search a row does not matter. Probability masses are summed in fixed point, so cuts
// do not depend on the order of threads.
//
// In this file z is a scaled logit, (logit - largest) / temperature, and b a bin of a histogram of z.
#include "layout.cuh"
#include "numbers.cuh"

enum Accept { GREEDY, REPLAY, REJECTION };
enum Stream { SAMPLE, DRAFT, ACCEPT, CORRECT };

// A slot's sampler: samplers[slot]. 48 bytes, written by the host.
struct Sampler {
  float temperature;  // 0: greedy
  float top_p, min_p;
  int top_k;                      // 0: off
  uint32_t seed[2], sequence[2];  // low and high words
  int accept;                     // Accept
  int unused[3];
};

// The tokens of a row that the warpers keep: logit > cutoff, or logit == cutoff and id <= cutoff_id; and z >= ln min_p.
// `most` is the largest logit, `total` the sum of exp(z) over kept tokens (for rejection; 1 otherwise).
struct Cut {
  float most, cutoff;
  int cutoff_id, unused;
  double total;
};

// The rows of a slot in a verify step. 20 bytes, written by the host.
struct Turn {
  int slot, first_row, gamma;
  int position;  // of the first drafted token
  int one_hot;   // the drafter has no distribution: q is 1 at each drafted token; q_logits and q_cuts are not read
};
// The number of accepted tokens, and the token after them.
struct Verdict {
  int accepted, token;
};
// Sizes for the host, which allocates these and does not read them.
constexpr int CUT_BYTES = 24, RACE_BYTES = 16;
static_assert(sizeof(Cut) == CUT_BYTES);

// Units of mass 1 in 64-bit sums: 2^20 tokens of mass 1 fit, and rounding costs a vocabulary less than 1e-8.
constexpr float MASS_UNIT = 0x1p44f;
constexpr int SAMPLE_TILE = 2048, SAMPLE_THREADS = 256;  // of a block that chooses: tokens, threads
constexpr int CUT_THREADS = 1024;                        // of a block that cuts or judges
constexpr int SAMPLE_VOCAB_MAX = 524287;  // masses of at most 2^13 each fit in the 32 bits of a histogram's bin

// Order-preserving bits of a float; both zeros are equal, NaN is below everything.
DEV uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.f));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
// The float of `ordered`'s bits.
DEV float unordered(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// z of a logit.
DEV float scaled(float logit, float most, float temperature) {
  return logit == most ? 0.f : __fdiv_rn(__fsub_rn(logit, most), temperature);
}

// Random words of tokens 4 quartet .. 4 quartet + 3.
DEV uint4 noise(const Sampler& s, int position, Stream stream, int offset, uint32_t quartet) {
  uint32_t a = position, b = s.sequence[0], c = s.sequence[1] << 2 | stream, d = (uint32_t)offset << 24 | quartet;
  uint32_t key0 = s.seed[0], key1 = s.seed[1];
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint32_t left_high = __umulhi(0xD2511F53u, a);
    const uint32_t left = 0xD2511F53u * a;
    const uint32_t right_high = __umulhi(0xCD9E8D57u, c);
    const uint32_t right = 0xCD9E8D57u * c;
    a = right_high ^ b ^ key0;
    b = right;
    c = left_high ^ d ^ key1;
    d = left;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return make_uint4(a, b, c, d);
}
DEV uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// A uniform number: the middle of one of 2^23 equal cells of (0, 1).
DEV float unit(uint32_t word) { return (float)(2 * (word >> 9) + 1) * (1.f / 16777216.f); }
DEV float gumbel(float u) { return (float)-log(-log((double)u)); }
// The same in single precision, within 1e-4; selects the tokens that need the precise one.
DEV float gumbel_estimate(float u) { return -logf(-logf(u)); }
constexpr float ESTIMATE_ERROR = 1e-3f;

// The least z that min_p keeps.
DEV float least_kept(const Sampler& s) { return s.min_p == 0.f ? minus_infinity() : logf(s.min_p); }
DEV bool kept(const Cut& cut, float least, float logit, int id, float z) {
  return ((logit > cut.cutoff) | ((logit == cut.cutoff) & (id <= cut.cutoff_id))) & (logit != minus_infinity()) &
         (z >= least);
}
// Warped probability of a token.
DEV float probability(const Cut& cut, const Sampler& s, float logit, int id) {
  const float z = scaled(logit, cut.most, s.temperature);
  return kept(cut, least_kept(s), logit, id, z) ? (float)((double)expf(z) / cut.total) : 0.f;
}

#include "sample_cut.cuh"

// ---- choice ----

// A candidate, comparable as one number: the larger score wins, then the lower id.
DEV uint64_t candidate(float score, int id) { return (uint64_t)ordered(score) << 32 | (uint32_t)~id; }

// A runner-up as a number: a losing candidate, by its score; or, below all of those, a token that the warpers do not
// keep, by its score without noise. 0: none.
DEV uint64_t loser(uint64_t candidate) { return candidate ? 1ull << 32 | candidate >> 32 : 0ull; }
// The best candidate so far and the best runner-up.
struct Race {
  uint64_t first, second;
  DEV void enter(uint64_t candidate, uint64_t runner_up) {
    const uint64_t lower = min(first, candidate);
    first = max(first, candidate);
    second = max(second, max(runner_up, loser(lower)));
  }
  // Combines with the lanes whose numbers differ in the bits from `step` down.
  DEV void meet(int step) {
#pragma unroll 1
    for (; step; step >>= 1) {
      const uint64_t other = __shfl_xor_sync(~0u, first, step);
      enter(other, __shfl_xor_sync(~0u, second, step));
    }
  }
};

static_assert(sizeof(Race) == RACE_BYTES);

// Noise of a thread's tokens: random words, and estimates of their contributions to the scores. id_of(i): the i-th
// token.
template <int OWN, class IdOf>
DEV void draw_noise(uint32_t (&words)[OWN][SAMPLE_THREADS], float (&about)[OWN][SAMPLE_THREADS], const Sampler& s,
                    int position, Stream stream, int offset, IdOf id_of) {
  const int own = threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < OWN; i += 4) {
    const uint4 quartet = noise(s, position, stream, offset, id_of(i) / 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      words[i + j][own] = word_of(quartet, j);
      about[i + j][own] = gumbel_estimate(unit(word_of(quartet, j)));
    }
  }
}

// Lower bounds of the largest and the second-largest score of a warp, from those of its lanes.
DEV void two_largest(float& most, float& second) {
#pragma unroll 1
  for (int step = 16; step; step >>= 1) {
    const float other = __shfl_xor_sync(~0u, most, step), other_second = __shfl_xor_sync(~0u, second, step);
    second = fmaxf(fminf(most, other), fmaxf(second, other_second));
    most = fmaxf(most, other);
  }
}

// By one warp of each of a row's blocks: the block that arrives last combines all races (`races`, one per block) to
// that of the row. False in the other blocks. `arrived` is zero before and after.
DEV bool race_of_row(Race& race, Race* races, uint32_t* arrived) {
  const int lane = threadIdx.x & 31;
  uint32_t before = 0;
  if (lane == 0) {
    races[blockIdx.x] = race;
    __threadfence();
    before = atomicAdd(arrived, 1);
    __threadfence();
  }
  if (__shfl_sync(~0u, before, 0) + 1 != gridDim.x) return false;
  __syncwarp();  // a shuffle orders no memory
  race = {0, 0};
#pragma unroll 1
  for (int i = lane; i < gridDim.x; i += 32)
    race.enter(__ldcg((const unsigned long long*)&races[i].first), __ldcg((const unsigned long long*)&races[i].second));
  race.meet(16);
  if (lane == 0) *arrived = 0;
  return true;
}

// sample_choose: the token after each row.
//
//     logits            f32 [row][vocab]
//     cuts              [row], read if the sampler has a temperature
//     drafts            0 for the target's choice; else the row's token is also written to its window
//     choices           int32 [row]
//     windows           int32 [slot][window_pitch]; the token after a row is at offset + 1
//     q_logits, q_cuts  f32 [slot][q_pitch][vocab], [slot][q_pitch]: with `drafts` and rejection, logits and cut are
//                       kept at the row's offset, and drafts have noise of their own
//     races, arrived    scratch [row][blocks of a row]; uint32 [row], zero before and after
//     margin            with `drafts`, row 0's logit margin (core::sample::choose_with_margin)
//
// Grid (ceil(vocab / SAMPLE_TILE), rows), SAMPLE_THREADS threads, static shared memory.
//
// Every draft step waits for this kernel, whose code is in no instruction cache then. So the sampler's settings and
// noise, which do not depend on earlier kernels, are computed into shared memory before the wait (ptxas would move
// register values after it). Double-precision logarithms occur once in the code, for tokens whose estimates allow them
// to be first or second of a warp.
KERNEL __launch_bounds__(SAMPLE_THREADS)
    sample_choose(const Row* rows, const Sampler* samplers, const float* logits, const Cut* cuts, int vocab, int drafts,
                  int* choices, int* windows, int window_pitch, float* q_logits, Cut* q_cuts, int q_pitch, Race* races,
                  uint32_t* arrived, float* margin, uint32_t* flag) {
  constexpr int WARPS = SAMPLE_THREADS / 32;
  constexpr int OWN = SAMPLE_TILE / SAMPLE_THREADS;  // tokens per thread: quartets, 4 SAMPLE_THREADS apart
  __shared__ Race found[WARPS];
  __shared__ uint32_t words[OWN][SAMPLE_THREADS];
  // The noise's approximate contribution; then an upper bound of the score.
  __shared__ float about[OWN][SAMPLE_THREADS];
  __shared__ float scores[OWN][SAMPLE_THREADS];  // logits; then scores without noise
  grid_trigger();
  const int row = blockIdx.y, own = threadIdx.x, lane = own & 31, id0 = blockIdx.x * SAMPLE_TILE + own * 4;
  auto id_of = [&](int i) { return id0 + i / 4 * (4 * SAMPLE_THREADS) + i % 4; };
  const Row r = rows[row];
  const Sampler s = samplers[r.slot];
  const bool greedy = s.temperature == 0.f, keep = drafts && s.accept == REJECTION;
  if (!greedy) draw_noise<OWN>(words, about, s, r.position + 1, keep ? DRAFT : SAMPLE, keep ? r.offset : 0, id_of);
  const float least = least_kept(s);
  grid_wait();
  Cut cut{};
  if (!greedy) cut = cuts[row];
  const float* row_logits = logits + (size_t)row * vocab;
  float* kept_logits = q_logits + ((size_t)r.slot * q_pitch + r.offset) * vocab;
  float x[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) x[i] = id_of(i) < vocab ? row_logits[id_of(i)] : minus_infinity();
#pragma unroll
  for (int i = 0; i < OWN; i++) scores[i][own] = x[i];
  // ---- bounds of the scores ----
  float cutoff = minus_infinity(), most = minus_infinity();  // lower bounds of the two largest scores of the warp
  uint32_t open = 0;                                         // this thread's tokens that may be first or second
  uint32_t out = 0;                                          // the best token that is not kept
  bool bad = false;
#pragma unroll 1
  for (int i = 0; i < OWN && id_of(i) < vocab; i++) {
    const float logit = scores[i][own];
    bad |= !(logit < infinity());  // or NaN
    if (keep) kept_logits[id_of(i)] = logit;
    float score = logit, error = 0;
    bool stays = true;
    if (!greedy) {
      const float z = scaled(logit, cut.most, s.temperature);
      stays = kept(cut, least, logit, id_of(i), z);
      if (!stays) out = max(out, ordered(z));
      // Scores far from zero have rounding errors above the estimate's.
      scores[i][own] = z;
      score = z + about[i][own];
      error = ESTIMATE_ERROR + fabsf(z) * 0x1p-22f;
    }
    about[i][own] = score + error;
    if (stays) {
      open |= 1u << i;
      cutoff = fmaxf(cutoff, fminf(most, score - error));
      most = fmaxf(most, score - error);
    }
  }
  two_largest(most, cutoff);
  // ---- exact scores of the tokens that are left, and the race of the block ----
  Race race = {0, out};
#pragma unroll 1
  for (; open; open &= open - 1) {
    const int i = __ffs(open) - 1;
    if (about[i][own] < cutoff) continue;
    const float z = scores[i][own];
    race.enter(candidate(greedy ? z : __fadd_rn(z, gumbel(unit(words[i][own]))), id_of(i)), 0);
  }
  __syncwarp();
  race.meet(16);
  if (lane == 0) found[threadIdx.x >> 5] = race;
  bad = __syncthreads_or(bad);
  if (threadIdx.x >= 32) return;
  race = found[lane % WARPS];
  race.meet(WARPS / 2);
  if (lane == 0) {
    if (bad) atomicOr(flag, FLAG_LOGITS);
    if (keep && blockIdx.x == 0) q_cuts[r.slot * q_pitch + r.offset] = cut;
  }
  if (gridDim.x > 1 && !race_of_row(race, races + (size_t)row * gridDim.x, arrived + row)) return;
  // ---- the token and its margin ----
  if (lane) return;
  int token = (int)~(uint32_t)race.first;
  const float score = unordered((uint32_t)(race.first >> 32));
  if (race.first == 0 || score == minus_infinity()) {
    token = 0;
    atomicOr(flag, FLAG_NO_TOKEN);
  }
  choices[row] = token;
  if (!drafts) return;
  windows[r.slot * window_pitch + r.offset + 1] = token;
  // If only this token was kept, it is the most likely, and its score without noise is 0. Without any other token the
  // margin is infinite; if no token could be chosen it is 0.
  const float second = race.second ? unordered((uint32_t)race.second) : minus_infinity();
  if (row == 0)
    *margin = !race.first ? 0.f
              : greedy    ? score - second
                          : ((race.second >> 32 ? score : 0.f) - second) * s.temperature;
}

// ---- judgement ----

// Draws in proportion to weight(id): the largest weight over -ln u wins, then the lower id. -1 if no weight is
// positive. By CUT_THREADS threads; scores, ids: shared memory [warp].
template <class Weight>
DEV int draw(const Sampler& s, int position, Stream stream, int offset, int vocab, double* scores, int* ids,
             Weight weight) {
  double best = 0;
  int winner = -1;
  float cutoff = 0;
  for (int id0 = threadIdx.x * 4; id0 < vocab; id0 += 4 * CUT_THREADS) {
    const uint4 words = noise(s, position, stream, offset, id0 / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (id0 + i >= vocab) break;
      const float w = weight(id0 + i);
      if (!(w > 0.f)) continue;
      const float u = unit(word_of(words, i));
      if (w / -logf(u) * (1 + ESTIMATE_ERROR) < cutoff) continue;
      const double score = (double)w / -log((double)u);
      if (score > best) {
        best = score;
        winner = id0 + i;
        cutoff = (float)score;
      }
    }
  }
  auto enter = [&](double other, int id) {
    if (id >= 0 && (other > best || (other == best && id < winner) || winner < 0)) {
      best = other;
      winner = id;
    }
  };
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const double other = __shfl_xor_sync(~0u, best, step);
    enter(other, __shfl_xor_sync(~0u, winner, step));
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    scores[threadIdx.x >> 5] = best;
    ids[threadIdx.x >> 5] = winner;
  }
  __syncthreads();
  for (int i = 0; i < 32; i++) enter(scores[i], ids[i]);
  return winner;
}

// The sum of weight(id) over the vocabulary where it is positive, in an order that depends on `vocab` alone. By
// CUT_THREADS threads; sums: shared memory [warp].
template <class Weight>
DEV double positive_mass(int vocab, double* sums, Weight weight) {
  double own = 0;
  for (int id = threadIdx.x; id < vocab; id += CUT_THREADS) own += fmaxf(weight(id), 0.f);
#pragma unroll
  for (int step = 16; step; step >>= 1) own += __shfl_xor_sync(~0u, own, step);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = own;
  __syncthreads();
  double mass = 0;
  for (int i = 0; i < CUT_THREADS / 32; i++) mass += sums[i];
  return mass;
}

// judge: one verdict per turn. Rejection is block verification, as core::verify defines it: the share of i drafted
// tokens is s_i there.
//
//     choices           int32 [row] of sample_choose
//     windows           int32 [slot][window_pitch]: drafted token i at index i + 1
//     logits, cuts      the target's, [row]
//     q_logits, q_cuts  the draft's, [slot][q_pitch], or null if every turn is one-hot
//
// Grid (turns), CUT_THREADS threads, static shared memory.
KERNEL __launch_bounds__(CUT_THREADS)
    judge(const Turn* turns, const Sampler* samplers, const int* choices, const int* windows, int window_pitch,
          const float* logits, const Cut* cuts, int vocab, const float* q_logits, const Cut* q_cuts, int q_pitch,
          Verdict* verdicts) {
  __shared__ double scores[CUT_THREADS / 32];
  __shared__ int ids[CUT_THREADS / 32];
  __shared__ float shares[32];
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
  auto p = [&](int i, int id) {
    return probability(cuts[turn.first_row + i], s, logits[(size_t)(turn.first_row + i) * vocab + id], id);
  };
  auto q = [&](int i, int id) {
    if (turn.one_hot) return id == drafted[i] ? 1.f : 0.f;
    return probability(q_cuts[turn.slot * q_pitch + i], s, q_logits[((size_t)turn.slot * q_pitch + i) * vocab + id],
                       id);
  };
  if (threadIdx.x < 32) {
    const int i = threadIdx.x;
    const float of_target = i < turn.gamma ? p(i, drafted[i]) : 0.f, of_draft = i < turn.gamma ? q(i, drafted[i]) : 1.f;
    float share = 1.f;
#pragma unroll 1
    for (int n = 0; n <= turn.gamma; n++) {
      if (i == 0) shares[n] = share;
      const float above = __shfl_sync(~0u, of_target, n), below = __shfl_sync(~0u, of_draft, n);
      share = above > 0.f ? fminf(__fdiv_rn(__fmul_rn(share, above), below), 1.f) : 0.f;
    }
  }
  __syncthreads();
  // What is left of p for the token after n accepted ones, where it is positive.
  auto left = [&](int n, int id) { return __fsub_rn(__fmul_rn(shares[n], p(n, id)), q(n, id)); };
  // The longest prefix that passes its test. Every thread of the block takes the same branches.
  int n = turn.gamma;
#pragma unroll 1
  for (; n > 0; n--) {
    const float share = shares[n], u = unit(noise(s, turn.position + n - 1, ACCEPT, n - 1, 0).x);
    if (n == turn.gamma ? u < share : share >= 1.f) break;
    if (n == turn.gamma || share == 0.f) continue;
    const double mass = positive_mass(vocab, scores, [&](int id) { return left(n, id); });
    if (u * (mass + 1 - share) < mass) break;
  }
  int token = choices[turn.first_row + n];  // the bonus is chosen as in plain decoding
  if (n < turn.gamma) {
    token = -1;
    // If rounding leaves no mass of p - q, they are equal, and the second draw is from p.
#pragma unroll 1
    for (int equal = 0; equal < 2 && token < 0; equal++)
      token = draw(s, turn.position + n, CORRECT, n, vocab, scores, ids,
                   [&](int id) { return equal ? p(n, id) : left(n, id); });
  }
  if (threadIdx.x == 0) verdicts[blockIdx.x] = Verdict{n, max(token, 0)};
}
