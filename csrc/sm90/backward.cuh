// Backward attention on Hopper (sm_90a).
//   P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K.
//   One block owns kKeys keys of one KV head and goes through the tiles of kRows queries that see them, of
//   every head of the group.  Scores are transposed, keys by queries: S^T = K Q^T and dP^T = V dO^T end in
//   registers as the operands of dV += P^T dO and dK += dS^T Q, which stay in registers too.  dS goes through
//   shared memory, because dQ needs all keys of the block; dQ is added up in a float workspace, unless a head
//   has one block.
//   Two warpgroups have 64 keys each and take turns: one computes P and dS while the tensor cores work for
//   the other.  Of wide heads a block owns 64 keys, and one warpgroup computes dV and dQ, the other one dK.
#pragma once

#include "sm90/backward_block.cuh"

namespace flashattn::sm90 {

template <bool first, class A, class B>
__device__ inline auto& choose(A& a, B& b) {
  if constexpr (first)
    return a;
  else
    return b;
}

// What a warpgroup does when each has 64 keys.  Of a step it takes all queries, or one half after the other.
template <class C>
__device__ inline void differentiate_keys(const Backward& f, const BackwardShared<C>& shared, int warpgroup,
                                          int thread) {
  using Shared = BackwardShared<C>;
  constexpr int kScores = Shared::kScoreRows / 2, kLast = C::kHeadDimV / 16, kHalves = Shared::kHalves,
                kParts = Shared::kQueryParts;
  static_assert(kParts == (kHalves == 1 ? 1 : 3), "one in the first half of a step, two in the second");
  using Gradients = float[Shared::kQueryColumns / 2];
  constexpr bool kRoundEarly = C::kRows == 64;  // P under dP, if there are registers
  static_assert(kRoundEarly || !C::kGeneral, "s of a general row is not P");
  const int lane = thread % 32, warp = thread / 32, warp_key = warpgroup * 64 + warp * 16;
  const float scale = static_cast<float>(f.p.score.scale) * kLog2E;
  const QuerySums<C> sums{shared, f.queries != Queries::added, warpgroup, warp, lane};
  const int steps = shared.block().steps;
  float dk[C::kHeadDim / 2], dv[C::kHeadDimV / 2], s[kScores], dp[kScores];
  uint32_t p_operand[kScores / 8][4], ds_operand[kScores / 8][4];
  clear(dk);
  clear(dv);

  const auto take_turn = [&] { ptx::bar_sync(kTurnBarrier + warpgroup, 256); };
  const auto pass_turn = [&] { ptx::bar_arrive(kTurnBarrier + (warpgroup ^ 1), 256); };
  const auto multiply_dp = [&](int step, int row) {  // dP^T = V dO^T, and the turn goes on before it ends
    const auto dout = ring_at<C::kDOutStages>(step);
    if (row == 0) ptx::mbarrier_wait(shared.dout_full(dout.stage), dout.parity);
    multiply_rows<C, C::kHeadDimV>(dp, shared.v(), warpgroup * 64, shared.dout(dout.stage), row, [&](int k) {
      if (k == C::kStepsInTurn * 16) pass_turn();
    });
    if (C::kStepsInTurn >= kLast) pass_turn();
  };
  const auto weigh_scores = [&](int step, int row) {
    weigh<C>(p_operand, s, f, shared, step, row, warp_key + lane / 4, scale, lane);
    if (kRoundEarly && !C::kGeneral) round_operand<C>(p_operand, s);
    hold_waits(s[kScores - 1]);
  };
  const auto multiply_queries = [&](Gradients& dq, int step, int part) {
    const auto place = ring_at<Shared::kScoreStages>(step);
    if (step >= 0 && part == 0) ptx::mbarrier_wait(shared.ds_full(place.stage), place.parity);
    multiply_dq<C>(dq, shared, step, Shared::kSplitRows ? warpgroup * 64 : 0,
                   shared.k_columns(Shared::first_column(warpgroup, part)));
  };
  const auto add_queries = [&](Gradients& dq, int step, int part) {
    ptx::written_by_wgmma(dq);
    if (step < 0) return;
    const bool ends = part + 1 == kParts;
    if (ends) arrive_once(shared.ds_empty(ring_at<Shared::kScoreStages>(step).stage), lane);
    sums.add(dq, step, Shared::first_column(warpgroup, part), part == 0, ends);
  };

  // Between two iterations no product is in flight, which ptxas would not follow: P of the queries is in s
  // and p_operand, and dP is complete.
  const auto iterate = [&](int step, auto half, auto last_step) {
    constexpr int kHalf = decltype(half)::value, kRow = kHalf * Shared::kScoreRows;
    constexpr bool kEndsStep = kHalf + 1 == kHalves, kIsLast = decltype(last_step)::value && kEndsStep;
    constexpr int kNextRow = kEndsStep ? 0 : kRow + Shared::kScoreRows;
    const int next_step = kEndsStep ? step + 1 : step;
    score_gradient<C>(ds_operand, s, dp, shared, step, kRow, lane);
    if (!kRoundEarly) round_operand<C>(p_operand, s);
    store_ds<C>(ds_operand, shared, step, kRow, warp_key, lane);
    take_turn();
    Gradients own_dq, &dq = choose<kHalves == 1>(own_dq, s);  // few registers are left: S is dead
    multiply_queries(dq, step - 1, kHalf);                    // of nothing in the first step
    const auto q = ring_at<C::kQueryStages>(step);
    const auto dout = ring_at<C::kDOutStages>(step);
    add_product<C>(dv, p_operand, shared.dout(dout.stage), kRow);
    if constexpr (kHalf == 1) {
      ptx::wgmma_wait_group<1>();
      add_queries(dq, step - 1, 1);
      multiply_queries(dq, step - 1, 2);
    }
    add_product<C>(dk, ds_operand, shared.q(q.stage), kRow);
    ptx::wgmma_wait_group<kHalf == 1 ? 1 : 2>();
    add_queries(dq, step - 1, kHalf * 2);
    if constexpr (kIsLast) {
      if (warpgroup == 0) pass_turn();
      ptx::wgmma_wait_group<0>();
    } else {
      multiply_scores<C>(s, shared, warpgroup * 64, next_step, kNextRow);
      ptx::wgmma_wait_group<1>();
    }
    ptx::written_by_wgmma(dv);
    ptx::written_by_wgmma(dk);
    if (kEndsStep) {
      arrive_once(shared.dout_empty(dout.stage), lane);
      arrive_once(shared.q_empty(q.stage), lane);
    }
    if constexpr (!kIsLast) {
      multiply_dp(next_step, kNextRow);
      ptx::wgmma_wait_group<1>();
      ptx::written_by_wgmma(s);
      weigh_scores(next_step, kNextRow);
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(dp);
    }
  };
  const auto take_step = [&](int step, auto last_step) {
    iterate(step, std::integral_constant<int, 0>{}, last_step);
    if constexpr (kHalves == 2) iterate(step, std::integral_constant<int, 1>{}, last_step);
  };

  if (steps > 0) {
    if (warpgroup == 1) take_turn();
    ptx::mbarrier_wait(shared.k_full(), 0);
    multiply_scores<C>(s, shared, warpgroup * 64, 0);
    ptx::mbarrier_wait(shared.v_full(), 0);
    multiply_dp(0, 0);
    ptx::wgmma_wait_group<1>();
    ptx::written_by_wgmma(s);
    weigh_scores(0, 0);
    ptx::wgmma_wait_group<0>();
    ptx::written_by_wgmma(dp);
#pragma unroll 1
    for (int step = 0; step < steps - 1; ++step) take_step(step, std::false_type{});
    take_step(steps - 1, std::true_type{});
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Gradients dq;
      multiply_queries(dq, steps - 1, part);
      ptx::wgmma_wait_group<0>();
      add_queries(dq, steps - 1, part);
    }
    sums.finish();
    wait_for_readers<C>(shared, lane);  // both have read K
  }
  store_values<C>(f, shared, dv, warpgroup, thread);
  store_keys<C>(f, shared, dk, warpgroup, thread);
}

