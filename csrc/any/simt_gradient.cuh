// What the gradients in plain CUDA C++ share: P and dS of a tile, recomputed from the saved LSE.
//   P = exp(S - lse), dP = dO V^T, dS = P * (dP - delta) with delta = rowsum(dO * O) - dlse.
#pragma once

#include "any/simt_tile.cuh"

namespace flashattn::any {

// Of one element: the weight that V is multiplied by, the gradient of the score and that of scale q k.
template <class T>
struct Gradient {
  T weight, dscore, dproduct;
};

template <class E>
__device__ inline auto query_rows(const View<E>& view, const Tensor4& x, int64_t first) {
  return query_rows(view, x, first, view.q.length);
}

template <class E>
__device__ inline void load_gradient_queries(const BackwardParams& p, const View<E>& view,
                                             int64_t first_query) {
  using T = Sum<E>;
  Query<T>* queries = shared_tiles<T>().queries;
  load_queries(view, first_query, queries);
  for (int i = thread_index(); i < kTile; i += kThreads) {
    const int64_t query = first_query + i;
    const bool exists = query < view.q.length;
    const T lse = exists ? view.statistic(p.lse, query) : 0;
    queries[i].lse = lse == -kInfinity<T> ? kInfinity<T> : lse;  // empty row: weights are 0
    queries[i].delta = exists ? view.statistic(p.delta, query) : 0;
  }
}

template <class E, class T>
__device__ inline Gradient<T> differentiate(const View<E>& view, const Query<T>& query, int64_t key,
                                            T product, T dweight) {
  T cap_slope;
  const T weight = std::exp(score_of(view.p.score, query, key, product, cap_slope) - query.lse);
  if (weight == 0) return {0, 0, 0};  // an invisible key may hold NaN
  const T factor = dropout_factor(view, query.index, key), dscore = weight * (dweight * factor - query.delta);
  return {weight * factor, dscore, dscore * cap_slope};
}

}  // namespace flashattn::any
