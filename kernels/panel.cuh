// Inputs of GEMMs. A group is 128 bytes of a row: 128 int8 codes, the two limbs of 64 inputs (`Limbs`), or 64 inputs of
// 16 bits. Codes and limbs have {scale, scale times the sum of the codes} of each group.
//
// Row-major: [row][group]. GEMMs of 17 and more rows on Hopper (linear_wide.cuh) read panels of up to 64 rows:
// [panel][group][height], with the 128-byte swizzle of wgmma's operand B, and words of four bytes in the order of the
// weights' registers. Rows of 16 bits are whole groups then. `panels` is 0 for row-major inputs, else the rows of the
// step.
#pragma once
#include "numbers.cuh"

constexpr int PANEL_ROWS = 64;
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
// Stores four inputs of 16 bits, packed in pairs, in a panel, from column 4 `four` of a row on.
DEV void store16_in_panel(void* x, int row, int four, int groups, int panels, uint32_t low, uint32_t high) {
  const int pair = four % 16 * 2;
  uint8_t* const group = static_cast<uint8_t*>(x) + input_index(row, four / 16, groups, panels) * 128;
  *reinterpret_cast<uint32_t*>(group + input_code(row, pair, panels)) = low;
  *reinterpret_cast<uint32_t*>(group + input_code(row, pair + 1, panels)) = high;
}
// Stores 128 inputs of a row as limbs, four per lane of a warp: its groups 2 `pair` and 2 `pair` + 1 of 2 `pairs`, each
// 64 high limbs, then 64 low ones.
DEV void store_limbs(int8_t* x, float2* xs, int row, int pair, int pairs, int lane, int panels, float4 v) {
  const Limbs limbs = limbs_of(v);
  const size_t index = input_index(row, 2 * pair + (lane >> 4), 2 * pairs, panels);
  int8_t* const group = x + index * 128;
  *reinterpret_cast<uint32_t*>(group + input_code(row, lane & 15, panels)) = limbs.high;
  *reinterpret_cast<uint32_t*>(group + input_code(row, 16 + (lane & 15), panels)) = limbs.low;
  if ((lane & 15) == 0) xs[index] = make_float2(limbs.scale, limbs.sum);
}
