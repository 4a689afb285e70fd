// The two products of attention on panels.  A panel holds kPanel rows side by side: element (depth, lane).
// The other factor is a list of row pointers, so rows may lie anywhere (pages) and any of them may be
// replaced.
#pragma once

#include "cpu/vector.h"

namespace flashattn::cpu {
namespace {

constexpr int kBlock =
    kVectorRegisters == 16 ? 6 : 8;  // rows of accumulators, two vectors each, that fit in registers

constexpr int64_t kDepth = 64;  // terms that are added one after the other; longer sums are sums of such sums

// c[r][lane] = (accumulate ? c : 0) + sum_d rows[r][first + d] * panel[d][lane]
template <class T, int R>
inline void rows_block(const T* const* rows, int64_t first, const T* panel, int64_t panel_stride,
                       int64_t depth, T* c, int64_t c_stride, bool accumulate) {
  const T* row[R];
  Vector<T> sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    row[r] = rows[r] + first;
    sum[r][0] = sum[r][1] = Vector<T>{};
  }
  for (int64_t d = 0; d < depth; ++d, panel += panel_stride) {
    const Vector<T> left = load(panel), right = load(panel + kWidth<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const T a = row[r][d];
      sum[r][0] += a * left;
      sum[r][1] += a * right;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r, c += c_stride) {
    store<T>(c, accumulate ? load(c) + sum[r][0] : sum[r][0]);
    store<T>(c + kWidth<T>, accumulate ? load(c + kWidth<T>) + sum[r][1] : sum[r][1]);
  }
}

// c[column][lane] = c[column][lane] * factor[lane] + sum_j rows[j][column] * panel[j][lane]
template <class T, int R>
inline void columns_block(const T* const* rows, int64_t column, int64_t depth, const T* panel,
                          const T* factor, T* c) {
  Vector<T> sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = Vector<T>{};
  for (int64_t j = 0; j < depth; ++j, panel += kPanel<T>) {
    const T* row = rows[j] + column;
    const Vector<T> left = load(panel), right = load(panel + kWidth<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r][0] += row[r] * left;
      sum[r][1] += row[r] * right;
    }
  }
  const Vector<T> left = load(factor), right = load(factor + kWidth<T>);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r, c += kPanel<T>) {
    store<T>(c, load(c) * left + sum[r][0]);
    store<T>(c + kWidth<T>, load(c + kWidth<T>) * right + sum[r][1]);
  }
}

template <class T, int R = kBlock>
inline void rows_by_panel(const T* const* rows, int64_t count, const T* panel, int64_t panel_stride,
                          int64_t depth, T* c, int64_t c_stride, bool accumulate) {
  for (; count >= R; count -= R, rows += R, c += R * c_stride)
    for (int64_t d = 0; d < depth; d += kDepth)
      rows_block<T, R>(rows, d, panel + d * panel_stride, panel_stride, std::min(kDepth, depth - d), c,
                       c_stride, accumulate || d > 0);
  if constexpr (R > 1)
    if (count > 0) rows_by_panel<T, R - 1>(rows, count, panel, panel_stride, depth, c, c_stride, accumulate);
}

template <class T, int R = kBlock>
inline void columns_by_panel(const T* const* rows, int64_t column, int64_t columns, int64_t depth,
                             const T* panel, const T* factor, T* c) {
  for (; column + R <= columns; column += R)
    columns_block<T, R>(rows, column, depth, panel, factor, c + column * kPanel<T>);
  if constexpr (R > 1)
    if (column < columns) columns_by_panel<T, R - 1>(rows, column, columns, depth, panel, factor, c);
}

}  // namespace
}  // namespace flashattn::cpu
