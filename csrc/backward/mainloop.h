// The consumers. Each warpgroup owns 64 keys and computes, for every query tile,
//
//   S^T = score(K Q^T)     P^T = exp2(scale S^T - LSE)     dP^T = V dO^T     dS^T = P^T * (dP^T - D)
//   dV += P^T dO    dK += dS^T Q                    dQ = dS K         (over the keys of both consumers)
//
// Dropout zeroes elements of dP, and of the copy of P that dV takes. P itself is kept beside that copy for dS.
//
// Products run in the order in which they are issued, while the threads compute. From step j to step j + 1 (a bar is a
// wait for products):
//
//   tensor cores:  S(j+1) | dK(j)  | dQ(j) | dV(j+1)          dP(j+1) |
//   threads:              | P(j+1) |       | dQ(j) -> adder           | dS(j+1) -> shared memory
//
// dQ(j) waits for the other consumer's dS(j), which has time until S(j+1) and dK(j) have run. A thread holds dK and dV
// (128 registers at head_dim 128), its rows of V (32), and two fragments that are reused in turn: one in fp32 for S and
// P, dQ, dP (32), and a rounded one for P and dS (16).
#pragma once

#include <type_traits>

#include "../device/fragment.h"
#include "../device/hidden_keys.h"
#include "../device/warp_roles.h"
#include "carried_sums.h"
#include "columns.h"
#include "dq_layout.h"
#include "epilogue.h"
#include "finish_dq.h"
#include "order_free/rounding.h"
#include "params.h"
#include "score_tile.h"
#include "storage.h"
#include "work_ring.h"

namespace dash_attn::backward {

template <typename Variant>
class Consumer {
 public:
  using Element = typename Variant::Element;
  using Score = typename Variant::Score;
  using Shared = SharedStorage<Variant>;

  __device__ Consumer(Shared& shared, const KernelParams& params)
      : shared_(shared),
        params_(params),
        descriptor_of_(&shared),
        consumer_(warpgroup_index() - 1),
        thread_(threadIdx.x % kWarpgroupThreads) {}

  __device__ void run() {
    for (; wait_for_work_together(shared_, ring_); ring_ = ring_.next()) {
      process(work().steps());
      arrive_together(shared_.work_empty[ring_.slot()]);
    }
    if (thread_ == 0) { ptx::bulk_wait_read(); }  // before shared memory goes
  }

 private:
  using Swizzle = typename Variant::Swizzle;
  using KeyRows = KMajor<Swizzle, Variant::kKey>;      // K or V as A of S^T, dP^T
  using QueryRows = KMajor<Swizzle, Variant::kQuery>;  // Q or dO as B of S^T, dP^T; dS as A of dQ, or B of dQ^T
  using QuerySum = MnMajor<Swizzle, Variant::kQuery>;  // dO, Q as B of dV, dK
  using KeySum = MnMajor<Swizzle, Variant::kKey>;      // K as B of dQ, or A of dQ^T
  using Layout = DqLayout<Variant>;
  using Step = RingIndex<Variant::kStages>;
  template <int kSlot>
  struct StepInSlot : Step {
    static __device__ __forceinline__ constexpr uint32_t slot() { return kSlot; }
  };
  static_assert(Variant::kStages == 2);

  static constexpr int kScoreRegisters = Variant::kQuery / 2;  // a 64 x kQuery fragment
  static constexpr int kDsBlock = Variant::kQuery * kWarpgroupRows;

  using Scores = float[kScoreRegisters];
  using RoundedScores = RegisterSlice[kScoreRegisters / 8];
  using Gradient = typename Epilogue<Variant>::Gradient;
  using DqPartial = float[Layout::kRegisters];
  using Bits = dropout::BitsOf<Score::kDrops, dropout::FragmentRows::kKeys, Variant::kQuery>;
  // Whether a thread keeps the place of its keys' bits of dropout.
  static constexpr bool kKeepsKeysOfBits = Score::kDrops && Variant::kQuery % dropout::kBlockRows == 0;
  using KeysOfBits = typename dropout::FragmentBits<dropout::FragmentRows::kKeys, Variant::kQuery>::Keys;

  static constexpr int kHeldSlicesOfV = Variant::kHeldColumnsOfV / kProductDepth;

