// The consumers where no warpgroup has registers for the dK and dV of 64 keys: one owns all of dV and the other all of
// dK. For every query tile,
//
//   value consumer:  S = score(Q K^T)     P = exp2(scale S - LSE)     dV^T += dO^T P     part of dQ = dS K
//   key consumer:    dP = dO V^T     dS = P * (dP - D)     dK^T += Q^T dS     the other part of dQ
//
// Queries are the rows of S and dP. P and dS go through shared memory, transposed: there the products read them, and
// the key consumer takes P from there; with dropout, what is kept of P then takes its place. dQ is computed 64 columns
// at a time, beside products with the same operand (a bar is a wait for products):
//
//   value consumer   tensor cores:  dQ(j)1 | half of dV(j+1)  dQ(j)2 | other half  S(j+2) |
//                    threads:              | dQ(j)1 -> adder         | dQ(j)2 -> adder    | P(j+2) -> shared memory
//   key consumer     tensor cores:  dQ(j)0 | dK(j)  dP(j+1)  |
//                    threads:              | dQ(j)0 -> adder | dS(j+1) -> shared memory
//
// The value consumer is ahead by a step, but that it makes dQ of the step behind. What one consumer's threads do, the
// other's products run beside. With dropout the key consumer makes all of dQ: the other one holds what is kept of P,
// and waits already for P to have been taken.
#pragma once

#include "../../device/warp_roles.h"
#include "../work_ring.h"
#include "dq.h"
#include "epilogue.h"
#include "score_tile.h"
#include "storage.h"

namespace dash_attn::backward::wide {

// What both consumers have.
template <typename Variant>
class Consumer {
 public:
  using Element = typename Variant::Element;
  using Score = typename Variant::Score;
  using Shared = SharedStorage<Variant>;

  __device__ Consumer(Shared& shared, const KernelParams& params)
      : shared_(shared), params_(params), descriptor_of_(&shared), thread_(threadIdx.x % kWarpgroupThreads) {}

 protected:
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

  // There is one K and one V a work tile.
  __device__ __forceinline__ Once tile() const { return {ring_.count}; }
  __device__ __forceinline__ const WorkTile& work() const { return shared_.work[ring_.slot()]; }
  __device__ __forceinline__ QueryStage query_stage() const { return {step_}; }
  __device__ __forceinline__ DoutStage dout_stage() const { return {step_}; }

  // In work tiles without steps too: a parity tells a pass from the next one, and not from the next but one.
  __device__ __forceinline__ void wait_for_keys() const { shared_.k_full.wait(tile().parity()); }
  __device__ __forceinline__ void wait_for_q() const {
    shared_.q_full[query_stage().slot()].wait(query_stage().parity());
  }
  __device__ __forceinline__ void wait_for_dout() const {
    shared_.dout_full[dout_stage().slot()].wait(dout_stage().parity());
  }
  __device__ __forceinline__ void wait_for_p() const { shared_.p_full.wait(Once{step_}.parity()); }

  // Of the step; long before they are used: they come from global memory.
  __device__ __forceinline__ Bits find_bits() const {
    if constexpr (Score::kDrops) {
      const uint32_t slot = query_stage().slot();
      return Bits(params_.dropout, params_.dropout.of_head(work().batch, shared_.head[slot]),
                  shared_.step[slot].query_tile * Variant::kQuery, work().kv_tile * Variant::kKey, thread_);
    } else {
      return {};
    }
  }

  // So that no address is carried through a step: there is no register for it.
  __device__ __forceinline__ void forget_addresses() {
    forget(thread_);
    forget(step_);
    descriptor_of_.forget();
  }

