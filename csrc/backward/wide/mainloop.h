// The consumers if no warpgroup has registers for the dK and dV of 64 keys: one owns all of dV and the other all of dK.
// For every query tile,
//
//   value consumer:  S = score(Q K^T)     P = exp2(scale S - LSE)     dV^T += dO^T P
//   key consumer:    dP = dO V^T     dS = P * (dP - D)     dQ = dS K     dK^T += Q^T dS
//
// Queries are the rows of S and dP. P and dS pass through shared memory, transposed. There the products read them, and
// the key consumer reads P; with dropout the kept part of P then replaces P. The key consumer computes dQ 64 columns at
// a time, alternating with as many columns of dK (a bar is a wait for products):
//
//   value consumer   tensor cores:  dV(j)  S(j+1) |
//                    threads:                     | P(j+1) -> shared memory
//   key consumer     tensor cores:  dQ(j)0 | dK(j)0  dQ(j)1 | dK(j)1 ... dP(j+1) |
//                    threads:              | dQ(j)0 -> adder | dQ(j)1 -> adder ...  | dS(j+1) -> shared memory
//
// The value consumer is up to one step ahead. While one consumer's threads compute, the other's products run.
#pragma once

#include "../../device/hidden_keys.h"
#include "../../device/warp_roles.h"
#include "../columns.h"
#include "../dq_layout.h"
#include "../work_ring.h"
#include "epilogue.h"
#include "score_tile.h"
#include "storage.h"

namespace dash_attn::backward::wide {

template <typename Variant>
class Consumer {
 public:
  using Element = typename Variant::Element;
  using Score = typename Variant::Score;
  using Shared = SharedStorage<Variant>;

  __device__ Consumer(Shared& shared, const KernelParams& params)
      : shared_(shared), params_(params), descriptor_of_(&shared), thread_(threadIdx.x % kWarpgroupThreads) {}

  // kOwnsDv says which of the two consumers this is.
  template <bool kOwnsDv>
  __device__ void run() {
    for (; wait_for_work_together(shared_, ring_); ring_ = ring_.next()) {
      if constexpr (kOwnsDv) {
        sum_values();
      } else {
        sum_keys();
      }
      arrive_together(shared_.work_empty[ring_.slot()]);
    }
  }

 private:
  static_assert(Variant::kClusterSize == 1, "a work tile that a cluster sits out");
  using Swizzle = typename Variant::Swizzle;
  using QueryRows = KMajor<Swizzle, Variant::kQuery>;      // Q or dO as A of S, dP
  using KeyRows = KMajor<Swizzle, Variant::kKey>;          // K or V as B of S, dP; P^T or dS^T as B of dV^T, dK^T
  using QueryColumns = MnMajor<Swizzle, Variant::kQuery>;  // Q or dO as A of dK^T, dV^T
  using KeyColumns = MnMajor<Swizzle, Variant::kKey>;      // K as B of dQ

  using Scores = float[Variant::kKey / 2];
  using RoundedScores = RegisterSlice[Variant::kKey / kProductDepth];
  using Bits = dropout::BitsOf<Score::kDrops, dropout::FragmentRows::kQueries, Variant::kKey>;

  using QueryStage = RingIndex<Variant::kStages>;
  using DoutStage = RingIndex<Variant::kDoutStages>;
  using Once = RingIndex<1>;
  using Dv = Gradient<Variant, Variant::kValueDim>;
  using Dk = Gradient<Variant, Variant::kQkDim>;
  using Layout = DqLayout<Variant>;
  using DqSlot = RingIndex<Variant::kDqSlots>;
  static constexpr int kValueBarrier = 1, kKeyBarrier = 2;  // numbered, of a consumer's threads

  // Each work tile has one K and one V.
  __device__ __forceinline__ Once tile() const { return {ring_.count}; }
  __device__ __forceinline__ const WorkTile& work() const { return shared_.work[ring_.slot()]; }
  __device__ __forceinline__ QueryStage query_stage() const { return {step_}; }
  __device__ __forceinline__ DoutStage dout_stage() const { return {step_}; }

