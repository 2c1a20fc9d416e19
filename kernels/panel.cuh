// Inputs of GEMMs. A group is 128 bytes of a row: int8 codes with their {scale, scale times the sum of the codes}, or
// 64 inputs of 16 bits.
//
// Row-major: [row][group]. GEMMs of 17 and more rows on Hopper (linear_wide.cuh) read panels of up to 64 rows:
// [panel][group][height], with the 128-byte swizzle of wgmma's operand B, and words of four bytes in the order of the
// weights' registers. Rows of 16 bits are whole groups then. `panels` is 0 for row-major inputs, else the rows of the
// step, plus PLANES_ORDER if the weights are in planes (hierarchy.cuh).
#pragma once
#include "ptx.cuh"

constexpr int PANEL_ROWS = 64;
constexpr int PLANES_ORDER = 1 << 30;
// Rows a panel is padded to, if `rows` remain from its first row on.
DEV int panel_height(int rows) { return min((rows + 7) / 8 * 8, PANEL_ROWS); }
// Index of a row's group among the pairs {scale, sum}; times 128, its byte offset among the inputs.
DEV size_t input_index(int row, int group, int groups, int panels) {
  if (!panels) return (size_t)row * groups + group;
  const int first_row = row / PANEL_ROWS * PANEL_ROWS;  // of the panel
  return (size_t)first_row * groups + (size_t)group * panel_height(panels - first_row) + row % PANEL_ROWS;
}
// Byte offset, in a group's 128, of bytes 4 lane to 4 lane + 3. In a panel the four bytes from 64 h + 16 c + 8 j + 4 p
// on are word c of the 16-byte piece 4 h + 2 j + p.
DEV int input_code(int row, int lane, int panels) {
  return panels ? ((lane >> 4) * 4 + (lane & 3) ^ (row & 7)) * 16 + (lane >> 2 & 3) * 4 : lane * 4;
}
// Stores four inputs of 16 bits, packed in pairs, in a panel, from column 4 `four` of a row on. In the order of planes
// pair 8 c + 2 i + p of a group is word c of piece 2 i + p.
template <class T>
DEV void store16_in_panel(void* x, int row, int four, int groups, int panels, uint32_t low, uint32_t high) {
  const int pair = four % 16 * 2;
  uint8_t* const group = static_cast<uint8_t*>(x) + input_index(row, four / 16, groups, panels & ~PLANES_ORDER) * 128;
  if (panels & PLANES_ORDER) {
    const int piece = (pair ^ row) & 7, word = pair >> 3;
    *reinterpret_cast<uint32_t*>(group + piece * 16 + word * 4) = T::for_codes(low);
    *reinterpret_cast<uint32_t*>(group + (piece ^ 1) * 16 + word * 4) = T::for_codes(high);
  } else {
    *reinterpret_cast<uint32_t*>(group + input_code(row, pair, panels)) = low;
    *reinterpret_cast<uint32_t*>(group + input_code(row, pair + 1, panels)) = high;
  }
}