  // Blocks kFirst ... kFirst + kCount - 1 of dQ of step `step`, each computed beside its share of kBeside products,
  // which issue_beside(number) issues, and staged. `done` is called when all are computed, issue_next() when the last
  // one's registers are free.
  template <int kFirst, int kCount, int kBeside, typename IssueBeside, typename Done, typename IssueNext>
  __device__ __forceinline__ void make_dq(uint32_t step, const IssueBeside& issue_beside, const Done& done,
                                          const IssueNext& issue_next) {
    float dq[DqLayout<Variant>::kRegisters];
    const auto issue = [&](int i) {
      forget_contents(dq);
      multiply<Element, Variant::kKey>(dq, KeyColumns(descriptor_of_(shared_.ds)),
                                       KeyColumns(descriptor_of_(shared_.k), kFirst + i));
#pragma unroll
      for (int number = i * kBeside / kCount; number < (i + 1) * kBeside / kCount; ++number) { issue_beside(number); }
    };
    issue(0);
    for_each<kCount>([&](auto index) {
      constexpr int i = decltype(index)::value;
      wait_products<(i + 1) * kBeside / kCount - i * kBeside / kCount>();
      pin(dq);
      forget_addresses();
      if constexpr (i + 1 == kCount) { done(); }
      DqStager<Variant, kFirst + i>(shared_, params_, step, thread_).stage(dq, [&] {
        if constexpr (i + 1 < kCount) {
          issue(i + 1);
        } else {
          issue_next();
        }
      });
    });
  }

  static constexpr bool kValueConsumerMakesDq = !Score::kDrops;

  Shared& shared_;
  const KernelParams& params_;
  TileDescriptors<Swizzle> descriptor_of_;
  int thread_;
  WorkRing<Variant> ring_;
  uint32_t step_ = 0;  // over all work tiles
};

template <typename Variant>
class ValueConsumer : Consumer<Variant> {
 public:
  using Base = Consumer<Variant>;
  using Base::Base;

  __device__ void run() {
    for (; wait_for_work_together(shared_, ring_); ring_ = ring_.next()) {
      process();
      arrive_together(shared_.work_empty[ring_.slot()]);
    }
  }

 private:
  using Base::descriptor_of_;
  using Base::params_;
  using Base::ring_;
  using Base::shared_;
  using Base::step_;
  using Base::thread_;
  using typename Base::Bits;
  using typename Base::Element;
  using typename Base::KeyRows;
  using typename Base::Once;
  using typename Base::QueryColumns;
  using typename Base::QueryRows;
  using typename Base::RoundedScores;
  using typename Base::Score;
  using typename Base::Scores;
  using typename Base::Swizzle;
  using Dv = Gradient<Variant, Variant::kValueDim>;
  static constexpr int kNamedBarrier = 1;

  struct Registers {
    Dv dv;
    Scores s;
    RoundedScores kept;  // of P, with dropout
    Bits bits;
  };

  __device__ __forceinline__ void process() {
    Registers r;
    begin_sum<Variant>(params_, this->work(), r.dv, false);
    const int steps = this->work().steps;
    this->wait_for_keys();
    if (steps > 0) {
      issue_s(r);
      wait_products<0>();
      pin(r.s);
      make_p(r);
      // Before the first step there is none whose dQ is to be made.
      if (steps == 1) {
        last_step<kNoDq>(r);
      } else {
        step<kNoDq>(r);
        for (int steps_left = steps - 2; steps_left > 0; --steps_left) { step<kDq>(r); }
        last_step<kDq>(r);
      }
      if constexpr (kDq) { multiply_ds<0>([](int) {}, [] {}); }
    }
    finish(r.dv);
  }

  // Whether a step has dQ of the one before.
  static constexpr bool kDq = Base::kValueConsumerMakesDq, kNoDq = false;

  // dV of the step, S and P of the next.
  template <bool kWithDq>
  __device__ __forceinline__ void step(Registers& r) {
    this->forget_addresses();
    if constexpr (Variant::kDoutStages == 1) {
      // S may wait for Q, and the next dO waits for this one's place.
      last_step<kWithDq>(r);
      issue_s(r);
      wait_products<0>();
    } else {
      multiply_p<kWithDq>(r, [&] {
        ++step_;
        issue_s(r);
      });
      wait_products<0>();
      r.dv.pin();
      release_dv_operands(step_ - 1);
    }
    pin(r.s);
    make_p(r);
  }

