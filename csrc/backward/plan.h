// The planner: one thread that walks the steps of each work tile in the policy's order, ahead of the loader and the
// adders.
#pragma once

#include "columns.h"
#include "params.h"
#include "storage.h"
#include "work_ring.h"

namespace dash_attn::backward {

template <typename Variant>
class Planner {
 public:
  using Shared = SharedStorage<Variant>;

  __device__ Planner(Shared& shared, const KernelParams& params) : shared_(shared), params_(params) {}

  __device__ void run() {
    if constexpr (Variant::kOrderFree) { any_needs_order_ = *params_.workspace.any_needs_order != 0; }
    if constexpr (Variant::kMayFinishDq) { shared_.sum_parities = 0; }
    for (; wait_for_work(shared_, ring_); ring_ = ring_.next()) {
      const WorkTile& work = shared_.work[ring_.slot()];
      if constexpr (Variant::kHasColumns) {
        plan_live_visits(work);
      } else {
        Variant::Policies::with(params_.scheduler.policy,
                                [&](auto policy) { plan_work_tile<decltype(policy)::value>(work); });
      }
      opaque(ring_.count);
      shared_.work_empty[ring_.slot()].arrive();
    }
    for (int adder = 0; adder < kAdderWarps; ++adder) { plan_end(); }
  }

 private:
  // `work` is in shared memory and is read again where that saves registers.
  template <Policy kPolicy>
  __device__ __forceinline__ void plan_work_tile(const WorkTile& work) {
    using Order = dash_attn::Order<kPolicy>;
    const bool ordered = is_ordered<kPolicy>(work);
    const auto grid = [&] { return grid_of(work); };
    bool is_last = work.query_tiles.count == 0;
    bool is_first = true;
    WorkStep at{0, 0};
    if constexpr (Order::kDivided) { at.step = Order::steps(grid(), work.kv_tile, work.visits).first; }
    for (WorkStep next; !is_last; at = next) {
      if constexpr (Order::kDivided) {
        next = next_divided_step<kPolicy>(grid(), work.kv_tile, work.visits, at, work.query_heads);
        is_last = next.head == work.query_heads;
      } else {
        const int steps_of_head = work.query_tiles.count;
        next = next_step(are_heads_together<kPolicy>(), at, work.query_heads, steps_of_head);
        is_last = is_end(are_heads_together<kPolicy>(), next, work.query_heads, steps_of_head);
      }
      shared_.plan_empty[plan_.slot()].wait(plan_.empty_parity());
      PlannedStep& planned = shared_.plan[plan_.slot()];
      int query_tile;
      if constexpr (Order::kFollowsRanges) {
        query_tile = Order::visit_among(work.query_tiles, at.step);
      } else {
        query_tile = Order::visit(grid(), work.kv_tile, at.step);
      }
      planned.query_tile = query_tile;
      const Place place = place_of<kPolicy>(work, query_tile);
      planned.rank = place.rank;
      planned.dq_tile = work.first_dq_tile + at.head * grid().query_tiles() + query_tile;
      int packed = ((work.first_query_head + at.head) << PlannedStep::kHeadShift) +
                   (ordered ? PlannedStep::kIsOrdered : 0) + (is_last ? PlannedStep::kIsLast : 0);
      if constexpr (Variant::kMayFinishDq) {
        packed += finishing_flags(place.rank, place.kv_tiles) + (is_first ? PlannedStep::kIsFirst : 0);
        is_first = false;
      }
      if (grid().needs_masking(query_tile, work.kv_tile)) { packed += PlannedStep::kNeedsMasking; }
      planned.packed = packed;
      shared_.plan_full[plan_.slot()].arrive();
      plan_ = plan_.next();
    }
  }

