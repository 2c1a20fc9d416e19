// Int8 inputs of draft GEMMs: codes of 128 bytes per row and group, and their {scale, scale
// times the sum of the codes}.
//
// Row-major: [row][group]. GEMMs of 17 and more rows on Hopper (linear_wide.cuh) read panels of up to 64 rows:
// [panel][group][height], with the 128-byte swizzle of wgmma's operand B, and words of four codes in the order of the
// draft weights' registers. `panels` is 0 for row-major inputs, else the rows of the step.
#pragma once
#include "ptx.cuh"

constexpr int PANEL_ROWS = 64;
// Rows a panel is padded to, if `rows` remain from its first row on.
DEV int panel_height(int rows) { return min((rows + 7) / 8 * 8, PANEL_ROWS); }
// Index of a row's group among the pairs {scale, sum}; times 128, the byte offset of its codes.
DEV size_t input_index(int row, int group, int groups, int panels) {
  if (!panels) return (size_t)row * groups + group;
  const int first_row = row / PANEL_ROWS * PANEL_ROWS;  // of the panel
  return (size_t)first_row * groups + (size_t)group * panel_height(panels - first_row) + row % PANEL_ROWS;
}
// Byte offset, in a group's 128, of codes 4 lane to 4 lane + 3. In a panel the four codes from 64 h + 16 c + 8 j + 4 p
// on are word c of the 16-byte piece 4 h + 2 j + p.
DEV int input_code(int row, int lane, int panels) {
  return panels ? ((lane >> 4) * 4 + (lane & 3) ^ (row & 7)) * 16 + (lane >> 2 & 3) * 4 : lane * 4;
}