  template <bool kWithDq>
  __device__ __forceinline__ void last_step(Registers& r) {
    multiply_p<kWithDq>(r, [&] { ++step_; });
    wait_products<0>();
    r.dv.pin();
    release_dv_operands(step_ - 1);
  }

  __device__ __forceinline__ void issue_s(Registers& r) {
    this->wait_for_q();
    forget_contents(r.s);
    multiply<Element, Variant::kQkDim>(r.s, QueryRows(descriptor_of_(shared_.q[this->query_stage().slot()])),
                                       KeyRows(descriptor_of_(shared_.k)));
    r.bits = this->find_bits();
  }

  // dV of the step, beside dQ of the one before. P of the step is written by all warps.
  template <bool kWithDq, typename IssueNext>
  __device__ __forceinline__ void multiply_p(Registers& r, const IssueNext& issue_next) {
    write_kept(r.kept);
    if constexpr (Score::kDrops) {
      shared_.kept_full.wait(Once{step_}.parity());
    } else {
      this->wait_for_p();
    }
    this->wait_for_dout();
    const auto issue_block = [&](int b) {
      multiply_add<Element, Variant::kQuery>(r.dv.block[b],
                                             QueryColumns(descriptor_of_(shared_.dout[this->dout_stage().slot()]), b),
                                             KeyRows(descriptor_of_(shared_.p)));
    };
    if constexpr (kWithDq) {
      multiply_ds<Dv::kBlocks>(issue_block, issue_next);
    } else {
#pragma unroll
      for (int b = 0; b < Dv::kBlocks; ++b) { issue_block(b); }
      issue_next();
    }
  }

  // This consumer's part of dQ of the step before.
  template <int kBeside, typename IssueBeside, typename IssueNext>
  __device__ __forceinline__ void multiply_ds(const IssueBeside& issue_beside, const IssueNext& issue_next) {
    const uint32_t before = step_ - 1;
    shared_.ds_full.wait(Once{before}.parity());
    this->template make_dq<Variant::first_dq_block(1), Variant::dq_blocks(1), kBeside>(
        before, issue_beside, [&] { arrive_once(shared_.ds_empty); }, issue_next);
  }

  __device__ __forceinline__ void release_dv_operands(uint32_t step) const {
    shared_.dout_empty[typename Base::DoutStage{step}.slot()].arrive();
    arrive_once(shared_.p_empty);
  }

  // S becomes P, rounded, in shared memory, and what dropout keeps of it, in registers.
  __device__ __forceinline__ void make_p(Registers& r) {
    const uint32_t slot = this->query_stage().slot();
    const StepTile tile = shared_.step[slot];
    const int first_query = tile.query_tile * Variant::kQuery, first_key = this->work().kv_tile * Variant::kKey;
    transform(r.s, first_query, first_key, slot);
    if (tile.needs_masking) {
      const Mask mask = Variant::grid(this->work().sequence, params_.window).mask;
      apply_mask(r.s, mask, first_query, first_key, thread_);
    }
    probabilities(r.s, statistics_of(shared_.lse[slot], thread_), params_.score.scale_log2);
    shared_.q_empty[slot].arrive();
    RoundedScores& p = r.kept;
    pack_slices<Element>(p, r.s);
    shared_.p_empty.wait(Once{step_}.empty_parity());
    store_transposed<Swizzle, Variant::kKey>(shared_.p, p, thread_ / 32, thread_ % 32);
    fence_and_arrive(shared_.p_full);
    if constexpr (Score::kDrops) { r.bits.template drop<Element>(p); }
  }

