// Distributing work. The loader of a cluster's first CTA takes the next number from a counter in global memory and
// sends it to the cluster's other loaders. Each loader derives its CTA's work tile and passes it to the other warps
// through a ring in shared memory.
//
// Waiting is safe because numbers are taken in order: a CTA that has number n waits only for lower numbers
// (contract/order.h), which belong to CTAs that are running or have finished, so the lowest unfinished one never waits.
// whole_tiles.h explains why a CTA may wait for higher numbers if it works on a whole KV tile instead of a part.
#pragma once

#include "../device/ptx.h"
#include "columns.h"
#include "params.h"
#include "storage.h"
#include "whole_tiles.h"

namespace dash_attn::backward {

template <typename Variant>
using WorkRing = RingIndex<Variant::kWorkSlots>;

template <typename Variant>
__device__ __forceinline__ int cluster_cta_rank() {
  return Variant::kClusterSize == 1 ? 0 : ptx::cta_rank();
}

// Called by one thread of every CTA of the cluster.
template <typename Variant>
__device__ __forceinline__ int take_number(SharedStorage<Variant>& shared, const KernelParams& params,
                                           WorkRing<Variant> ring) {
  if constexpr (Variant::kClusterSize == 1) {
    return atomicAdd(params.workspace.next_work, 1);
  } else {
    const int slot = ring.slot();
    shared.number_full[slot].arrive_and_expect_tx(sizeof(int));
    if (cluster_cta_rank<Variant>() == 0) {
      shared.number_empty[slot].wait(ring.empty_parity());
      const int number = atomicAdd(params.workspace.next_work, 1);
#pragma unroll
      for (int cta = 0; cta < Variant::kClusterSize; ++cta) {
        ptx::store_async(ptx::map_shared(&shared.work_number[slot], cta), number,
                         ptx::map_shared(&shared.number_full[slot], cta));
      }
    }
    shared.number_full[slot].wait(ring.parity());
    const int number = shared.work_number[slot];
    shared.number_empty[slot].arrive(0u);
    return number;
  }
}

// Built again where that saves registers.
__device__ __forceinline__ TileScheduler scheduler_of_work(const WorkTile& work, const KernelParams& params) {
  const PackView& pack = params.pack;
  return pack.is_pack() ? params.scheduler.of(pack.sequences[work.packed]) : params.scheduler;
}

// Writes the work tile of `number`; returns false if the number means nothing. Intermediate values pass through shared
// memory, which saves registers.
template <typename Variant>
__device__ __forceinline__ bool write_work(SharedStorage<Variant>& shared, WorkTile& work, const KernelParams& params,
                                           int number) {
  const PackView& pack = params.pack;
  TileScheduler scheduler = params.scheduler;
  if (pack.is_pack()) {
    work.packed = pack.place_of(number, scheduler.kv_heads);
    const PackedSequence& sequence = pack.sequences[work.packed];
    number = sequence.number_within(number, scheduler.kv_heads);
    scheduler = scheduler.of(sequence);
  }
  if constexpr (Variant::kOrderFree) {
    if (params.finishes_dq || *params.workspace.any_needs_order) { scheduler = scheduler.with_turns(); }
  }
  if constexpr (Variant::kDivided) { work.query_tiles.count = number; }  // parked here; written below
  if constexpr (Variant::kHasColumns) {
    work.query_tiles.count =  // parked too
        long_tiles_of<Variant>(params, pack.is_pack() ? &pack.sequences[work.packed] : nullptr);
    compiler_fence();
  }
  Variant::Policies::with(scheduler.policy, [&](auto policy) {
    const TileGrid grid = Variant::grid(scheduler.sequence, params.window);
    if constexpr (Variant::kHasColumns) {
      static_cast<WorkPlace&>(work) = scheduler.place_long_tiles_first(grid, number, work.query_tiles.count);
    } else {
      const WorkPlace place = scheduler.place<decltype(policy)::value>(grid, number, cluster_cta_rank<Variant>());
      static_cast<WorkPlace&>(work) = place;
    }
  });
  compiler_fence();
  if constexpr (Variant::kDivided) {
    number = work.query_tiles.count;
    scheduler = scheduler_of_work(work, params);
    const TileGrid grid = Variant::grid(scheduler.sequence, params.window);
    const int first_number = scheduler.template first_number_of_head<Variant::Policies::kAny>(grid, work);
    const int before = pack.is_pack() ? pack.sequences[work.packed].first_unit * scheduler.kv_heads : 0;
    if (grid.kv_tiles() == 1 ||
        is_worked_on_whole(params, before + first_number, number == first_number, grid.kv_tiles())) {
      const int next = before + number + work.kv_tile + 1;  // after the last of the head's first, or second, parts
      if (work.visits == Visits::kSecond) {
        // The numbers of second parts follow those of all first parts, so the next number may be taken at once.
        move_counter_to(params, next);
        return false;
      }
      work.visits = Visits::kAll;
      shared.others_until = next;
    }
    compiler_fence();
    scheduler = scheduler_of_work(work, params);
  }
  const TileGrid grid = Variant::grid(scheduler.sequence, params.window);
  scheduler.fill_in(work, grid);
  compiler_fence();
  if constexpr (!Variant::kHasColumns) {
    scheduler.template fill_in_query_tiles<Variant::Policies::kAny>(work,
                                                                    Variant::grid(work.sequence, params.window));
  }
  compiler_fence();
  if (pack.is_pack()) { scheduler.move_into_pack(work, pack.sequences[work.packed]); }
  if constexpr (Variant::kHasColumns) {
    compiler_fence();
    work.query_tiles.count = column_tile_of<Variant>(params, work).visits.count;
  }
  return true;
}

__device__ __forceinline__ int num_work_items(const KernelParams& params) {
  return params.pack.is_pack() ? params.pack.totals->units * params.scheduler.kv_heads : params.num_groups;
}

// Called by the loader's leader once a work tile: waits for the slot and fills it.
template <typename Variant>
__device__ __forceinline__ void publish_work(SharedStorage<Variant>& shared, const KernelParams& params,
                                             WorkRing<Variant> ring) {
  if constexpr (Variant::kDivided) { wait_until_taken(params, shared.others_until); }
  int number = take_number(shared, params, ring);
  shared.work_empty[ring.slot()].wait(ring.empty_parity());
  WorkTile& work = shared.work[ring.slot()];
  if constexpr (Variant::kDivided) {
    while (number < num_work_items(params) && !write_work(shared, work, params, number)) {
      number = take_number(shared, params, ring);
    }
    if (number >= num_work_items(params)) { work.kv_tile = kNoMoreWork; }
  } else {
    const int numbers = num_work_items(params);
    if (number < numbers) { write_work(shared, work, params, number); }
    if (number >= numbers) { work.kv_tile = kNoMoreWork; }
  }
  shared.work_full[ring.slot()].arrive();
}

// For one thread of another warp: waits for this pass's work tile, and returns false when there is none left. The work
// tile stays until the thread arrives on work_empty.
template <typename Variant>
__device__ __forceinline__ bool wait_for_work(SharedStorage<Variant>& shared, WorkRing<Variant> ring) {
  shared.work_full[ring.slot()].wait(ring.parity());
  return shared.work[ring.slot()].kv_tile != kNoMoreWork;
}

// For a whole warp, which stays converged: ptxas otherwise takes what follows for divergent and keeps addresses and
// counts in a register of every lane instead of one uniform register.
template <typename Variant>
__device__ __forceinline__ bool wait_for_work_together(SharedStorage<Variant>& shared, WorkRing<Variant> ring) {
  const bool more = wait_for_work(shared, ring);
  __syncwarp();
  return more;
}

}  // namespace dash_attn::backward
