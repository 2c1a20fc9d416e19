// Layouts in device memory, equal to quantspec_core::layout (Layout::Cuda); the tests pack pages
// with it and compare bytes.
#pragma once
#include "ptx.cuh"

constexpr int PAGE = 128;       // tokens of a page (core::cache::G)
constexpr int RING = 3 * PAGE;  // tokens of the recent buffer (core::cache::BUFFER_TOKENS)

// The first token that a query sees in a local layer (core::cache::first_visible).
DEV int first_visible(int position, int reach) { return max(0, position + 1 - reach); }

// One row of a step, described by the host before the round's drafted tokens are known. offset: index in the slot's
// window; position: in the text; token: its id, or -1 if it is read from the window.
struct Row {
  int slot, offset, position, token;
};

// ---- pages: pool[layer][page][kv head], one block per plane ----
//
//     upper block: [K params 4D][K codes 64D][V params 512][V codes 64D]     lower block: [K codes 64D][V codes 64D]
//     full block (f16): [K: 128 tokens x D][V: 128 tokens x D], row-major
//
// Codes are divided into 16 x 16 tiles (K: tokens x channels, V: channels x tokens), the A operands of mma.m16n8k16. A
// tile has a word for each lane = 4 g + c. Nibble e of it is row g + 8 (e & 1), column 2c + NIBBLE_COLUMN[e]. A lower
// word holds L + 8 and is rotated right by one nibble.
//
//     K words: [token tile][channel tile / 4][lane][channel tile % 4]
//     V words: [token tile / 2][channel tile / 2][lane][token tile & 1][channel tile & 1]
//     K params: f16 [channel tile / 2][c][scale | zero][channel tile & 1][4], channels 16 tile + 2c + {0, 1, 8, 9}
//     V params: f16 [token tile][g][row g, g + 8]{scale, zero}
//
// Sizes and offsets are in bytes; d: channels of a head.
__host__ __device__ constexpr int upper_bytes(int d) { return 132 * d + 512; }
__host__ __device__ constexpr int lower_bytes(int d) { return 128 * d; }
__host__ __device__ constexpr int full_bytes(int d) { return 512 * d; }
__host__ __device__ constexpr int k_codes_at(int d) { return 4 * d; }  // in an upper block
__host__ __device__ constexpr int v_params_at(int d) { return 68 * d; }
__host__ __device__ constexpr int v_codes_at(int d) { return 68 * d + 512; }
__host__ __device__ constexpr int lower_v_at(int d) { return 64 * d; }  // in a lower block
constexpr int NIBBLE_COLUMN[8] = {0, 0, 8, 8, 1, 1, 9, 9};

// Word index of a code tile in the K (or V) codes of its plane; `tt` token tile, `ct` channel tile.
DEV int k_word(int tt, int ct, int lane, int d) { return ((tt * (d / 64) + ct / 4) * 32 + lane) * 4 + ct % 4; }
DEV int v_word(int tt, int ct, int lane, int d) {
  return ((tt / 2 * (d / 32) + ct / 2) * 32 + lane) * 4 + (tt & 1) * 2 + (ct & 1);
}
// f16 index of a channel's scale in the K params; its zero is 8 further.
DEV int k_param(int channel) {
  return ((channel / 32 * 4 + (channel % 8) / 2) * 2) * 8 + (channel / 16 % 2) * 4 + (channel / 8 % 2) * 2 +
         (channel & 1);
}
// f16 index of a token's scale in the V params; its zero is 1 further.
DEV int v_param(int token) { return (token / 16 * 8 + token % 8) * 4 + (token / 8 % 2) * 2; }

// ---- recent tokens: keys (after RoPE) and values, f16 [layer][slot][kv head][RING][D], one pool each ----
//
// Index of a token's first channel, in f16.
DEV size_t ring_at(int layer, int slot, int head, int position, int slots, int heads, int d) {
  return ((((size_t)layer * slots + slot) * heads + head) * RING + position % RING) * d;
}

// ---- weights in planes of nibbles (docs/design/weights.md) ----
//
// w = (U + L / 16) s + z, with s and z f16 per output and 64 inputs.
//
// Upper plane: blocks of 16 outputs x 64 inputs, [N / 16][stride], stride even.
//
//     codes       [lane] uint4; byte b of word i: row g (low nibble) and g + 8 (high nibble) at k = 16 c + 4 i + b
//     parameters  f16 [g] {scale, zero of row g; scale, zero of row g + 8}
//
// Lower plane: blocks of codes L + 8 in the same order.
constexpr int UPPER_BLOCK = 576, LOWER_BLOCK = 512;  // bytes
enum { UPPER_PARAMS = 512 };                         // where the parameters of an upper block begin
// Weights k .. k + 7 of output n, k a multiple of 8; the sum is rounded once. `lower` null: every L is 0.
DEV void plane_weights(float (&w)[8], const uint8_t* upper, const uint8_t* lower, int n, int k, int stride) {
  const size_t block = (size_t)(n / 16) * stride + k / 64;
  const int offset = ((n & 7) * 4 + k % 64 / 16) * 16 + k % 16, shift = n & 8 ? 4 : 0;
  const uint8_t* const upper_block = upper + block * UPPER_BLOCK;
  const uint2 u = __ldg(reinterpret_cast<const uint2*>(upper_block + offset));
  const uint2 l = lower ? __ldg(reinterpret_cast<const uint2*>(lower + block * LOWER_BLOCK + offset))
                        : make_uint2(0x88888888, 0x88888888);
  const float2 params =
      unpack_half2(__ldg(reinterpret_cast<const uint32_t*>(upper_block + UPPER_PARAMS + (n & 7) * 8 + shift)));
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int bits = i % 4 * 8 + shift;
    const int code = (int)((i < 4 ? u.x : u.y) >> bits & 15) * 16 + (int)((i < 4 ? l.x : l.y) >> bits & 15) - 8;
    w[i] = __fmaf_rn((float)code * 0.0625f, params.x, params.y);
  }
}
