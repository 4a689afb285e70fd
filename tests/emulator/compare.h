// Results of a kernel against those that are expected.
#pragma once

#include "decode_problem.h"
#include "reference.h"

namespace emulator {

// Largest error of a result over its bound; infinite when something was written that should not be.
struct Comparison {
  std::string text;
  bool right = true;

  void add(const char* name, double ratio);
};

void compare_forward(const Problem& p, const Reference& reference, Comparison& result);
void compare_backward(const Problem& p, const Reference& reference, Comparison& result);

// The cache and the inputs too; `before` is the same problem before the call.
void compare_decode(const DecodeProblem& p, const DecodeProblem& before, const Reference& reference,
                    Comparison& result);

}  // namespace emulator
