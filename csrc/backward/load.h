// The loader: a warp that takes work, loads K, V, Q, dO and D by TMA, and reads LSE itself.
//
//   order of loads in a work tile:   K  dO0  Q0  V   dO1  Q1   dO2  Q2  ...
//   of a wide one:                   Q0  dO0  V  K   Q1  dO1   Q2  dO2  ...
//
// Q and dO have two stages each. A stage of dO is free half a step before that of Q. K is loaded into the buffer of the
// previous work tile's V, and so arrives before that tile has ended. V is loaded into the buffer of its K, once that is
// free. S needs only K and Q0, so it starts while V is being loaded.
//
// LSE is the caller's: natural logarithms, with the alignment of fp32. All lanes read it while they wait for a stage of
// Q, and write it in base 2 in the consumers' order. One lane does everything else.
#pragma once

#include "../device/fragment.h"
#include "../device/tma.h"
#include "params.h"
#include "plan.h"
#include "storage.h"
#include "work_ring.h"

namespace dash_attn::backward {

// Each KV tile of a head reads the query tiles once. Each work tile reads its K and V once, be it a split of the query
// heads or a part of a divided KV tile.
template <typename Variant>
class Loader {
 public:
  using Element = typename Variant::Element;
  using Shared = SharedStorage<Variant>;
  using Barrier = TransactionBarrier;

  __device__ Loader(Shared& shared, const KernelParams& params) : shared_(shared), params_(params) {}

  __device__ void run() {
    if constexpr (Variant::kDivided) {
      if (is_leader()) {
        shared_.others_until = 0;
        count_running_cta(params_);
      }
    }
    for (;; ring_ = ring_.next()) {
      if (is_leader()) { publish_work(shared_, params_, ring_); }
      __syncwarp();
      const WorkTile& work = shared_.work[ring_.slot()];
      if (work.kv_tile == kNoMoreWork) {
        // The conversion may start. The adds it waits for belong to work that has all been taken.
        ptx::launch_dependents();
        return;
      }
      if constexpr (!Variant::kWide) { shared_.v_empty.wait(tile().empty_parity()); }
      if (work.query_tiles.count > 0) {
        load_work_tile(work);
      } else {
        load_nothing();
      }
    }
  }

 private:
  using Swizzle = typename Variant::Swizzle;
  static constexpr int kLseOfLane = ceil_div(Variant::kQuery, 32);

  // The LSE of queries lane, lane + 32, ... of a tile.
  struct Lse {
    float of[kLseOfLane];
  };

  // Returns true in one lane, always the same. Called by the whole warp.
  static __device__ __forceinline__ bool is_leader() { return ptx::elect_one(); }

  // Each work tile has one K and one V.
  __device__ __forceinline__ RingIndex<1> tile() const { return {ring_.count}; }

  // A work tile without steps. Its barriers complete once all the same, because each work tile counts as one pass of
  // them.
  __device__ __forceinline__ void load_nothing() {
    if (!is_leader()) { return; }
    if constexpr (Variant::kWide) {
      shared_.v_empty.wait(tile().empty_parity());
      shared_.v_full.arrive();
      shared_.k_empty.wait(tile().empty_parity());
      shared_.k_full.arrive();
    } else {
      shared_.k_full.arrive();
      shared_.k_empty.wait(tile().empty_parity());
      shared_.v_full.arrive();
    }
  }

  // What the steps need of the work tile and the plan stays in shared memory, which saves registers.
  __device__ void load_work_tile(const WorkTile& work) {
    if constexpr (!Variant::kWide) {
      if (is_leader()) { load_keys(work, shared_.kv[ring_.count % 2]); }
    }
    bool v_pending = true;
    for (bool last = false; !last; plan_ = plan_.next()) {
      compiler_fence();
      const PlannedStep& step = wait_for_step(shared_, plan_);
      if constexpr (Variant::kWide) {
        load_q(step, work);
        load_dout(step, work);
      } else {
        load_dout(step, work);
        load_q(step, work);
      }
      last = step.is(PlannedStep::kIsLast);
      release_step(shared_, plan_);
      if (!v_pending) { continue; }
      if constexpr (Variant::kWide) {
        shared_.v_empty.wait(tile().empty_parity());
        if (is_leader()) { load_values(work, shared_.v); }
        shared_.k_empty.wait(tile().empty_parity());
        if (is_leader()) { load_keys(work, shared_.k); }
      } else {
        shared_.k_empty.wait(tile().empty_parity());
        if (is_leader()) { load_values(work, shared_.kv[1 - ring_.count % 2]); }
      }
      v_pending = false;
    }
  }

  __device__ __forceinline__ void load_keys(const WorkTile& work, Element* tile) {
    shared_.k_full.arrive_and_expect_tx(Variant::kKeyTileBytes);
    load_key_tile<Variant::kQkDim>(params_.k, shared_.k_full, tile, work);
  }

  __device__ __forceinline__ void load_values(const WorkTile& work, Element* tile) {
    shared_.v_full.arrive_and_expect_tx(Variant::kValueTileBytes);
    load_key_tile<Variant::kValueDim>(params_.v, shared_.v_full, tile, work);
  }

  template <int kColumns>
  __device__ __forceinline__ void load_key_tile(const CUtensorMap& map, Barrier& full, Element* tile,
                                                const WorkTile& work) {
    const RowOrigin rows = RowOrigin::of(params_.pack.is_pack(), work.k_outer, work.sequence.seqlen_k);
    load_tile<Swizzle, Variant::kKey, kColumns>(map, full, tile, rows, work.kv_tile * Variant::kKey, work.kv_head,
                                                kReadOnce);
  }

