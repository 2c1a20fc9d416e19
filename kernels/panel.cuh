// Int8 inputs of draft products. Up to 16 rows lie row-major, codes [row][groups * 128] and {scale, sum} [row][groups]. More, on Hopper, lie in panels of up to 64
// rows, [panel][group][height]: codes as wgmma reads them (128-byte swizzle, words of four codes in the order in which draft weights hold them).
#pragma once
#include "ptx.cuh"

constexpr int PANEL_ROWS = 64;
// Rows that a panel has room for, of the rows from its first on.
DEV int panel_height(int rows) { return min((rows + 7) / 8 * 8, PANEL_ROWS); }
// Place of a row's group among {scale, sum}; times 128, of its codes. `rows`: of the step.
DEV size_t panel_place(int row, int group, int groups, int rows) {
  const int above = row / PANEL_ROWS * PANEL_ROWS;
  return (size_t)above * groups + (size_t)group * panel_height(rows - above) + row % PANEL_ROWS;
}
// Byte of the codes 4 lane ... 4 lane + 3 of a group: those of lane 16 h + 4 c + 2 j + p are word c of piece 4 h + 2 j + p.
DEV int panel_code(int row, int lane) { return ((((lane >> 4) * 4 + (lane & 3)) ^ (row & 7)) * 4 + (lane >> 2 & 3)) * 4; }