  // Called for work tiles without steps too: a parity distinguishes a pass from the next one, but not from the one
  // after that.
  __device__ __forceinline__ void wait_for_keys() const { shared_.k_full.wait(tile().parity()); }
  __device__ __forceinline__ void wait_for_q() const {
    shared_.q_full[query_stage().slot()].wait(query_stage().parity());
  }
  __device__ __forceinline__ void wait_for_dout() const {
    shared_.dout_full[dout_stage().slot()].wait(dout_stage().parity());
  }
  __device__ __forceinline__ void wait_for_p() const { shared_.p_full.wait(Once{step_}.parity()); }

  // The bits of the step. Called long before they are used, because they come from global memory.
  __device__ __forceinline__ Bits find_bits() const {
    if constexpr (Score::kDrops) {
      const uint32_t slot = query_stage().slot();
      return Bits(params_.dropout, params_.dropout.of_head(work().batch, shared_.head[slot]),
                  shared_.step[slot].query_tile * Variant::kQuery, work().kv_tile * Variant::kKey, thread_);
    } else {
      return {};
    }
  }

  // Has all addresses computed again: there are no registers to keep them throughout a step.
  __device__ __forceinline__ void recompute_addresses() {
    opaque(thread_);
    opaque(step_);
    descriptor_of_.opaque();
  }

  // The consumer that owns dV.

  __device__ __forceinline__ void sum_values() {
    Dv dv;
    Scores s;
    begin_sum<Variant>(params_, work(), dv, false);
    const int steps = work().steps();
    wait_for_keys();
    if (steps > 0) {
      issue_s(s);
      Bits bits = find_bits();
      wait_products<0>();
      fence_operand(s);
      RoundedScores p;
      make_p(s, p, bits);
      for (int steps_left = steps - 1; steps_left > 0; --steps_left) {
        recompute_addresses();
        write_kept(p);
        issue_dv(dv);
        ++step_;
        issue_s(s);
        bits = find_bits();
        wait_products<0>();
        dv.fence_operand();
        fence_operand(s);
        release_dv_operands(step_ - 1);
        make_p(s, p, bits);
      }
      write_kept(p);
      issue_dv(dv);
      wait_products<0>();
      dv.fence_operand();
      release_dv_operands(step_);
      ++step_;
    }
    store_dv(dv);
  }

  __device__ __forceinline__ void issue_s(Scores& s) {
    wait_for_q();
    discard_contents(s);
    wgmma_async<Element, Variant::kQkDim>(s, QueryRows(descriptor_of_(shared_.q[query_stage().slot()])),
                                          KeyRows(descriptor_of_(shared_.k)));
  }

  // Starts dV, once all warps have written P of the step.
  __device__ __forceinline__ void issue_dv(Dv& dv) {
    if constexpr (Score::kDrops) {
      shared_.kept_full.wait(Once{step_}.parity());
    } else {
      wait_for_p();
    }
    wait_for_dout();
#pragma unroll
    for (int b = 0; b < Dv::kBlocks; ++b) {
      wgmma_async_add<Element, Variant::kQuery>(dv.block[b],
                                                QueryColumns(descriptor_of_(shared_.dout[dout_stage().slot()]), b),
                                                KeyRows(descriptor_of_(shared_.p)));
    }
  }

  __device__ __forceinline__ void release_dv_operands(uint32_t step) const {
    shared_.dout_empty[DoutStage{step}.slot()].arrive();
    arrive_once(shared_.p_empty);
  }

  // Turns S into P, rounded, in shared memory. `p` keeps what dropout leaves of it.
  __device__ __forceinline__ void make_p(Scores& s, RoundedScores& p, const Bits& bits) {
    const uint32_t slot = query_stage().slot();
    const StepTile tile = shared_.step[slot];
    const int first_query = tile.query_tile * Variant::kQuery, first_key = work().kv_tile * Variant::kKey;
    Score::apply(s, [&] { return bias_of(first_query, first_key, slot); }, params_.score);
    if (tile.needs_masking) {
      const Mask mask = Variant::grid(work().sequence, params_.window).mask;
      apply_mask(s, mask, first_query, first_key, thread_);
      if constexpr (Variant::kHasColumns) {
        const HiddenQueries* const keys = hidden_keys_of(params_, work(), first_key);
        hide_keys(s, hidden_of_warp<Variant::kKey>(first_query, keys, thread_), thread_);
      }
    }
    probabilities(s, statistics_of(shared_.lse[slot], thread_), params_.score.scale_log2);
    shared_.q_empty[slot].arrive();
    pack_slices<Element>(p, s);
    shared_.p_empty.wait(Once{step_}.empty_parity());
    store_transposed<Swizzle, Variant::kKey>(shared_.p, p, thread_ / 32, thread_ % 32);
    fence_and_arrive(shared_.p_full);
    if constexpr (Score::kDrops) { bits.template drop<Element>(p); }
  }

