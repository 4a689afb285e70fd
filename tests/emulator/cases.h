// The calls that every kernel must answer: chosen ones at the corners of tiles, masks and lengths, and random
// combinations of options, the same in every run.
#pragma once

#include <vector>

#include "problem.h"

namespace emulator {

// For a kernel that serves head dims up to these (0: any); `general` adds options and layouts that
// plain rows do not serve; general rows need not serve all of them.
std::vector<Case> make_cases(int dim, int dim_v, bool general, int random_cases);

// The same for a decode; with v_in_k values lie in the keys of all of them.
std::vector<Case> make_decode_cases(int dim, int dim_v, bool general, bool v_in_k, int random_cases);

}  // namespace emulator
