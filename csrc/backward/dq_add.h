// The adders: one thread each, which adds every other part of the dQ partials to global memory once those of lower rank
// are in the sum. This is the only place that waits for them.
//
// A part of a partial of rank r at a query tile may be added when its semaphore there is r, which means that the part
// of partial r - 1 has been PERFORMED at gpu scope, not merely issued. The chain from CTA to CTA is
//   bulk add -> wait_group 0 (performed, and visible to this thread) -> st.release semaphore = r + 1
//   -> ld.acquire semaphore -> fence.proxy.async (the next bulk add is an access of the async proxy)
// Rank 0 stores instead of adding, so the accumulator is never cleared, unless the call continues another call's sums.
// Partials that are added in no order wait for rank 0 alone. They are counted for whoever makes dQ of the sum: the last
// rank (finish_dq.h), which loads the sum instead of adding to it, or the conversion.
#pragma once

#include "../placement/sequences.h"
#include "finish_dq.h"
#include "params.h"
#include "plan.h"
#include "storage.h"

namespace dash_attn::backward {

template <typename Variant>
class Adder {
 public:
  using Shared = SharedStorage<Variant>;

  __device__ Adder(Shared& shared, const KernelParams& params, int adder)
      : shared_(shared), params_(params), part_(adder) {}

  __device__ void run() {
    for (;; part_ += kAdderWarps) {
      const RingIndex<Variant::kPlanSlots> plan{part_ / Variant::kDqParts};
      const int part = part_ % Variant::kDqParts;
      const PlannedStep step = wait_for_step(shared_, plan);
      if constexpr (Variant::kMayFinishDq) {
        if (step.dq_tile != kNoMoreTiles && step.is(PlannedStep::kFinishesDq)) {
          release_step(shared_, plan);
          finish_dq(step);
          continue;
        }
      }
      if (part + kAdderWarps >= Variant::kDqParts) { release_step(shared_, plan); }
      if (step.dq_tile == kNoMoreTiles) { return; }
      add_part(int64_t(step.dq_tile) * Variant::kDqParts + part, step, continues(step.query_tile));
    }
  }

 private:
  // For the last rank: loads the sum to where the consumers will make dQ of it, and stores that dQ.
  __device__ __forceinline__ void finish_dq(const PlannedStep& step) {
    constexpr int kFloats = Variant::kDqTileFloats, kBytes = kFloats * sizeof(float);
    static_assert(Variant::kDqParts == 1 && Variant::kDqPiecesOfPart == 1);
    const RingIndex<Variant::kDqSlots> buffer{part_};
    auto& sum_full = shared_.sum_full[buffer.slot()];
    float* const sum = params_.workspace.dq_accumulator + int64_t(step.dq_tile) * kFloats;
    float* const staged = shared_.dq[buffer.slot()];
    if (step.rank > 0) {
      // dV of the previous work tile is stored from that buffer. Consumers wait for it before their first dS.
      if (!Variant::kStageInDs && step.is(PlannedStep::kIsFirst)) {
        shared_.ds_full[buffer.slot()].wait(buffer.parity());
      }
      wait_for_turn(params_.workspace.dq_semaphores + step.dq_tile, step.rank, true);
      ptx::bulk_load(staged, sum, kBytes, &sum_full);
      if constexpr (Variant::kOrderFree) {
        shared_.others[buffer.slot()] = {uint16_t(step.rank), __ldcg(params_.workspace.any_marks) != 0};
      }
      sum_full.arrive_and_expect_tx(kBytes);
    }
    const RowOrigin rows = rows_of(step.dq_tile);
    shared_.dq_full[buffer.slot()].wait(buffer.parity());
#pragma unroll
    for (int consumer = 0; consumer < Variant::kConsumers; ++consumer) {
      const int row = Variant::kSplitDqByHeadDim ? 0 : consumer * Variant::kDqQueries;
      ptx::store_box(params_.dq, rows_in_dq_buffer<Variant>(staged, consumer),
                     {consumer * Variant::kDqColumnStep, step.head(),
                      rows.first + step.query_tile * Variant::kQuery + row, rows.outer, rows.wrap});
    }
    ptx::bulk_commit();
    // The sum has been read and need not be written back from L2.
    for (int i = 0; i < (step.rank > 0 ? kBytes : 0); i += ptx::kDiscardedBytes) {
      ptx::discard_l2(reinterpret_cast<char*>(sum) + i);
    }
    ptx::bulk_wait_read();
    shared_.dq_empty[buffer.slot()].arrive();
  }