  __device__ __forceinline__ StepBias bias_of(int first_query, int first_key, uint32_t slot) const {
    const Sequence& sequence = work().sequence;
    const int own_key = first_query + fragment_row(thread_, 0) + sequence.seqlen_k - sequence.seqlen_q;
    const int distance = first_key + fragment_column(thread_, 0) - own_key;
    return {shared_.slope[slot], float(distance)};
  }

  // Replaces P by what dropout keeps of it, once the other consumer has read P.
  __device__ __forceinline__ void write_kept(const RoundedScores& kept) {
    if constexpr (Score::kDrops) {
      shared_.p_read.wait(Once{step_}.parity());
      store_transposed<Swizzle, Variant::kKey>(shared_.p, kept, thread_ / 32, thread_ % 32);
      fence_and_arrive(shared_.kept_full);
    }
  }

  // Stores dV, which is staged in place of V. The key consumer has read P of the last step, so dP no longer needs V.
  __device__ __forceinline__ void store_dv(Dv& dv) {
    const WorkTile& work = this->work();
    shared_.v_full.wait(tile().parity());
    opaque(ring_.count);  // The parity equals the slot's number, and there is no register to keep it for both.
    shared_.p_empty.wait(Once{step_}.empty_parity());
    if (is_complete<Variant>(params_, work, dv, false)) {
      if constexpr (Score::kDrops) { dv.scale(params_.dropout.scale); }
      store_gradient<Variant>(params_.dv, shared_.v, params_, work, dv, kValueBarrier);
    }
    if (thread_ == 0) { shared_.v_empty.arrive(); }
  }

  // The consumer that owns dK.

  struct KeyRegisters {
    Dk dk;
    Scores dp;
    Bits bits;
    float dq[Layout::kRegisters];  // of 64 columns
  };

  __device__ __forceinline__ void sum_keys() {
    KeyRegisters r;
    begin_sum<Variant>(params_, work(), r.dk, true);
    const int steps = work().steps();
    wait_for_keys();
    if (steps > 0) {
      // Skipped in work tiles without steps, for whose V nobody waits for this consumer. The loader loads V before K.
      shared_.v_full.wait(tile().parity());
      issue_dp(r);
      wait_products<0>();
      fence_operand(r.dp);
      make_ds(r);
      for (int steps_left = steps - 1; steps_left > 0; --steps_left) {
        multiply_ds<true>(r);
        make_ds(r);
      }
      multiply_ds<false>(r);
    }
    store_dk(r.dk);
  }

  // dO arrives after Q, and with Q arrives what identifies the step's bits.
  __device__ __forceinline__ void issue_dp(KeyRegisters& r) {
    wait_for_dout();
    r.bits = find_bits();
    discard_contents(r.dp);
    wgmma_async<Element, Variant::kValueDim>(r.dp, QueryRows(descriptor_of_(shared_.dout[dout_stage().slot()])),
                                             KeyRows(descriptor_of_(shared_.v)));
  }

  // Turns dP and P into dS, rounded, in shared memory.
  __device__ __forceinline__ void make_ds(KeyRegisters& r) {
    recompute_addresses();
    const uint32_t slot = dout_stage().slot();
    wait_for_p();
    const uint32_t p = transposed_address<Swizzle, Variant::kKey>(shared_.p, thread_ / 32, thread_ % 32);
    const RowPair delta = statistics_of(shared_.delta[slot], thread_);
    RowPair lse{};
    if constexpr (Score::kChangesLogits) { lse = statistics_of(shared_.lse[query_stage().slot()], thread_); }
    RoundedScores ds;
#pragma unroll
    for (int k = 0; k < Variant::kKey / kProductDepth; ++k) {
      ptx::load_matrix_transposed(p + k * 2 * Swizzle::kAtomBytes, ds[k]);
      score_gradient<Element, Score>(ds[k], r.dp, k, delta, lse, params_.score, r.bits);
    }
    if constexpr (Score::kDrops) { shared_.p_read.arrive(); }
    shared_.p_empty.arrive();
    shared_.dout_empty[slot].arrive();
    sync_warpgroup(kKeyBarrier);  // dK of the step before has completed for all warps
    store_transposed<Swizzle, Variant::kKey>(shared_.ds, ds, thread_ / 32, thread_ % 32);
    ptx::fence_async_shared();
    sync_warpgroup(kKeyBarrier);
  }

