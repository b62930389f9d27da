// The adders: each one thread that adds dQ partials, or parts of them, to global memory, when those of lower rank are
// in the sum. The only place that waits for them.
//
// A part of a partial of rank r at a query tile may be added when its semaphore there == r, that is when that of
// partial r - 1 has been PERFORMED at gpu scope, not merely issued. The chain that makes this so, from CTA to CTA:
//   bulk add -> wait_group 0 (performed, and visible to this thread) -> st.release semaphore = r + 1
//   -> ld.acquire semaphore -> fence.proxy.async (the next bulk add is an access of the async proxy)
// Rank 0 stores instead of adding, so the accumulator is never cleared, unless the call goes on with another's sums.
// Partials that are added in no order wait for rank 0 alone, and are counted, for the conversion.
#pragma once

#include "params.h"
#include "plan.h"
#include "storage.h"

namespace dash_attn::backward {

template <typename Variant>
class Adder {
 public:
  using Shared = SharedStorage<Variant>;

  __device__ Adder(Shared& shared, const KernelParams& params, int adder)
      : shared_(shared), params_(params), adder_(adder) {}

  // Partials in one part are the adders' in turn.
  __device__ void run() {
    if constexpr (Variant::kDqParts == 1) {
      add_steps<0>(adder_, kAdderWarps);
    } else if (adder_ == 0) {
      add_steps<0>(0, 1);
    } else {
      add_steps<1>(0, 1);
    }
  }

 private:
  template <int kPart>
  __device__ __forceinline__ void add_steps(uint32_t first, int stride) {
    for (RingIndex<Variant::kPlanSlots> plan{first};; plan.count += stride) {
      const PlannedStep step = wait_for_step(shared_, plan);
      release_step(shared_, plan);
      if (step.dq_tile == kNoMoreTiles) { return; }
      add_part<kPart>(step, plan.count, continues(step.query_tile));
    }
  }

  // The pieces of a part are staged one after the other. A piece's buffer is free when the next one of its block has
  // been issued too; the next block may wait for all of this one's.
  template <int kPart>
  __device__ __forceinline__ void add_part(const PlannedStep& step, uint32_t number, bool continues) {
    using Slot = RingIndex<Variant::dq_slots(kPart)>;
    constexpr int kPieces = Variant::dq_pieces(kPart);
    constexpr int kFirstFloat = kPart == 0 ? 0 : Variant::dq_pieces(0) * Variant::kDqPieceFloats;
    constexpr int kFirstSlot = kPart == 0 ? 0 : Variant::dq_slots(0);
    constexpr int kBytes = Variant::kDqPieceFloats * sizeof(float);
    float* const accumulator =
        params_.workspace.dq_accumulator + int64_t(step.dq_tile) * Variant::kDqTileFloats + kFirstFloat;
    int* const semaphore = params_.workspace.dq_semaphores + int64_t(step.dq_tile) * Variant::kDqParts + kPart;
    const int rank = step.rank;
    const bool is_ordered = step.is_ordered(), stores = rank == 0 && !continues;
    // A wide partial is staged throughout its step, so its turn is looked for beforehand; a narrow one's only when it
    // is staged, because a longer look was measured to cost more than it gains.
    if (Variant::kWide && !stores) { wait_for_turn(semaphore, rank, is_ordered); }
    Slot buffer{number * kPieces};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float* const sum = accumulator + piece * Variant::kDqPieceFloats;
      const float* const partial = shared_.dq[kFirstSlot + buffer.slot()];
      shared_.dq_full[kFirstSlot + buffer.slot()].wait(buffer.parity());
      if (stores) {
        ptx::bulk_store(sum, partial, kBytes);
      } else {
        if constexpr (!Variant::kWide) { wait_for_turn(semaphore, rank, is_ordered); }
        add(sum, partial, kBytes, is_ordered);
      }
      ptx::bulk_commit();
      if (piece % Variant::kDqPiecesOfBlock > 0) {
        ptx::bulk_wait_read<1>();
        shared_.dq_empty[kFirstSlot + buffer.previous().slot()].arrive();
      }
      if ((piece + 1) % Variant::kDqPiecesOfBlock == 0) {
        ptx::bulk_wait_read();
        shared_.dq_empty[kFirstSlot + buffer.slot()].arrive();
      }
      if (piece + 1 < kPieces) { buffer = buffer.next(); }
    }
    ptx::bulk_wait_performed();
    if (is_ordered) {
      ptx::store_release(semaphore, rank + 1);
    } else {
      ptx::add_release(semaphore, 1);
    }
  }

  // Whether rank 0 adds to what the calls before have left.
  __device__ __forceinline__ bool continues(int query_tile) const {
    if constexpr (Variant::kCarries) { return params_.carried.dq_continues.contains(query_tile); }
    return false;
  }

  // Until all partials of lower rank are in the sum, or, in no order, that of rank 0, which the others are added to.
  static __device__ __forceinline__ void wait_for_turn(const int* semaphore, int rank, bool is_ordered) {
    for (int added = ptx::load_acquire(semaphore); is_ordered ? added != rank : added == 0;) {
      added = ptx::load_acquire(semaphore);
    }
    ptx::fence_async_global();
  }

  static __device__ __forceinline__ void add(float* accumulator, const float* partial, int bytes, bool is_ordered) {
    if (Variant::kOrderFree && !is_ordered) {
      ptx::bulk_add_s32(accumulator, partial, bytes);
    } else {
      ptx::bulk_add_f32(accumulator, partial, bytes);
    }
  }

  Shared& shared_;
  const KernelParams& params_;
  const int adder_;
};

}  // namespace dash_attn::backward