// What the first warpgroup does when both have the same 64 keys: P, dV and dQ.
template <class C>
__device__ inline void differentiate_values(const Backward& f, const BackwardShared<C>& shared, int thread) {
  using Shared = BackwardShared<C>;
  constexpr int kScores = C::kRows / 2, kParts = C::kHeadDim / Shared::kQueryColumns;
  const int lane = thread % 32, warp = thread / 32;
  const float scale = static_cast<float>(f.p.score.scale) * kLog2E;
  const QuerySums<C> sums{shared, f.queries != Queries::added, 0, warp, lane};
  const int steps = shared.block().steps;
  float dv[C::kHeadDimV / 2], s[kScores], dq[2][Shared::kQueryColumns / 2];
  uint32_t p_operand[C::kRows / 16][4];
  clear(dv);

  const auto weigh_scores = [&](int step) {
    weigh<C>(p_operand, s, f, shared, step, 0, warp * 16 + lane / 4, scale, lane);
    arrive_once(shared.q_empty(ring_at<C::kQueryStages>(step).stage), lane);
    if (!C::kGeneral) round_operand<C>(p_operand, s);
  };
  // dQ of a step in parts, two in flight, and behind the last one scores, if any come after those of the next
  // step, which are there.
  const auto multiply_queries = [&](int step, auto more) {
    constexpr bool kMore = decltype(more)::value;
    const auto place = ring_at<Shared::kScoreStages>(step);
    if (step >= 0) ptx::mbarrier_wait(shared.ds_full(place.stage), place.parity);
    multiply_dq<C>(dq[0], shared, step, 0, shared.k_columns(0));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part + 1 < kParts)
        multiply_dq<C>(dq[(part + 1) % 2], shared, step, 0,
                       shared.k_columns((part + 1) * Shared::kQueryColumns));
      else if (kMore)
        multiply_scores<C>(s, shared, 0, step + 2);
      if (part + 1 < kParts || kMore)
        ptx::wgmma_wait_group<1>();
      else
        ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(dq[part % 2]);
      if (step < 0) continue;
      if (part + 1 == kParts) arrive_once(shared.ds_empty(place.stage), lane);
      sums.add(dq[part % 2], step, part * Shared::kQueryColumns, part == 0, part + 1 == kParts);
    }
  };
  const auto iterate = [&](int step, auto last_step) {
    constexpr bool kIsLast = decltype(last_step)::value;
    const auto dout = ring_at<C::kDOutStages>(step);
    ptx::mbarrier_wait(shared.dout_full(dout.stage), dout.parity);
    ptx::wgmma_fence();
    add_product<C>(dv, p_operand, shared.dout(dout.stage));
    multiply_queries(step - 1, std::bool_constant<!kIsLast>{});
    ptx::written_by_wgmma(dv);
    arrive_once(shared.dout_empty(dout.stage), lane);
    if constexpr (!kIsLast) {
      ptx::wgmma_wait_group<0>();
      ptx::written_by_wgmma(s);
      weigh_scores(step + 1);
    }
  };

  if (steps > 0) {
    ptx::mbarrier_wait(shared.k_full(), 0);
    multiply_scores<C>(s, shared, 0, 0);
    ptx::wgmma_wait_group<0>();
    ptx::written_by_wgmma(s);
    weigh_scores(0);
#pragma unroll 1
    for (int step = 0; step < steps - 1; ++step) iterate(step, std::false_type{});
    iterate(steps - 1, std::true_type{});
    multiply_queries(steps - 1, std::false_type{});
    sums.finish();
    wait_for_readers<C>(shared, lane);  // the other one has read V, and this one K
  }
  store_values<C>(f, shared, dv, 0, thread);
}