  // What dropout keeps of P to its place, once the other consumer has taken P from there.
  __device__ __forceinline__ void write_kept(const RoundedScores& kept) {
    if constexpr (Score::kDrops) {
      shared_.p_read.wait(Once{step_}.parity());
      store_transposed<Swizzle, Variant::kKey>(shared_.p, kept, thread_ / 32, thread_ % 32);
      fence_and_arrive(shared_.kept_full);
    }
  }

  // Products become scores.
  __device__ __forceinline__ void transform(Scores& s, int first_query, int first_key, uint32_t slot) const {
    if constexpr (Score::kHasSlope) {
      const Sequence& sequence = this->work().sequence;
      const int own_key = first_query + fragment_row(thread_, 0) + sequence.seqlen_k - sequence.seqlen_q;
      const int distance = first_key + fragment_column(thread_, 0) - own_key;
      Score::transform(s, KeyBias{shared_.slope[slot], float(distance)});
    } else if constexpr (Score::kKind == ScoreKind::kSoftcap) {
      Score::transform(s, params_.score);
    }
  }

  // dV takes the place of V: the key consumer has come to P of the last step, and so is done with dP.
  __device__ __forceinline__ void finish(Dv& dv) {
    const WorkTile& work = this->work();
    shared_.v_full.wait(this->tile().parity());
    shared_.p_empty.wait(Once{step_}.empty_parity());
    if (Variant::kCarries ? end_part<Variant>(params_, work, dv, false)
                          : work.splits == 1 || reduce_splits<Variant>(params_, work, dv, false)) {
      if constexpr (Score::kDrops) { dv.multiply(params_.dropout.scale); }
      store_gradient<Variant>(params_.dv, shared_.v, params_, work, dv, kNamedBarrier);
    }
    if (thread_ == 0) { shared_.v_empty.arrive(); }
  }
};

template <typename Variant>
class KeyConsumer : Consumer<Variant> {
 public:
  using Base = Consumer<Variant>;
  using Base::Base;

  __device__ void run() {
    for (; wait_for_work_together(shared_, ring_); ring_ = ring_.next()) {
      process();
      arrive_together(shared_.work_empty[ring_.slot()]);
    }
  }

 private:
  using Base::descriptor_of_;
  using Base::params_;
  using Base::ring_;
  using Base::shared_;
  using Base::step_;
  using Base::thread_;
  using typename Base::Bits;
  using typename Base::Element;
  using typename Base::KeyRows;
  using typename Base::Once;
  using typename Base::QueryColumns;
  using typename Base::QueryRows;
  using typename Base::RoundedScores;
  using typename Base::Score;
  using typename Base::Scores;
  using typename Base::Swizzle;
  using Dk = Gradient<Variant, Variant::kQkDim>;
  static constexpr int kNamedBarrier = 2;
  static constexpr int kDqBlocks = Variant::dq_blocks(0) + (Base::kValueConsumerMakesDq ? 0 : Variant::dq_blocks(1));

  struct Registers {
    Dk dk;
    Scores dp;
    Bits bits;
  };

  __device__ __forceinline__ void process() {
    Registers r;
    begin_sum<Variant>(params_, this->work(), r.dk, true);
    const int steps = this->work().steps;
    this->wait_for_keys();
    if (steps > 0) {
      // Not in work tiles without steps, for whose V nobody waits for this consumer. The loader brings V before K.
      shared_.v_full.wait(this->tile().parity());
      issue_dp(r);
      wait_products<0>();
      pin(r.dp);
      make_ds(r);
      for (int steps_left = steps - 1; steps_left > 0; --steps_left) {
        multiply_ds<true>(r);
        make_ds(r);
      }
      multiply_ds<false>(r);
    }
    finish(r.dk);
  }