  struct Registers {
    Gradient dk, dv;
    Scores scores;          // S and P; dP
    RoundedScores rounded;  // P; dS
    Bits bits;
    std::conditional_t<kKeepsKeysOfBits, KeysOfBits, Empty> keys_of_bits;
    std::conditional_t<Score::kDrops, RoundedScores, Empty> own_kept;
    // P as dV takes it, after dropout.
    __device__ __forceinline__ RoundedScores& kept() {
      if constexpr (Score::kDrops) {
        return own_kept;
      } else {
        return rounded;
      }
    }
    RegisterSlice v[max_int(1, kHeldSlicesOfV)];

    // If dQ's partial is as large as S it uses the same registers: S has become P, and dP has not been issued. ptxas
    // does not find that by itself, and sharing half of them confuses it.
    static constexpr bool kShareDq = Layout::kRegisters == kScoreRegisters;
    float own_dq[kShareDq ? 1 : Layout::kRegisters];
    __device__ __forceinline__ DqPartial& dq() {
      if constexpr (kShareDq) {
        return scores;
      } else {
        return own_dq;
      }
    }
  };

  // Rounding a partial to integers takes time, which dP fills if there are registers for both.
  static constexpr bool kDpFirst = Variant::kOrderFree && !Registers::kShareDq;

  __device__ __forceinline__ void process(int steps) {
    Registers r;
    clear(r.dk);
    clear(r.dv);
    if constexpr (Variant::kMayCarry) {
      begin_carried_sum(params_, first_float(false), consumer_, r.dv);
      begin_carried_sum(params_, first_float(true), consumer_, r.dk);
    }
    if constexpr (Variant::kDivided) {
      if (work().visits == Visits::kSecond) {
        hand_over_first_part<Variant, Visits::kSecond>(params_, work(), r.dk, r.dv);
      }
    }
    DqSum last_sum = DqSum::kNotLast;
    if (steps > 0) {
      last_sum = walk(r, steps);
    } else {
      pass_over();
    }
    arrive_together(shared_.k_empty);
    if constexpr (Variant::kClusterSize > 1) {
      if (!work().valid()) { return; }
    }
    if (is_complete(r)) { Epilogue<Variant>::store(shared_, params_, work(), step_, consumer_, r.dk, r.dv); }
    if (last_sum != DqSum::kNotLast) { stage_and_arrive(r.dq(), step_.previous(), last_sum); }
  }

  // Returns whether dK and dV are complete once the sums of the previous splits are added. If not, they are left to
  // whoever continues them.
  __device__ __forceinline__ bool is_complete(Registers& r) const {
    if (Variant::kMayCarry && params_.carried.exist) { return end_part(r); }
    if constexpr (Variant::kDivided) {
      if (work().visits == Visits::kFirst) {
        hand_over_first_part<Variant, Visits::kFirst>(params_, work(), r.dk, r.dv);
        return false;
      }
    }
    return work().splits == 1 || reduce_splits<Variant>(params_, work(), r.dk, r.dv);
  }

  // The same for a call that carries sums, which leaves them to the next call.
  __device__ __forceinline__ bool end_part(Registers& r) const {
    const bool dv_ends = end_carried_sum(params_, first_float(false), consumer_, r.dv);
    return end_carried_sum(params_, first_float(true), consumer_, r.dk) && dv_ends;
  }

  __device__ __forceinline__ int64_t first_float(bool is_dk) const {
    return first_float_of_sum<Variant, Epilogue<Variant>::kRegisters>(work(), consumer_, is_dk);
  }

  // The loop is cut between dP and dS, where no product is running, so that ptxas can trace every product to its wait
  // and has no reason to serialise them. Returns what end_last_step returns.
  __device__ __forceinline__ DqSum walk(Registers& r, int steps) {
    begin_first_step(r);
    for (int steps_left = steps - 1; steps_left > 0; --steps_left) {
      // Makes all addresses of a step constants.
      if (step_.slot() == 0) {
        end_step_begin_next<0>(r);
      } else {
        end_step_begin_next<1>(r);
      }
    }
    return end_last_step(r);
  }

  // A work tile without steps, for which nothing has been loaded.
  __device__ __forceinline__ void pass_over() {
    release_staging();
    shared_.k_full.wait(tile().parity());
    shared_.v_full.wait(tile().parity());
    arrive_together(shared_.v_empty);
  }

  // The first key of the consumer's rows of S^T.
  __device__ __forceinline__ int first_key() const {
    return work().kv_tile * Variant::kKey + consumer_ * kWarpgroupRows;
  }

  // Each work tile has one K and one V.
  __device__ __forceinline__ RingIndex<1> tile() const { return {ring_.count}; }
  __device__ __forceinline__ const Element* key_tile() const { return shared_.kv[ring_.count % 2]; }
  __device__ __forceinline__ const Element* value_tile() const { return shared_.kv[1 - ring_.count % 2]; }
  __device__ __forceinline__ const WorkTile& work() const { return shared_.work[ring_.slot()]; }