  // The same under a mask by key columns, whose plan says which query tiles are visited: downwards, as in the
  // descending order.
  __device__ __forceinline__ void plan_live_visits(const WorkTile& work) {
    static_assert(Variant::Policies::kAny == Policy::kDescending);
    const LiveVisits& visits = column_tile_of<Variant>(params_, work).visits;
    int left = work.steps(), head = 0, query_tile = left > 0 ? visits.last : 0;
    for (bool is_first = true; left > 0; is_first = false) {
      --left;
      shared_.plan_empty[plan_.slot()].wait(plan_.empty_parity());
      PlannedStep& planned = shared_.plan[plan_.slot()];
      planned.query_tile = query_tile;
      planned.dq_tile = work.first_dq_tile + head * ceil_div(work.sequence.seqlen_q, Variant::kQuery) + query_tile;
      compiler_fence();
      const PlannedVisit visit = planned_visit<Variant>(params_, work, query_tile);
      planned.rank = visit.rank;
      int packed = ((work.first_query_head + head) << PlannedStep::kHeadShift) + PlannedStep::kIsOrdered +
                   (left == 0 ? PlannedStep::kIsLast : 0) + (visit.needs_masking ? PlannedStep::kNeedsMasking : 0);
      if constexpr (Variant::kMayFinishDq) {
        packed += finishing_flags(visit.rank, visit.kv_tiles) + (is_first ? PlannedStep::kIsFirst : 0);
      }
      planned.packed = packed;
      shared_.plan_full[plan_.slot()].arrive();
      plan_ = plan_.next();
      compiler_fence();
      if (params_.heads_together) {
        const bool is_last_head = head + 1 == work.query_heads;
        head = is_last_head ? 0 : head + 1;
        if (is_last_head) { query_tile = visits.last_before(query_tile); }
      } else {
        const bool ends_head = query_tile == visits.first;
        head += ends_head;
        query_tile = ends_head ? visits.last : visits.last_before(query_tile);
      }
    }
  }

  // Built again for each use, because there are no registers to keep it.
  __device__ __forceinline__ TileGrid grid_of(const WorkTile& work) const {
    compiler_fence();
    return Variant::grid(work.sequence, params_.window);
  }

  // The place of the work tile's partial in the sum of a query tile, and how many partials the sum has: only where dQ
  // may be finished.
  struct Place {
    int rank, kv_tiles;
  };

  template <Policy kPolicy>
  __device__ __forceinline__ Place place_of(const WorkTile& work, int query_tile) const {
    using Order = dash_attn::Order<kPolicy>;
    if constexpr (Order::kFollowsRanges) {
      const Range kv_tiles = grid_of(work).kv_tiles_of(query_tile);
      return {Order::rank_among(kv_tiles, work.kv_tile), kv_tiles.count};
    } else {
      const int rank = Order::rank(grid_of(work), work.kv_tile, query_tile);
      return {rank, Variant::kMayFinishDq ? grid_of(work).kv_tiles_of(query_tile).count : 0};
    }
  }

  // Whether the KV tile of that rank, of `kv_tiles` that add to a query tile, finishes dQ; and if so the parity of its
  // sum.
  __device__ __forceinline__ int finishing_flags(int rank, int kv_tiles) {
    if (!params_.finishes_dq || rank + 1 != kv_tiles) { return 0; }
    int flags = PlannedStep::kFinishesDq;
    if (rank > 0) {
      const int buffer = 1 << plan_.count % Variant::kDqSlots;
      if (shared_.sum_parities & buffer) { flags += PlannedStep::kIsOddSum; }
      shared_.sum_parities ^= buffer;
    }
    return flags;
  }

  template <Policy kPolicy>
  __device__ __forceinline__ bool are_heads_together() const {
    return Variant::kMayCarry ? params_.heads_together : heads_together<kPolicy>(Variant::kMask);
  }

  // Whether the work tile's partials are added in fp32 in the order of their ranks.
  template <Policy kPolicy>
  __device__ __forceinline__ bool is_ordered(const WorkTile& work) const {
    if constexpr (accumulation(kPolicy) == Accumulation::kOrderFree) {
      if (!any_needs_order_) { return false; }
      return params_.workspace.needs_order[work.batch * params_.scheduler.kv_heads + work.kv_head] != 0;
    } else {
      return accumulation(kPolicy) == Accumulation::kOrdered;
    }
  }

  __device__ void plan_end() {
    shared_.plan_empty[plan_.slot()].wait(plan_.empty_parity());
    shared_.plan[plan_.slot()].dq_tile = kNoMoreTiles;
    shared_.plan_full[plan_.slot()].arrive();
    plan_ = plan_.next();
  }

  Shared& shared_;
  const KernelParams& params_;
  WorkRing<Variant> ring_;
  RingIndex<Variant::kPlanSlots> plan_;
  bool any_needs_order_ = false;  // saves a work tile's first step from waiting for memory
};

// Called once a step by the loader and one adder or, with wide heads, both. `plan` counts the steps, and so finds the
// step's buffers as well.
template <typename Variant>
__device__ __forceinline__ const PlannedStep& wait_for_step(SharedStorage<Variant>& shared,
                                                            RingIndex<Variant::kPlanSlots> plan) {
  shared.plan_full[plan.slot()].wait(plan.parity());
  return shared.plan[plan.slot()];
}

// The thread has read the step.
template <typename Variant>
__device__ __forceinline__ void release_step(SharedStorage<Variant>& shared, RingIndex<Variant::kPlanSlots> plan) {
  shared.plan_empty[plan.slot()].arrive();
}

}  // namespace dash_attn::backward