// What the second one does: P, dS and dK.
template <class C>
__device__ inline void differentiate_products(const Backward& f, const BackwardShared<C>& shared,
                                              int thread) {
  constexpr int kScores = C::kRows / 2;
  const int lane = thread % 32, warp = thread / 32;
  const float scale = static_cast<float>(f.p.score.scale) * kLog2E;
  const int steps = shared.block().steps;
  float dk[C::kHeadDim / 2], s[kScores], dp[kScores];
  uint32_t ds_operand[C::kRows / 16][4];
  clear(dk);

  const auto multiply_dp = [&](int step) {  // and P under it
    const auto dout = ring_at<C::kDOutStages>(step);
    ptx::mbarrier_wait(shared.dout_full(dout.stage), dout.parity);
    multiply_rows<C, C::kHeadDimV>(dp, shared.v(), 0, shared.dout(dout.stage), 0, [](int) {});
    ptx::wgmma_wait_group<1>();
    ptx::written_by_wgmma(s);
    uint32_t p_operand[C::kRows / 16][4];  // of the other warpgroup
    weigh<C>(p_operand, s, f, shared, step, 0, warp * 16 + lane / 4, scale, lane);
    hold_waits(s[kScores - 1]);
    ptx::wgmma_wait_group<0>();
    ptx::written_by_wgmma(dp);
    arrive_once(shared.dout_empty(dout.stage), lane);
  };
  const auto iterate = [&](int step, auto last_step) {
    constexpr bool kIsLast = decltype(last_step)::value;
    score_gradient<C>(ds_operand, s, dp, shared, step, 0, lane);
    store_ds<C>(ds_operand, shared, step, 0, warp * 16, lane);
    const auto q = ring_at<C::kQueryStages>(step);
    ptx::wgmma_fence();
    add_product<C>(dk, ds_operand, shared.q(q.stage));
    if constexpr (kIsLast) {
      ptx::wgmma_wait_group<0>();
    } else {
      multiply_scores<C>(s, shared, 0, step + 1);
      ptx::wgmma_wait_group<1>();
    }
    ptx::written_by_wgmma(dk);
    arrive_once(shared.q_empty(q.stage), lane);
    if constexpr (!kIsLast) multiply_dp(step + 1);
  };

  if (steps > 0) {
    ptx::mbarrier_wait(shared.k_full(), 0);
    multiply_scores<C>(s, shared, 0, 0);
    ptx::mbarrier_wait(shared.v_full(), 0);
    multiply_dp(0);
#pragma unroll 1
    for (int step = 0; step < steps - 1; ++step) iterate(step, std::false_type{});
    iterate(steps - 1, std::true_type{});
    wait_for_readers<C>(shared, lane);  // the other one has read K, and this one V
  }
  store_keys<C>(f, shared, dk, 1, thread);
}