  // Computes dQ and dK of the step, and dP of the next one.
  template <bool kHasNext>
  __device__ __forceinline__ void multiply_ds(KeyRegisters& r) {
    recompute_addresses();
    issue_dq(r, 0);
    wait_for_q();
    issue_dk(r, 0);
#pragma unroll
    for (int b = 0; b < Dk::kBlocks; ++b) {
      const DqSlot first{step_ * Variant::kDqPieces + b * Variant::kDqPiecesOfBlock};
      wait_for_staging(first);
      wait_products<1>();  // dQ of the block
      fence_operand(r.dq);
      recompute_addresses();
      stage_dq(r.dq, first);
      if (b + 1 < Dk::kBlocks) {
        issue_dq(r, b + 1);
        issue_dk(r, b + 1);
      } else if constexpr (kHasNext) {
        ++step_;
        issue_dp(r);
      }
      announce(first);
    }
    wait_products<0>();
    r.dk.fence_operand();
    if constexpr (kHasNext) {
      fence_operand(r.dp);
    } else {
      ++step_;
    }
    shared_.q_empty[QueryStage{step_ - 1}.slot()].arrive();
  }

  __device__ __forceinline__ void issue_dq(KeyRegisters& r, int block) {
    discard_contents(r.dq);
    wgmma_async<Element, Variant::kKey>(r.dq, KeyColumns(descriptor_of_(shared_.ds)),
                                        KeyColumns(descriptor_of_(shared_.k), block));
  }

  __device__ __forceinline__ void issue_dk(KeyRegisters& r, int block) {
    wgmma_async_add<Element, Variant::kQuery>(r.dk.block[block],
                                              QueryColumns(descriptor_of_(shared_.q[query_stage().slot()]), block),
                                              KeyRows(descriptor_of_(shared_.ds)));
  }

  __device__ __forceinline__ void wait_for_staging(DqSlot slot) const {
#pragma unroll
    for (int piece = 0; piece < Variant::kDqPiecesOfBlock; ++piece, slot = slot.next()) {
      shared_.dq_empty[slot.slot()].wait(slot.empty_parity());
    }
  }

  __device__ __forceinline__ void stage_dq(const float (&dq)[Layout::kRegisters], DqSlot slot) {
    constexpr int kQuads = Layout::kQuads / Variant::kDqPiecesOfBlock;
    float4* const buffers[] = {reinterpret_cast<float4*>(shared_.dq[slot.slot()]),
                               reinterpret_cast<float4*>(shared_.dq[slot.next().slot()])};
    static_assert(Variant::kDqPiecesOfBlock == 2);
#pragma unroll
    for (int quad = 0; quad < Layout::kQuads; ++quad) {
      const float* const x = dq + 4 * quad;
      buffers[quad / kQuads][Layout::quad_index(0, quad % kQuads, thread_)] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  // Lets the adders add what has been staged.
  __device__ __forceinline__ void announce(DqSlot slot) const {
    ptx::fence_async_shared();
    __syncwarp();
#pragma unroll
    for (int piece = 0; piece < Variant::kDqPiecesOfBlock; ++piece, slot = slot.next()) {
      arrive_once(shared_.dq_full[slot.slot()]);
    }
  }

  // Stores dK, which is staged in place of K. S of all steps has become P, which this consumer has read, and its own dQ
  // is complete.
  __device__ __forceinline__ void store_dk(Dk& dk) {
    const WorkTile& work = this->work();
    sync_warpgroup(kKeyBarrier);
    if (is_complete<Variant>(params_, work, dk, true)) {
      dk.scale(params_.scale_of_sums);
      store_gradient<Variant>(params_.dk, shared_.k, params_, work, dk, kKeyBarrier);
    }
    if (thread_ == 0) { shared_.k_empty.arrive(); }
  }

  Shared& shared_;
  const KernelParams& params_;
  TileDescriptors<Swizzle> descriptor_of_;
  int thread_;
  WorkRing<Variant> ring_;
  uint32_t step_ = 0;  // over all work tiles
};

}  // namespace dash_attn::backward::wide
