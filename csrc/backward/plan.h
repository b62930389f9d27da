// The planner: one thread that walks each claim's steps in the policy's order, ahead of the loader and the adders.
#pragma once

#include "claims.h"
#include "config.h"
#include "params.h"

namespace dash_attn::backward {

// Index of the first query tile of a claim's first query head among all query tiles; launch_backward.h checks that 32
// bits do.
__device__ __forceinline__ int first_tile_index(const Problem& problem, const Work& work) {
  return (work.batch * problem.kv_heads * problem.queries_per_kv + first_query_head(problem, work)) *
         problem.query_tiles;
}

template <typename Config>
class Planner {
 public:
  using Shared = SharedStorage<Config>;

  __device__ Planner(Shared& shared, const KernelParams& params) : shared_(shared), params_(params) {}

  __device__ void run() {
    Work work;
    for (; next_work<Reader::kThread>(work, shared_, params_, claims_); claims_ = claims_.next()) {
      if (!work.valid()) { continue; }
      with_order_of_head<Config::kPolicy>(params_.problem, work.kv_head,
                                          [&](auto policy) { plan_claim<decltype(policy)::value>(work); });
    }
    for (int adder = 0; adder < kAdderWarps; ++adder) { plan_end(); }
  }

 private:
  template <Policy kPolicy>
  __device__ __forceinline__ void plan_claim(const Work& work) {
    using Order = dash_attn::Order<kPolicy>;
    const Problem problem = specialised_problem<Config>(params_);
    int kv_tile = work.kv_tile;
    shared_.first_tile = first_tile_index(problem, work);
    shared_.first_head = first_query_head(problem, work);
    const bool ordered = is_ordered(work);
    ClaimStep at{0, 0};
    for (int left = problem.live_query_tiles(kv_tile) * problem.queries_per_claim; left > 0; --left) {
      forget(kv_tile);
      shared_.plan_empty[plan_.slot()].wait(plan_.empty_parity());
      PlannedStep& planned = shared_.plan[plan_.slot()];
      const int query_tile = Order::visit(problem, kv_tile, at.step);
      planned.query_tile = query_tile;
      planned.set_head(shared_.first_head + at.head, left == 1);
      planned.tile = shared_.first_tile + at.head * problem.query_tiles + query_tile;
      forget(kv_tile);
      planned.rank = ordered ? Order::rank(problem, kv_tile, query_tile) : kAnyTurn;
      shared_.plan_full[plan_.slot()].arrive();
      plan_ = plan_.next();
      at = next_step<kPolicy>(problem, kv_tile, at);
    }
  }

  // Whether the claim's partials are added in fp32, in turn.
  __device__ __forceinline__ bool is_ordered(const Work& work) const {
    if constexpr (Config::kOrderFree) {
      return params_.workspace.needs_order[work.batch * params_.problem.kv_heads + work.kv_head].any();
    } else {
      return Config::kAccumulation == Accumulation::kOrdered;
    }
  }

  __device__ void plan_end() {
    shared_.plan_empty[plan_.slot()].wait(plan_.empty_parity());
    shared_.plan[plan_.slot()].tile = kNoMoreTiles;
    shared_.plan_full[plan_.slot()].arrive();
    plan_ = plan_.next();
  }

  Shared& shared_;
  const KernelParams& params_;
  RingIndex<Config::kClaimSlots> claims_;
  RingIndex<Config::kPlanSlots> plan_;
};

// Called by the loader and one adder, once a step. `plan` counts the steps, and so finds the buffers of the step as well.
template <typename Config>
__device__ __forceinline__ const PlannedStep& wait_for_step(SharedStorage<Config>& shared,
                                                            RingIndex<Config::kPlanSlots> plan) {
  shared.plan_full[plan.slot()].wait(plan.parity());
  return shared.plan[plan.slot()];
}

// The thread has read the step.
template <typename Config>
__device__ __forceinline__ void release_step(SharedStorage<Config>& shared, RingIndex<Config::kPlanSlots> plan) {
  shared.plan_empty[plan.slot()].arrive();
}

}  // namespace dash_attn::backward
