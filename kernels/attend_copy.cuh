// Load: keys and values of a step into pipeline stages. Included by attend.cuh.
#pragma once

// Copies the keys (or values) of step n of a warpgroup into a stage, by one warp with TMA or by the warpgroup itself.
// Page numbers are read one step ahead: keys before values, steps in order.
template <class C>
struct Copier {
  const AttendArgs& p;
  int warpgroup;
  int page, next_page;  // physical, of the step whose keys were copied last and of the following one
  uint64_t once;        // pages are read once, so they are evicted from L2 first

  DEV int page_of(const Work& w, int n) const {
    const int logical = w.first_page + (warpgroup + n * C::WARPGROUPS) / (C::FULL_VIEW ? C::SUB : 1);
    const int* list = p.lists + ((size_t)w.span.list * p.kv_heads + w.head) * p.list_pitch;
    return p.tables[(size_t)w.span.slot * p.table_pitch + (w.span.listed >= 0 ? list[logical] : logical)];
  }
  DEV void begin(const Work& w) {
    if (w.pages > 0) next_page = page_of(w, 0);
  }
  // Copies STEP tokens of f16 to the stage at `stage_at`.
  DEV void copy_tokens(const __half* tokens, uint32_t stage_at) const {
    constexpr int COPIERS = C::TMA ? 32 : 128;
    // The 16-byte piece j of token t is stored at piece j ^ (t & 7), so ldmatrix has no bank conflicts.
#pragma unroll 4
    for (int i = threadIdx.x % COPIERS; i < C::STEP * C::D / 8; i += COPIERS) {
      const int t = i / (C::D / 8), j = i % (C::D / 8);
      copy16_once(stage_at + (t * (C::D / 8) + (j ^ (t & 7))) * 16, tokens + i * 8, once);
    }
  }
  // Starts copying the keys (`value` 0) or values (1) of step n to the stage at `stage_at`, whose barrier is `full`.
  DEV void copy(const Work& w, int n, int value, uint32_t stage_at, uint32_t full) {
    const bool recent = n >= w.pages;
    if (!value && !recent) {
      page = next_page;
      if (n + 1 < w.pages) next_page = page_of(w, n + 1);
    }
    if (recent || C::FULL_VIEW) {
      if (recent) {
        const int token = (w.recent + (n - w.pages) * w.span.splits * C::WARPGROUPS) * C::STEP;
        copy_tokens(
            (value ? p.ring_v : p.ring_k) + (((size_t)w.span.slot * p.kv_heads + w.head) * RING + token % RING) * C::D,
            stage_at);
      } else {
        const uint8_t* block = p.full + ((size_t)page * p.kv_heads + w.head) * full_bytes(C::D);
        copy_tokens(reinterpret_cast<const __half*>(block) +
                        (value * PAGE + (warpgroup + n * C::WARPGROUPS) % C::SUB * C::STEP) * C::D,
                    stage_at);
      }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if (C::TMA) copy_arrive(full);
#endif
    } else {
      const size_t block = (size_t)page * p.kv_heads + w.head;
      const uint8_t* up = p.upper + block * upper_bytes(C::D) + (value ? v_params_at(C::D) : 0);
      const uint8_t* low = p.lower + block * lower_bytes(C::D) + (value ? lower_v_at(C::D) : 0);
      const int bytes = (value ? C::V_PARAMS : C::K_PARAMS) + C::CODES;  // of the upper plane
      if constexpr (C::TMA) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if (threadIdx.x % 32 == 0) {
          mbar_expect(full, bytes + (C::TWO ? C::CODES : 0));
          bulk_copy(stage_at, up, bytes, full, once);
          if (C::TWO) bulk_copy(stage_at + C::LOWER, low, C::CODES, full, once);
        } else {
          mbar_arrive(full);
        }
#endif
      } else {
        for (int i = threadIdx.x; i < bytes / 16; i += 128) copy16_once(stage_at + i * 16, up + i * 16, once);
        if (C::TWO)
#pragma unroll
          for (int i = 0; i < C::CODES / 2048; i++)
            copy16_once(stage_at + C::LOWER + (i * 128 + threadIdx.x) * 16, low + (i * 128 + threadIdx.x) * 16, once);
      }
    }
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Barriers of the warpgroups' stages. A stage is full when the producer's 32 lanes have arrived and their copies have
// completed. It is free when the warpgroup's 128 threads have arrived.
template <class C>
DEV void begin_stages(uint32_t base) {
  constexpr int WARPGROUP_BYTES = C::STAGES * C::STAGE + C::REST;
  if (threadIdx.x < C::WARPGROUPS) {
    const uint32_t bars = base + threadIdx.x * WARPGROUP_BYTES + C::STAGES * C::STAGE + C::BARS;
    for (int i = 0; i < C::STAGES; i++) {
      mbar_init(bars + i * 8, 32);
      mbar_init(bars + (C::STAGES + i) * 8, 128);
    }
    mbar_init_done();
  }
  __syncthreads();
}

// The producer warp of a warpgroup: runs as many steps ahead as there are stages, across work items.
template <class C>
DEV void produce(const AttendArgs& p, uint32_t base, int warpgroup) {
  constexpr int WARPGROUPS = C::WARPGROUPS, WARPGROUP_BYTES = C::STAGES * C::STAGE + C::REST;
  const uint32_t stages_at = base + warpgroup * WARPGROUP_BYTES, bars = stages_at + C::STAGES * C::STAGE + C::BARS;
  Copier<C> copier{p, warpgroup, 0, 0, evict_first()};
  int stage = 0, parity = 1;
  int early = p.stages;  // stages that may still be filled before the previous kernel has ended
  bool waited = false;
  auto wait = [&]() {
    if (!waited) {
      grid_wait();
      waited = true;
    }
  };
#pragma unroll 1
  for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
    const Work w = work_at<C>(p, i, warpgroup);
    if (w.span.fresh) wait();
    copier.begin(w);
#pragma unroll 1
    for (int n = 0; n < w.pages + w.recents; n++) {
      if (n == w.pages) wait();
#pragma unroll 1
      for (int value = 0; value < 2; value++) {
        if (early-- == 0) wait();
        mbar_wait(bars + (C::STAGES + stage) * 8, parity);
        copier.copy(w, n, value, stages_at + stage * C::STAGE, bars + stage * 8);
        if (++stage == C::STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }
  // Memory is nearly idle from here to the GEMM after `merge`, so that GEMM's first weights are prefetched.
  constexpr int PIECE = NextWeights::PIECE;
  if ((threadIdx.x & 31) == 0)
#pragma unroll 1
    for (int offset = (blockIdx.x * WARPGROUPS + warpgroup) * PIECE; offset < p.prefetch_bytes;
         offset += gridDim.x * WARPGROUPS * PIECE)
      bulk_prefetch(p.prefetch + offset, min(PIECE, p.prefetch_bytes - offset));
}
#endif

// Copies by the warpgroup's own threads, without TMA: keys of step n into stage 2n, values into 2n + 1, modulo two or
// four stages. With TMA every operation is empty.
template <class C>
struct OwnCopies {
  Copier<C> copier;
  const Work& w;
  uint32_t stages_at;
  int stages;
  bool early;  // the first keys are loaded before the previous kernel has ended
  DEV OwnCopies(const AttendArgs& p, const Work& w, int warpgroup, uint32_t stages_at, int stages)
      : copier{p, warpgroup, 0, 0, evict_first()},
        w(w),
        stages_at(stages_at),
        stages(stages),
        // Every list is waited for, fresh or not: the distinction needs registers that heads of 256 channels lack.
        early(!C::TMA && stages == 4 && w.span.listed < 0 && w.pages > 1) {}
  DEV void load(int n, int value) {
    if (!C::TMA && n < w.pages + w.recents)
      copier.copy(w, n, value, stages_at + ((2 * n + value) & (stages - 1)) * C::STAGE, 0);
  }
  DEV bool ahead() const { return !C::TMA && stages == 4; }  // the next step is loaded during the current one
  // Two groups: keys of step 0; its values and the keys of step 1.
  DEV void load_first() {
    load(0, 0);
    copy_commit();
    load(0, 1);
    load(1, 0);
    copy_commit();
  }
  DEV void begin() {
    copier.begin(w);
    if (early) load_first();
  }
  DEV void wait_first_keys() {
    if (!early) load_first();
    copy_wait<1>();
  }
  // With four stages, during step n: values of the next step and keys of the one after it.
  DEV void load_ahead(int n) {
    if (ahead()) {
      load(n + 1, 1);
      load(n + 2, 0);
      copy_commit();
    }
  }
  // With two stages: keys and values of step n.
  DEV void load_step(int n) {
    load(n, 0);
    load(n, 1);
    copy_commit();
    copy_wait<0>();
  }
};
