// Where everything lies in device memory. quantspec_core::layout (Layout::Cuda) holds the same places; the tests pack pages by it and compare bytes.
#pragma once
#include "ptx.cuh"

constexpr int PAGE = 128;          // tokens of a page (core::cache::G)
constexpr int RING = 3 * PAGE;     // tokens of the recent buffer (core::cache::BUFFER_TOKENS)

// One row of a step. Described by the host before it knows drafted tokens: positions are known before a round starts.
struct Row {
  int slot, offset, position, token;      // token: -1 where the slot's window has it
};

// ---- pages: pool[layer][page][kv head], one block per plane ----
//   upper block: [K params 4D][K codes 64D][V params 512][V codes 64D]     lower block: [K codes 64D][V codes 64D]
//   full block (f16): [K: 128 tokens x D][V: 128 tokens x D], row-major
// The codes are cut into 16 x 16 tiles (K: tokens x channels, V: channels x tokens), each 32 words: lane 4g+c owns eight elements, nibble e being
// row g + 8(e & 1) and column 2c + {0,0,8,8,1,1,9,9}[e]. A lower word holds code + 8 and is rotated right by one nibble.
//   K words: [token tile 8][channel tile / 4][lane][channel tile % 4]      V words: [token tile / 2][channel tile / 2][lane][token tile & 1][channel tile & 1]
//   K params: f16 [channel tile / 2][c][scale | zero][channel tile & 1][4], channels 16 tile + 2c + {0,1,8,9};  V params: f16 [token tile][g][row g, g+8]{scale, zero}
__host__ __device__ constexpr int upper_bytes(int d) { return 132 * d + 512; }
__host__ __device__ constexpr int lower_bytes(int d) { return 128 * d; }
__host__ __device__ constexpr int full_bytes(int d) { return 512 * d; }
__host__ __device__ constexpr int k_codes_at(int d) { return 4 * d; }                  // in an upper block
__host__ __device__ constexpr int v_params_at(int d) { return 68 * d; }
__host__ __device__ constexpr int v_codes_at(int d) { return 68 * d + 512; }
__host__ __device__ constexpr int lower_v_at(int d) { return 64 * d; }                 // in a lower block
constexpr int NIBBLE_COLUMN[8] = {0, 0, 8, 8, 1, 1, 9, 9};

// word index of a code tile inside its plane's K (or V) part; `tt` token tile, `ct` channel tile
DEV int k_word(int tt, int ct, int lane, int d) { return ((tt * (d / 64) + ct / 4) * 32 + lane) * 4 + ct % 4; }
DEV int v_word(int tt, int ct, int lane, int d) { return ((tt / 2 * (d / 32) + ct / 2) * 32 + lane) * 4 + (tt & 1) * 2 + (ct & 1); }
// f16 index inside the K params of a channel's scale; its zero is 8 further
DEV int k_param(int channel) { return ((channel / 32 * 4 + (channel % 8) / 2) * 2) * 8 + (channel / 16 % 2) * 4 + (channel / 8 % 2) * 2 + (channel & 1); }
// f16 index inside the V params of a token's scale; its zero is 1 further
DEV int v_param(int token) { return (token / 16 * 8 + token % 8) * 4 + (token / 8 % 2) * 2; }

// ---- recent tokens: keys (after RoPE) and values, f16 [layer][slot][kv head][RING][D], one pool each ----
DEV size_t ring_at(int layer, int slot, int head, int position, int slots, int heads, int d) {
  return ((((size_t)layer * slots + slot) * heads + head) * RING + position % RING) * d;
}
