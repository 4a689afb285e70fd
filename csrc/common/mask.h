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

}  // namespace flashattn