  // The position of a query tile's rows.
  __device__ __forceinline__ RowOrigin rows_of(int dq_tile) const {
    const bool is_pack = params_.pack.is_pack();
    TileOwner owner;  // a planned step's tile always has one
    find_owner<Variant::kQuery>(params_.sequences(), dq_tile, owner);
    const int seqlen = owner.lengths.seqlen_q;
    return RowOrigin::of(is_pack, is_pack ? owner.first_row + seqlen : owner.batch, seqlen);
  }

  // The pieces of a part are staged one after the other, in buffers that both adders use. A piece's buffer is released
  // when the next piece has been added. An adder looks at no buffer before the other has seen all pieces of the
  // previous part: a barrier's parity distinguishes a pass from the next one, but not from the one after that.
  __device__ __forceinline__ void add_part(int64_t part, const PlannedStep& step, bool continues) {
    using Slot = RingIndex<Variant::kDqSlots>;
    constexpr int kPieces = Variant::kDqPiecesOfPart;
    constexpr int kPieceFloats = Variant::kDqTileFloats / (Variant::kDqParts * kPieces);
    constexpr int kBytes = kPieceFloats * sizeof(float);
    static_assert(kBytes % (kShares * 16) == 0);
    float* const accumulator = params_.workspace.dq_accumulator + part * kPieces * kPieceFloats;
    int* const semaphore = params_.workspace.dq_semaphores + part;
    const int rank = step.rank;
    const bool is_ordered = step.is(PlannedStep::kIsOrdered), stores = rank == 0 && !continues;
    // A wide partial is staged throughout its step, so its turn is awaited beforehand. A narrow one waits only after it
    // has been staged, because polling longer was measured to cost more than it gains.
    if (Variant::kWide && !stores) { wait_for_turn(semaphore, rank, is_ordered); }
    Slot buffer{part_ * kPieces};
    if constexpr (Variant::kWide) {
      const RingIndex<kAdderWarps> before = RingIndex<kAdderWarps>{part_}.previous();
      if (part_ > 0) { shared_.dq_seen[before.slot()].wait(before.parity()); }
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float* const sum = accumulator + piece * kPieceFloats;
      const float* const partial = shared_.dq[buffer.slot()];
      shared_.dq_full[buffer.slot()].wait(buffer.parity());
      if (stores) {
        ptx::bulk_store(sum, partial, kBytes);
      } else {
        if constexpr (!Variant::kWide) { wait_for_turn(semaphore, rank, is_ordered); }
        if (Variant::kOrderFree && !is_ordered) {
          add_in_shares<kPieceFloats / kShares>(sum, partial, rank);
        } else {
          ptx::bulk_add_f32(sum, partial, kBytes);
        }
      }
      ptx::bulk_commit();
      if constexpr (Variant::kWide) {
        if (piece + 1 == kPieces) { shared_.dq_seen[part_ % kAdderWarps].arrive(); }
      }
      if (piece > 0) {
        ptx::bulk_wait_read<1>();
        shared_.dq_empty[buffer.previous().slot()].arrive();
      }
      if (piece + 1 < kPieces) { buffer = buffer.next(); }
    }
    ptx::bulk_wait_read();
    shared_.dq_empty[buffer.slot()].arrive();
    ptx::bulk_wait_performed();
    if (is_ordered) {
      ptx::store_release(semaphore, rank + 1);
    } else {
      ptx::add_release(semaphore, 1);
    }
  }

  // Whether rank 0 adds to the sum of earlier calls.
  __device__ __forceinline__ bool continues(int query_tile) const {
    if constexpr (Variant::kMayCarry) { return params_.carried.dq_continues.contains(query_tile); }
    return false;
  }

  // Waits until all partials of lower rank are in the sum. Without an order it waits for rank 0 alone, to whose partial
  // the others are added.
  static __device__ __forceinline__ void wait_for_turn(const int* semaphore, int rank, bool is_ordered) {
    for (int added = ptx::load_acquire(semaphore); is_ordered ? added != rank : added == 0;) {
      added = ptx::load_acquire(semaphore);
    }
    ptx::fence_async_global();
  }

  // Adds a partial in no order. CTAs of one head often reach a query tile together, so each begins at another share of
  // it, by its rank.
  static constexpr int kShares = 16;
  template <int kFloats>
  static __device__ __forceinline__ void add_in_shares(float* sum, const float* partial, int rank) {
#pragma unroll 1
    for (int i = 0; i < kShares; ++i) {
      const int first = (i + rank) % kShares * kFloats;
      ptx::bulk_add_s32(sum + first, partial + first, kFloats * sizeof(float));
    }
  }

  Shared& shared_;
  const KernelParams& params_;
  uint32_t part_;  // over all steps
};

}  // namespace dash_attn::backward