  __device__ __forceinline__ void release_staging() const { Epilogue<Variant>::release_staging(thread_); }

  __device__ __forceinline__ void begin_first_step(Registers& r) {
    shared_.k_full.wait(tile().parity());
    issue_s(r, step_);
    if constexpr (kKeepsKeysOfBits) { r.keys_of_bits = Bits::keys_of(params_.dropout, first_key(), thread_); }
    find_bits(r, step_);
    release_staging();
    wait_products<0>();
    fence_operand(r.scores);
    make_p(r.scores, step_);
    round_p(r);
    wait_for_dout(step_);
    issue_dv(r, step_);
    shared_.v_full.wait(tile().parity());
    if constexpr (kHeldSlicesOfV > 0) {
      load_rows<Swizzle, Variant::kKey>(value_tile(), consumer_ * kWarpgroupRows, r.v, thread_ / 32, thread_ % 32);
    }
    issue_dp(r, step_);
    wait_products<0>();
    fence_operand(r.dv);
    fence_operand(r.scores);
    fence_operand(r.kept());
    if constexpr (Variant::kHoldsV) { arrive_together(shared_.v_empty); }
    Epilogue<Variant>::meet_released();
  }

  template <int kSlot>
  __device__ __forceinline__ void end_step_begin_next(Registers& r) {
    const StepInSlot<kSlot> step{step_};
    const StepInSlot<1 - kSlot> next{step_.next()};
    make_ds(r, step);
    issue_s(r, next);
    find_bits(r, next);
    fence_and_arrive(shared_.ds_full[step.slot()]);
    issue_dk(r, step);
    wait_products<1>();  // S
    fence_operand(r.scores);
    make_p(r.scores, next);
    wait_for_dout(next);
    wait_products<0>();  // dK
    fence_operand(r.dk);
    fence_operand(r.rounded);
    shared_.q_empty[step.slot()].arrive();
    round_p(r);

    issue_dq(r, step);
    issue_dv(r, next);
    if constexpr (kDpFirst) { issue_dp(r, next); }
    wait_for_staging(step);
    wait_products<kDpFirst ? 2 : 1>();  // dQ
    fence_operand(r.dq());
    stage_dq(r.dq(), step, sum_of(step));
    if constexpr (!kDpFirst) { issue_dp(r, next); }
    fence_and_arrive(shared_.dq_full[step.slot()]);

    step_ = step_.next();
    wait_products<0>();  // dV and dP
    fence_operand(r.dv);
    fence_operand(r.scores);
    fence_operand(r.kept());
  }

  // Returns sum_of the last step. If that partial finishes dQ, it is staged after dK and dV, which need not wait for
  // the sum.
  __device__ __forceinline__ DqSum end_last_step(Registers& r) {
    make_ds(r, step_);
    fence_and_arrive(shared_.ds_full[step_.slot()]);
    issue_dk(r, step_);
    issue_dq(r, step_);
    wait_for_staging(step_);
    wait_products<0>();
    fence_operand(r.dk);
    fence_operand(r.dq());
    fence_operand(r.rounded);
    shared_.q_empty[step_.slot()].arrive();
    const DqSum sum = sum_of(step_);
    if (sum == DqSum::kNotLast) { stage_and_arrive(r.dq(), step_, sum); }
    step_ = step_.next();
    if constexpr (!Variant::kHoldsV) { arrive_together(shared_.v_empty); }
    return sum;
  }