template <class C>
__global__ void __launch_bounds__(BackwardShared<C>::kThreads, 1)
    backward_kernel(const __grid_constant__ Backward f) {
  const BackwardShared<C> shared;
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    shared.block() = key_block<C>(f.p, f.order);
    shared.init_barriers();
    ptx::prefetch_tensormap(&f.q);
    ptx::prefetch_tensormap(&f.dout);
    ptx::prefetch_tensormap(&f.k);
    ptx::prefetch_tensormap(&f.v);
  }
  __syncthreads();  // the block is described, and its barriers are there
  if (shared.block().steps < 0) return;
  // What the block is launched with, 168 a thread, is divided again.
  constexpr int kProducerRegisters = 24, kConsumerRegisters = 240,
                kAdders = BackwardShared<C>::kSumWarpgroups;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters == 3 * 168);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (shared.block().steps > 0) {
      if (warp == 0)
        produce_tiles<C>(f, shared, lane);
      else if (f.queries == Queries::added_in_turn && warp == kAdders + 1)
        await_turns<C>(f, shared, lane);
      else if (f.queries == Queries::added_in_turn && warp <= kAdders)
        keep_turns<C>(f, shared, warp - 1, lane);
      else if (C::kBulkSums && f.queries == Queries::stored && warp <= kAdders)
        store_queries<C>(f, shared, warp - 1, lane);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int thread = ptx::recomputed(threadIdx.x % 128);
    if constexpr (BackwardShared<C>::kSplitKeys)
      differentiate_keys<C>(f, shared, warpgroup - 1, thread);
    else if (warpgroup == 1)
      differentiate_values<C>(f, shared, thread);
    else
      differentiate_products<C>(f, shared, thread);
    if (thread == 0) ptx::cp_async_bulk_wait_group_read();
  }
}

}  // namespace flashattn::sm90