  // dO comes behind Q, and with Q what tells the step's bits.
  __device__ __forceinline__ void issue_dp(Registers& r) {
    this->wait_for_dout();
    r.bits = this->find_bits();
    forget_contents(r.dp);
    multiply<Element, Variant::kValueDim>(r.dp, QueryRows(descriptor_of_(shared_.dout[this->dout_stage().slot()])),
                                          KeyRows(descriptor_of_(shared_.v)));
  }

  // dP and P become dS, rounded, in shared memory.
  __device__ __forceinline__ void make_ds(Registers& r) {
    this->forget_addresses();
    const uint32_t slot = this->dout_stage().slot();
    this->wait_for_p();
    const uint32_t p = transposed_address<Swizzle, Variant::kKey>(shared_.p, thread_ / 32, thread_ % 32);
    const RowPair delta = statistics_of(shared_.delta[slot], thread_);
    RowPair lse{};
    if constexpr (Score::kHasDerivative) { lse = statistics_of(shared_.lse[this->query_stage().slot()], thread_); }
    RoundedScores ds;
#pragma unroll
    for (int k = 0; k < Variant::kKey / kProductDepth; ++k) {
      ptx::load_matrix_transposed(p + k * 2 * Swizzle::kAtomBytes, ds[k]);
      score_gradient<Element, Score>(ds[k], r.dp, k, delta, lse, params_.score, r.bits);
    }
    if constexpr (Score::kDrops) { shared_.p_read.arrive(); }
    shared_.p_empty.arrive();
    shared_.dout_empty[slot].arrive();
    wait_for_other_dq();
    sync_warpgroup(kNamedBarrier);  // dK of the step before has completed for all warps
    store_transposed<Swizzle, Variant::kKey>(shared_.ds, ds, thread_ / 32, thread_ % 32);
    ptx::fence_async_shared();
    sync_warpgroup(kNamedBarrier);
    if constexpr (Base::kValueConsumerMakesDq) { arrive_once(shared_.ds_full); }
  }

  // Of the step before, which reads dS and K.
  __device__ __forceinline__ void wait_for_other_dq() const {
    if constexpr (Base::kValueConsumerMakesDq) { shared_.ds_empty.wait(Once{step_}.empty_parity()); }
  }

  // dK and this consumer's part of dQ of the step, and dP of the next.
  template <bool kHasNext>
  __device__ __forceinline__ void multiply_ds(Registers& r) {
    this->forget_addresses();
    this->wait_for_q();
    const auto issue_dk = [&](int b) {
      multiply_add<Element, Variant::kQuery>(r.dk.block[b],
                                             QueryColumns(descriptor_of_(shared_.q[this->query_stage().slot()]), b),
                                             KeyRows(descriptor_of_(shared_.ds)));
    };
    this->template make_dq<0, kDqBlocks, Dk::kBlocks>(step_, issue_dk, [] {}, [&] {
      ++step_;
      if constexpr (kHasNext) { issue_dp(r); }
    });
    wait_products<kHasNext ? 1 : 0>();  // dK
    r.dk.pin();
    this->forget_addresses();
    shared_.q_empty[typename Base::QueryStage{step_ - 1}.slot()].arrive();
    if constexpr (kHasNext) {
      wait_products<0>();
      pin(r.dp);
    }
  }

  // dK takes the place of K: S of all steps has become P, which this consumer has read, and all of dQ is done.
  __device__ __forceinline__ void finish(Dk& dk) {
    const WorkTile& work = this->work();
    wait_for_other_dq();
    sync_warpgroup(kNamedBarrier);
    if (Variant::kCarries ? end_part<Variant>(params_, work, dk, true)
                          : work.splits == 1 || reduce_splits<Variant>(params_, work, dk, true)) {
      dk.multiply(params_.dk_scale);
      store_gradient<Variant>(params_.dk, shared_.k, params_, work, dk, kNamedBarrier);
    }
    if (thread_ == 0) { shared_.k_empty.arrive(); }
  }
};

}  // namespace dash_attn::backward::wide
