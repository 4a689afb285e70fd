// Which keys a query sees: causal, window and lengths together are one interval of keys a query.
#pragma once

#include "common/seqlen.h"

namespace flashattn {

struct KeyRange {
  int64_t first, last;  // [first, last)
};

// Query i of len_q sits at key position i + len_k - len_q (bottom-right aligned) and sees `left` keys before
// it and `right` after it, both inclusive; -1 is no limit.  Keys before `pad` are invisible.  Empty ranges
// have first == last.
FLASHATTN_HD KeyRange visible_keys(int64_t query, int64_t len_q, int64_t len_k, int64_t left, int64_t right,
                                   int64_t pad = 0) {
  const int64_t position = query + len_k - len_q;
  const int64_t first = left < 0 ? pad : clamp(position - left, pad, len_k);
  const int64_t last = right < 0 ? len_k : clamp(position + right + 1, 0, len_k);
  return {clamp(first, 0, len_k), last < first ? clamp(first, 0, len_k) : last};
}

struct RowRange {
  int first, last;  // [first, last)
};

// The same of one sequence in 32-bit arithmetic, for the inner loops of kernels: rows and keys under 2^30.
struct VisibleKeys {
  int first_offset, last_offset, len_q, len_k;

  VisibleKeys() = default;
  FLASHATTN_HD VisibleKeys(int64_t q, int64_t k, int64_t left, int64_t right)
      : first_offset(static_cast<int>(left < 0 ? -kFar : clamp(k - q - left, -kFar, kFar))),
        last_offset(static_cast<int>(right < 0 ? kFar : clamp(k - q + right + 1, -kFar, kFar))),
        len_q(static_cast<int>(q)),
        len_k(static_cast<int>(k)) {}

  // [first(query), last(query)); a query after the end sees nothing.
  FLASHATTN_HD int first(int query) const { return within(query + first_offset); }
  FLASHATTN_HD int last(int query) const { return query < len_q ? within(query + last_offset) : 0; }

  // The queries that see every key of [key, end).
  FLASHATTN_HD RowRange rows_of_all(int key, int end) const {
    const int low = end - last_offset, high = key - first_offset + 1;
    const RowRange range{low < 0 ? 0 : low, high > len_q ? len_q : high};
    return end <= len_k && range.first < range.last ? range : RowRange{0, 0};
  }

  // The queries that see a key of [key, end).
  FLASHATTN_HD RowRange rows(int key, int end) const {
    if (end > len_k) end = len_k;
    const int low = key - last_offset + 1, high = end - first_offset;
    const RowRange range{low < 0 ? 0 : low, high > len_q ? len_q : high};
    return key < end && range.first < range.last ? range : RowRange{0, 0};
  }

 private:
  static constexpr int64_t kFar = 1 << 30;
  FLASHATTN_HD int within(int key) const {
    key = key < 0 ? 0 : key;
    return key < len_k ? key : len_k;
  }
};

}  // namespace flashattn
