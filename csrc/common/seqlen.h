// Dense, packed and cached lengths behind one object.
#pragma once

#include "common/host_device.h"
#include "params.h"

namespace flashattn {

// Rows [first, first + length) of the tensor's row dimension belong to the sequence and count; `allotted` of
// them exist (the rest lie past a used length and are never read).
struct Sequence {
  int64_t first, length, allotted;
};

FLASHATTN_HD int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

FLASHATTN_HD Sequence sequence(const Lengths& lengths, int64_t batch) {
  const int64_t first = lengths.cu ? clamp(lengths.cu[batch], 0, lengths.total) : 0;
  const int64_t most = clamp(lengths.rows, 0, lengths.total - first);  // what tensors and workspaces have
  const int64_t allotted = lengths.cu ? clamp(lengths.cu[batch + 1] - first, 0, most) : lengths.rows;
  if (!lengths.used) return {first, allotted, allotted};
  int64_t used = lengths.used[batch] + lengths.appended;
  if (lengths.appended_cu) used += lengths.appended_cu[batch + 1] - lengths.appended_cu[batch];
  return {first, clamp(used, 0, allotted), allotted};
}

// A row of a tensor: its sequence, and its number there.
struct Place {
  int64_t batch, row;
};

// Of row `index` over all sequences.  The rows of a packed tensor before and behind a sequence have a number
// that it does not have.
FLASHATTN_HD Place place_of(const Lengths& lengths, int64_t sequences, int64_t index) {
  if (!lengths.cu) return {index / lengths.rows, index % lengths.rows};
  int64_t batch = 0, end = sequences;  // it starts in [batch, end)
  while (end - batch > 1) {
    const int64_t middle = (batch + end) / 2;
    if (lengths.cu[middle] <= index)
      batch = middle;
    else
      end = middle;
  }
  return {batch, index - clamp(lengths.cu[batch], 0, lengths.total)};
}

}  // namespace flashattn