  template <int kColumns>
  __device__ __forceinline__ void load_query_tile(const CUtensorMap& map, Barrier& full, Element* tile,
                                                  const WorkTile& work, int query_tile, int head) {
    const RowOrigin rows = RowOrigin::of(params_.pack.is_pack(), work.q_outer, work.sequence.seqlen_q);
    load_tile<Swizzle, Variant::kQuery, kColumns>(map, full, tile, rows, query_tile * Variant::kQuery, head, kKeepInL2);
  }

  // Everything stored after a wait is read before it, because consumers wait for Q.
  __device__ __forceinline__ void load_q(const PlannedStep& step, const WorkTile& work) {
    const RingIndex<Variant::kStages> stage{plan_.count};
    const int slot = stage.slot();
    Barrier& full = shared_.q_full[slot];
    const int query_tile = step.query_tile, head = step.head();
    const Lse lse = read_lse(work, query_tile, head);
    float slope = 0.f;
    if constexpr (Variant::Score::kMayHaveSlopes && Variant::kWide) { slope = params_.score.slope(work.batch, head); }
    shared_.q_empty[slot].wait(stage.empty_parity());
    if (is_leader()) {
      if constexpr (Variant::Score::kMayHaveSlopes && Variant::kWide) { shared_.slope[slot] = slope; }
      if constexpr (Variant::Score::kDrops) { shared_.head[slot] = head; }
      load_query_tile<Variant::kQkDim>(params_.q, full, shared_.q[slot], work, query_tile, head);
      shared_.step[slot] = {query_tile, step.is(PlannedStep::kNeedsMasking)};
    }
    write_lse(lse, shared_.lse[slot]);
    if (is_leader()) {
      full.arrive_and_expect_tx(Variant::kQueryTileBytes);
    } else {
      full.arrive();
    }
  }

  __device__ __forceinline__ void load_dout(const PlannedStep& step, const WorkTile& work) {
    const RingIndex<Variant::kDoutStages> stage{plan_.count};
    const int slot = stage.slot();
    Barrier& full = shared_.dout_full[slot];
    const int query_tile = step.query_tile, head = step.head();
    shared_.dout_empty[slot].wait(stage.empty_parity());
    if (!is_leader()) { return; }
    // S, which waits for the Q that follows, needs the slope. Whoever has released dO has also read the slope.
    if constexpr (Variant::Score::kMayHaveSlopes && !Variant::kWide) {
      shared_.slope[slot] = params_.score.slope(work.batch, head);
    }
    if constexpr (Variant::kMayFinishDq) {
      shared_.dq_sum[RingIndex<Variant::kScaleSlots>{plan_.count}.slot()] =
          !step.is(PlannedStep::kFinishesDq) ? DqSum::kNotLast
          : step.rank == 0                   ? DqSum::kAlone
          : step.is(PlannedStep::kIsOddSum)  ? DqSum::kOddSum
                                             : DqSum::kEvenSum;
    }
    load_query_tile<Variant::kValueDim>(params_.dout, full, shared_.dout[slot], work, query_tile, head);
    const int64_t first_row = int64_t(step.dq_tile) * Variant::kQuery;
    copy_rows(params_.workspace.delta + first_row, full, shared_.delta[slot], Variant::kRowStatBytes);
    if constexpr (Variant::kOrderFree) {
      const int scale_slot = RingIndex<Variant::kScaleSlots>{plan_.count}.slot();
      shared_.scale_tile[scale_slot] = step.is(PlannedStep::kIsOrdered) ? kNoScale : step.dq_tile;
      copy_rows(params_.workspace.scales + first_row, full, shared_.scales[scale_slot], Variant::kScaleBytes);
    }
    full.arrive_and_expect_tx(Variant::kDoutTileBytes + Variant::kRowStatBytes + Variant::kScaleBytes);
  }

  __device__ __forceinline__ Lse read_lse(const WorkTile& work, int query_tile, int head) const {
    const int seqlen_q = work.sequence.seqlen_q;
    const int first = query_tile * Variant::kQuery + threadIdx.x % 32;
    const int64_t before = params_.pack.is_pack() ? work.q_outer - seqlen_q : work.q_outer * params_.lse_batch_stride;
    const float* const rows = params_.softmax_lse + (before + int64_t(head) * params_.lse_head_stride + first);
    Lse lse;
#pragma unroll
    for (int i = 0; i < kLseOfLane; ++i) { lse.of[i] = first + 32 * i < seqlen_q ? rows[32 * i] : INFINITY; }
    return lse;
  }

  // Writes LSE in base 2: +inf for rows that see no key and for rows past the end, so that their P is 0.
  static __device__ __forceinline__ void write_lse(const Lse& lse, float* tile) {
#pragma unroll
    for (int i = 0; i < kLseOfLane; ++i) {
      if (32 * (i + 1) > Variant::kQuery && threadIdx.x % 32 + 32 * i >= Variant::kQuery) { continue; }
      const float value = lse.of[i];
      tile[statistic_position(threadIdx.x % 32) + 32 * i] = value == -INFINITY ? INFINITY : value * float(M_LOG2E);
    }
  }

  template <typename T>
  static __device__ __forceinline__ void copy_rows(const T* rows, Barrier& full, T* tile, int bytes) {
    ptx::bulk_load(tile, rows, bytes, &full);
  }

  Shared& shared_;
  const KernelParams& params_;
  WorkRing<Variant> ring_;
  RingIndex<Variant::kPlanSlots> plan_;
};

}  // namespace dash_attn::backward