  template <typename AnyStep>
  __device__ __forceinline__ void stage_and_arrive(const DqPartial& dq, AnyStep step, DqSum sum) {
    stage_dq(dq, step, sum);
    fence_and_arrive(shared_.dq_full[step.slot()]);
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_s(Registers& r, AnyStep step) {
    shared_.q_full[step.slot()].wait(step.parity());
    wgmma_async<Element, Variant::kHeadDim>(r.scores, KeyRows(descriptor_of_(key_tile()), consumer_ * kWarpgroupRows),
                                            QueryRows(descriptor_of_(shared_.q[step.slot()])));
  }

  template <typename AnyStep>
  __device__ __forceinline__ void wait_for_dout(AnyStep step) const {
    shared_.dout_full[step.slot()].wait(step.parity());
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_dv(Registers& r, AnyStep step) {
    wgmma_async_add<Element>(r.dv, r.kept(), QuerySum(descriptor_of_(shared_.dout[step.slot()])));
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_dp(Registers& r, AnyStep step) {
    const QueryRows dout(descriptor_of_(shared_.dout[step.slot()]));
    if constexpr (kHeldSlicesOfV > 0) { wgmma_async<Element>(r.scores, r.v, dout); }
    if constexpr (!Variant::kHoldsV) {
      const KeyRows v(descriptor_of_(value_tile()), consumer_ * kWarpgroupRows);
      wgmma_async<Element, Variant::kHeadDim, kHeldSlicesOfV>(r.scores, v, dout);
    }
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_dk(Registers& r, AnyStep step) {
    wgmma_async_add<Element>(r.dk, r.rounded, QuerySum(descriptor_of_(shared_.q[step.slot()])));
  }

  // The first row of the query tile that the consumer computes of dQ.
  __device__ __forceinline__ int first_query_of_dq() const {
    return Variant::kSplitDqByHeadDim ? 0 : consumer_ * Variant::kDqQueries;
  }

  // A consumer that has arrived on ds_full has completed dQ of the previous step, so two buffers of dS need no `empty`
  // barrier.
  template <typename AnyStep>
  __device__ __forceinline__ void issue_dq(Registers& r, AnyStep step) {
    shared_.ds_full[step.slot()].wait(step.parity());
    const KeySum k(descriptor_of_(key_tile()), consumer_ * (Variant::kDqColumnStep / Swizzle::kColumns));
    const QueryRows ds(descriptor_of_(shared_.ds[step.slot()]), first_query_of_dq());
    if constexpr (Variant::kTransposesDq) {
      wgmma_async<Element, Variant::kKey>(r.dq(), k, ds);
    } else {
      wgmma_async<Element, Variant::kKey>(r.dq(), ds, k);
    }
  }

  // Turns S into P.
  template <typename AnyStep>
  __device__ __forceinline__ void make_p(Scores& s, AnyStep step) const {
    const StepTile tile = shared_.step[step.slot()];
    Score::apply(s, [&] { return bias_of(tile.query_tile, step.slot()); }, params_.score);
    if (tile.needs_masking) {
      const Mask mask = Variant::grid(work().sequence, params_.window).mask;
      apply_mask(s, mask, tile.query_tile * Variant::kQuery, first_key(), thread_);
      if constexpr (Variant::kHasColumns) {
        hide_queries(s, tile.query_tile * Variant::kQuery + fragment_column(thread_, 0),
                     hidden_keys_of(params_, work(), first_key() + fragment_row(thread_, 0)));
      }
    }
    probabilities(s, shared_.lse[step.slot()], params_.score.scale_log2, thread_);
  }

  __device__ __forceinline__ StepBias bias_of(int query_tile, int slot) const {
    const Sequence& sequence = work().sequence;
    const int first_own_key = query_tile * Variant::kQuery + sequence.seqlen_k - sequence.seqlen_q;
    const int distance = first_own_key + fragment_column(thread_, 0) - first_key() - fragment_row(thread_, 0);
    return {shared_.slope[slot], float(distance)};
  }

  __device__ __forceinline__ void round_p(Registers& r) const {
    pack_slices<Element>(r.rounded, r.scores);
    fence_operand(r.rounded);
    if constexpr (Score::kDrops) {
#pragma unroll
      for (int i = 0; i < kScoreRegisters / 2; ++i) { r.own_kept[i / 4][i % 4] = r.rounded[i / 4][i % 4]; }
      r.bits.template drop<Element>(r.own_kept);
      r.bits.opaque();  // dP derives what it needs from them again
      fence_operand(r.own_kept);
    }
  }

  // Called long before the bits are used, because they come from global memory.
  template <typename AnyStep>
  __device__ __forceinline__ void find_bits(Registers& r, AnyStep step) const {
    if constexpr (Score::kDrops) {
      const uint8_t* const of_head = params_.dropout.of_head(work().batch, shared_.head[step.slot()]);
      const int first_query = shared_.step[step.slot()].query_tile * Variant::kQuery;
      if constexpr (kKeepsKeysOfBits) {
        r.bits = Bits(params_.dropout, of_head, r.keys_of_bits, first_query);
      } else {
        r.bits = Bits(params_.dropout, of_head, first_key(), first_query, thread_);
      }
    }
  }

  // Turns dP and P into dS, rounded, in registers for dK and in shared memory for dQ.
  template <typename AnyStep>
  __device__ __forceinline__ void make_ds(Registers& r, AnyStep step) {
    // Lets ptxas interleave the stores with the arithmetic, which pays if there are many.
    if constexpr (kScoreRegisters > 32) { opaque(thread_); }
    score_gradient<Element, Score>(r.rounded, r.scores, shared_.delta[step.slot()], shared_.lse[step.slot()],
                                   params_.score, r.bits, thread_);
    shared_.dout_empty[step.slot()].arrive();
    store_transposed<Swizzle, Variant::kQuery>(shared_.ds[step.slot()] + consumer_ * kDsBlock, r.rounded, thread_ / 32,
                                               thread_ % 32);
  }

  template <typename AnyStep>
  __device__ __forceinline__ void wait_for_staging(AnyStep step) const {
    shared_.dq_empty[step.slot()].wait(step.empty_parity());
  }

  template <typename AnyStep>
  __device__ __forceinline__ DqSum sum_of(AnyStep step) const {
    if constexpr (Variant::kMayFinishDq) {
      if (params_.finishes_dq) { return shared_.dq_sum[scale_slot(step)]; }
    }
    return DqSum::kNotLast;
  }

  template <typename AnyStep>
  static __device__ __forceinline__ int scale_slot(AnyStep step) {
    return RingIndex<Variant::kScaleSlots>{step.count}.slot();
  }

  template <typename AnyStep>
  __device__ __forceinline__ void finish_dq(const DqPartial& dq, AnyStep step, DqSum sum) {
    float* const buffer = shared_.dq[step.slot()];
    const float scale = params_.scale_of_sums;
    const bool has_sum = sum != DqSum::kAlone;
    opaque(thread_);
    if (has_sum) { shared_.sum_full[step.slot()].wait(sum == DqSum::kOddSum); }
    if constexpr (Variant::kOrderFree) {
      const int slot = scale_slot(step), tile = shared_.scale_tile[slot];
      if (tile != kNoScale) {
        const OtherPartials others = has_sum ? shared_.others[step.slot()] : OtherPartials{0, 0};
        finish_dq_in_units<Variant>(buffer, dq, has_sum, scale, consumer_, thread_,
                                    shared_.scales[slot] + first_query_of_dq(),
                                    others.have_marks ? marks_of(tile) : nullptr, others.count + 1);
        return;
      }
    }
    finish_dq_in_fp32<Variant>(buffer, dq, has_sum, scale, consumer_, thread_);
  }

  template <typename AnyStep>
  __device__ __forceinline__ void stage_dq(const DqPartial& dq, AnyStep step, DqSum sum) {
    if constexpr (Variant::kMayFinishDq) {
      if (sum != DqSum::kNotLast) {
        finish_dq(dq, step, sum);
        return;
      }
    }
    if (!Layout::has_part(consumer_, thread_)) { return; }
    float4* const buffer = reinterpret_cast<float4*>(shared_.dq[step.slot()]);
    const auto store = [&](int quad, float x, float y, float z, float w) {
      buffer[Layout::quad_index(consumer_, quad, thread_)] = make_float4(x, y, z, w);
    };
    if (stage_dq_as_integers(dq, step, store)) { return; }
#pragma unroll
    for (int quad = 0; quad < Layout::kQuads; ++quad) {
      store(quad, dq[4 * quad], dq[4 * quad + 1], dq[4 * quad + 2], dq[4 * quad + 3]);
    }
  }

  // The marks of the consumer's rows of dQ.
  __device__ __forceinline__ uint8_t* marks_of(int tile) const {
    return params_.workspace.scales + int64_t(tile) * Variant::kQuery + first_query_of_dq();
  }

  // Stages a partial in units, if sums are order-free and the head does not need the order.
  template <typename AnyStep, typename Store>
  __device__ __forceinline__ bool stage_dq_as_integers(const DqPartial& dq, AnyStep step, const Store& store) {
    if constexpr (Variant::kOrderFree) {
      const int slot = scale_slot(step);
      opaque(thread_);
      const int tile = shared_.scale_tile[slot];
      if (tile == kNoScale) { return false; }
      const uint8_t* const scales = shared_.scales[slot] + first_query_of_dq();
      const Marks marks{marks_of(tile), params_.workspace.any_marks};
      if constexpr (Variant::kTransposesDq) {
        round_columns(dq, scales, marks, thread_, store);
      } else {
        round_rows(dq, scales, marks, thread_, store);
      }
      return true;
    }
    return false;
  }

  Shared& shared_;
  const KernelParams& params_;
  const TileDescriptors<Swizzle> descriptor_of_;
  const int consumer_;
  int thread_;
  WorkRing<Variant> ring_;
  Step step_;
};

}  // namespace dash_attn::backward
