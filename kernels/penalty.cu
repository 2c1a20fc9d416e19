// Penalties on tokens of the text, and masks, applied to logits in place before a token is chosen, as defined by
// quantspec_core::penalty and quantspec_core::grammar.
//
// Arguments of several kernels:
//
//     rows       [row] of the step
//     histories  [slot]
//     texts      committed text, int32 [slot][text_pitch]
//     counts     uint32 [slot][vocab]: the top bit is set if the token occurred; other bits count it in the answer
//     windows    int32 [slot][window_pitch]: drafted token i at index i + 1; those before a row's offset precede it
//     logits     f32 [row][vocab]
#include "layout.cuh"
#include "numbers.cuh"

// A slot's penalties and its committed text.
struct History {
  int on;     // penalties apply
  int ngram;  // n of no-repeat-n-gram; 0: off
  float repetition, frequency, presence;
  int length, prompt;  // committed tokens, and how many of them are the prompt's
  int unused;
};
// The host's update for a slot.
constexpr int COMMIT_TOKENS = 30;
struct Commit {
  int slot;
  int added;                  // number of new tokens, the last of the text
  History history;            // including the new tokens
  int tokens[COMMIT_TOKENS];  // the new tokens, if they fit
};
static_assert(sizeof(History) == 32 && sizeof(Commit) == 160, "written by the host");

constexpr uint32_t OCCURRED = 1u << 31;
constexpr int PENALTY_THREADS = 256;  // of a block
constexpr int PENALTY_TOKENS = 1024;  // of the vocabulary, per block
constexpr int NGRAM_MAX = 100, WINDOW_MAX = 32;

// penalty_commit: counts new committed tokens. If they fit in `Commit::tokens`, they are also copied to `texts`;
// otherwise the host has written them there. Grid (commits), PENALTY_THREADS threads, no shared memory.
KERNEL __launch_bounds__(PENALTY_THREADS)
    penalty_commit(const Commit* commits, History* histories, int* texts, int text_pitch, uint32_t* counts, int vocab) {
  const Commit& commit = commits[blockIdx.x];
  const History h = commit.history;
  const int slot = commit.slot, added = commit.added, first = h.length - added;
  int* text = texts + (size_t)slot * text_pitch;
  for (int i = threadIdx.x; i < added; i += PENALTY_THREADS) {
    if (added <= COMMIT_TOKENS) text[first + i] = commit.tokens[i];
    uint32_t* count = counts + (size_t)slot * vocab + text[first + i];
    atomicOr(count, OCCURRED);
    if (first + i >= h.prompt) atomicAdd(count, 1u);
  }
  if (threadIdx.x == 0) histories[slot] = h;
}

// penalty_apply: repetition, frequency and presence. Grid (ceil(vocab / PENALTY_TOKENS), rows), PENALTY_THREADS
// threads, static shared memory.
KERNEL __launch_bounds__(PENALTY_THREADS)
    penalty_apply(const Row* rows, const History* histories, const uint32_t* counts, const int* windows,
                  int window_pitch, float* logits, int vocab) {
  __shared__ int drafted[WINDOW_MAX];
  grid_trigger();
  grid_wait();
  const Row r = rows[blockIdx.y];
  const History h = histories[r.slot];
  if (!h.on) return;
  const int before = min(r.offset, WINDOW_MAX);
  if (threadIdx.x < before) drafted[threadIdx.x] = windows[(size_t)r.slot * window_pitch + 1 + threadIdx.x];
  __syncthreads();
  float* row = logits + (size_t)blockIdx.y * vocab;
#pragma unroll
  for (int i = 0; i < PENALTY_TOKENS / PENALTY_THREADS; i++) {
    const int id = blockIdx.x * PENALTY_TOKENS + i * PENALTY_THREADS + threadIdx.x;
    if (id >= vocab) return;
    uint32_t count = counts[(size_t)r.slot * vocab + id];
    for (int j = 0; j < before; j++)
      if (drafted[j] == id) count = (count | OCCURRED) + 1;
    if (!count) continue;
    const float logit = row[id];
    float x = logit < 0.f ? __fmul_rn(logit, h.repetition) : __fdiv_rn(logit, h.repetition);
    if (count & ~OCCURRED) x = __fsub_rn(__fsub_rn(x, __fmul_rn(h.frequency, (float)(count & ~OCCURRED))), h.presence);
    row[id] = x;
  }
}

// penalty_forbid: no-repeat-n-gram, after penalty_apply. Compares the start of every earlier n-gram with the row's last
// n - 1 tokens, from the back. Grid (any, rows), PENALTY_THREADS threads, static shared memory.
KERNEL __launch_bounds__(PENALTY_THREADS)
    penalty_forbid(const Row* rows, const History* histories, const int* texts, int text_pitch, const int* windows,
                   int window_pitch, float* logits, int vocab) {
  __shared__ int last[NGRAM_MAX];
  grid_trigger();
  grid_wait();
  const Row r = rows[blockIdx.y];
  const History h = histories[r.slot];
  const int length = h.length + r.offset, n = h.ngram;
  if (!h.on || !n || length < n) return;
  const int *text = texts + (size_t)r.slot * text_pitch, *window = windows + (size_t)r.slot * window_pitch + 1;
  auto token = [&](int i) { return i < h.length ? text[i] : window[i - h.length]; };
  if (threadIdx.x < n - 1) last[threadIdx.x] = token(length - (n - 1) + threadIdx.x);
  __syncthreads();
  for (int end = n - 1 + blockIdx.x * PENALTY_THREADS + threadIdx.x; end < length; end += gridDim.x * PENALTY_THREADS) {
    int i = 1;
    while (i < n && token(end - i) == last[n - 1 - i]) i++;
    if (i == n) logits[(size_t)blockIdx.y * vocab + token(end)] = minus_infinity();
  }
}

// penalty_mask: tokens that may not follow, after the penalties. masks uint32 [row][words]: token t may follow if bit
// t % 32 of word t / 32 is set. Grid and threads as for penalty_apply, no shared memory.
KERNEL __launch_bounds__(PENALTY_THREADS) penalty_mask(const uint32_t* masks, int words, float* logits, int vocab) {
  grid_trigger();
  grid_wait();
  const uint32_t* mask = masks + (size_t)blockIdx.y * words;
  float* row = logits + (size_t)blockIdx.y * vocab;
#pragma unroll
  for (int i = 0; i < PENALTY_TOKENS / PENALTY_THREADS; i++) {
    const int id = blockIdx.x * PENALTY_TOKENS + i * PENALTY_THREADS + threadIdx.x;
    if (id < vocab && !(mask[id / 32] >> id % 32 & 1)) row[id] = minus_infinity();
  }
}
