// The consumers: each warpgroup owns 64 keys and computes, for every query tile,
//
//   S^T = K Q^T     P^T = exp2(scale S^T - LSE)     dP^T = V dO^T     dS^T = P^T * (dP^T - D)
//   dV += P^T dO    dK += dS^T Q                    dQ^T = K^T dS^T   (over the keys of both consumers)
//
// Products run in the order in which they are issued, while the thread computes. From step j to step j + 1 (a bar is a
// wait for products):
//
//   tensor cores:  S(j+1) | dK(j)  | dQ(j) | dV(j+1)          dP(j+1) |
//   threads:              | P(j+1) |       | dQ(j) -> adder           | dS(j+1) -> shared memory
//
// dQ(j) waits for the other consumer's dS(j); S(j+1) and dK(j) come before it to give that time. A thread holds dK and
// dV (128 registers at head_dim 128), its rows of V (32), and two fragments that serve in turn: one in fp32 for S and P,
// dQ, dP (32), one rounded for P and dS (16).
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "../device/fragment.h"
#include "../device/mask.h"
#include "carry.h"
#include "claims.h"
#include "config.h"
#include "dq_grid.h"
#include "dq_layout.h"
#include "params.h"

namespace dash_attn::backward {

template <typename Config>
class Consumer {
 public:
  using Element = typename Config::Element;
  using Shared = SharedStorage<Config>;

  __device__ Consumer(Shared& shared, const KernelParams& params)
      : shared_(shared),
        params_(params),
        descriptor_of_(&shared),
        // A shuffle, so that the compiler knows it is uniform.
        consumer_(__shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0) - 1),
        thread_(threadIdx.x % kWarpgroupThreads) {}

  __device__ void run() {
    Work work;
    for (; next_work<Reader::kWarp>(work, shared_, params_, claims_); claims_ = claims_.next()) {
      if (work.valid()) {
        process_claim(work.kv_tile);
      } else {
        skip_claim();
      }
    }
    if (thread_ == 0) { ptx::bulk_wait_read(); }  // before shared memory goes
  }

 private:
  using KeyRows = SumOverColumns<Config::kKey>;      // K or V as A of S^T, dP^T
  using QueryRows = SumOverColumns<Config::kQuery>;  // Q or dO as B of S^T, dP^T; dS as B of dQ^T
  using QuerySum = SumOverRows<Config::kQuery>;      // dO, Q as B of dV, dK
  using KeySum = SumOverRows<Config::kKey>;          // K as A of dQ^T
  using Layout = DqLayout<Config>;
  using Step = RingIndex<Config::kStages>;
  template <int kSlot>
  struct StepInSlot : Step {
    static __device__ __forceinline__ constexpr uint32_t slot() { return kSlot; }
  };
  static_assert(Config::kStages == 2);

  static constexpr int kScoreRegisters = Config::kQuery / 2;       // a 64 x kQuery fragment
  static constexpr int kGradientRegisters = Config::kHeadDim / 2;  // a 64 x kHeadDim fragment
  static constexpr int kDsBlock = Config::kQuery * kSwizzleColumns;
  static constexpr int kGradientElements = kWarpgroupRows * Config::kHeadDim;

  using Scores = float[kScoreRegisters];
  using RoundedScores = RegisterSlice[kScoreRegisters / 8];
  using Gradient = float[kGradientRegisters];
  using DqPartial = float[Layout::kRegisters];

  struct Registers {
    Gradient dk, dv;
    Scores scores;          // S and P; dP
    RoundedScores rounded;  // P; dS
    RegisterSlice v[Config::kHeadDimSlices];

    // Where dQ's partial is as large as S it takes the same registers: S has become P, and dP is not issued yet. ptxas
    // does not find that by itself; taking half of them confuses it.
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

  // Rounding a partial to the grid takes time that dP fills where it has registers of its own.
  static constexpr bool kDpFirst = Config::kOrderFree && !Registers::kShareDq;

  // The loop is cut where no product is running, between dP and dS: ptxas then follows every product to its wait and
  // has no reason to serialise them.
  __device__ __forceinline__ void process_claim(int kv_tile) {
    const Problem problem = specialised_problem<Config>(params_);
    const int steps = problem.live_query_tiles(kv_tile) * problem.queries_per_claim;
    Registers r;
    clear(r.dk);
    clear(r.dv);

    begin_first_step(r);
    for (int steps_left = steps - 1; steps_left > 0; --steps_left) {
      // So that all addresses of a step are constants.
      if (step_.slot() == 0) {
        end_step_begin_next<0>(r);
      } else {
        end_step_begin_next<1>(r);
      }
    }
    end_last_step(r);
    if constexpr (Config::kStageInDs) { arrive(shared_.k_empty); }
    if (sum_over_splits(r.dk, r.dv)) { store_gradients(r.dk, r.dv); }
  }

  // There is one K and one V a claim.
  __device__ __forceinline__ RingIndex<1> tile() const { return {claims_.count}; }
  __device__ __forceinline__ Element* key_tile() const { return shared_.kv[claims_.count % 2]; }
  __device__ __forceinline__ const Element* value_tile() const { return shared_.kv[1 - claims_.count % 2]; }
  __device__ __forceinline__ const Work& work() const { return shared_.work[claims_.count % 2]; }

  __device__ __forceinline__ void skip_claim() {
    release_staging();
    shared_.k_full.wait(tile().parity());
    shared_.v_full.wait(tile().parity());
    arrive(shared_.v_empty);
    if constexpr (Config::kStageInDs) { arrive(shared_.k_empty); }
  }

  // Once a claim, when dK and dV of the one before have had time to leave. In the place of dS: only the second step of the
  // claim writes there, and it has waited for what this thread announces after the first.
  __device__ __forceinline__ void release_staging() {
    if (thread_ == 0 && claims_.count > 0) {
      ptx::bulk_wait_read();
      if constexpr (!Config::kStageInDs) { shared_.k_empty.arrive(); }
    }
  }

  __device__ __forceinline__ void begin_first_step(Registers& r) {
    shared_.k_full.wait(tile().parity());
    issue_s(r, step_);
    release_staging();
    wait_products<0>();
    pin(r.scores);
    make_p(r.scores, step_);
    round_p(r);
    wait_for_dout(step_);
    issue_dv(r, step_);
    shared_.v_full.wait(tile().parity());
    load_rows<Config::kKey>(value_tile(), consumer_ * kWarpgroupRows, r.v, thread_ / 32, thread_ % 32);
    issue_dp(r, step_);
    wait_products<0>();
    pin(r.dv);
    pin(r.scores);
    pin(r.rounded);
    arrive(shared_.v_empty);
  }

  template <int kSlot>
  __device__ __forceinline__ void end_step_begin_next(Registers& r) {
    const StepInSlot<kSlot> step{step_};
    const StepInSlot<1 - kSlot> next{step_.next()};
    make_ds(r, step);
    issue_s(r, next);
    announce(shared_.ds_full[step.slot()]);
    issue_dk(r, step);
    wait_products<1>();  // S
    pin(r.scores);
    make_p(r.scores, next);
    wait_for_dout(next);
    wait_products<0>();  // dK
    pin(r.dk);
    pin(r.rounded);
    shared_.q_empty[step.slot()].arrive();
    round_p(r);

    issue_dq(r, step);
    issue_dv(r, next);
    if constexpr (kDpFirst) { issue_dp(r, next); }
    wait_for_staging(step);
    wait_products<kDpFirst ? 2 : 1>();  // dQ
    pin(r.dq());
    stage_dq(r.dq(), step);
    if constexpr (!kDpFirst) { issue_dp(r, next); }
    announce(shared_.dq_full[step.slot()]);

    step_ = step_.next();
    wait_products<0>();  // dV and dP
    pin(r.dv);
    pin(r.scores);
    pin(r.rounded);
  }

  __device__ __forceinline__ void end_last_step(Registers& r) {
    make_ds(r, step_);
    announce(shared_.ds_full[step_.slot()]);
    issue_dk(r, step_);
    issue_dq(r, step_);
    wait_for_staging(step_);
    wait_products<0>();
    pin(r.dk);
    pin(r.dq());
    pin(r.rounded);
    shared_.q_empty[step_.slot()].arrive();
    stage_dq(r.dq(), step_);
    announce(shared_.dq_full[step_.slot()]);
    step_ = step_.next();
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_s(Registers& r, AnyStep step) {
    shared_.q_full[step.slot()].wait(step.parity());
    multiply<Element, Config::kHeadDim>(r.scores, KeyRows(descriptor_of_(key_tile()), consumer_ * kWarpgroupRows),
                                        QueryRows(descriptor_of_(shared_.q[step.slot()])));
  }

  template <typename AnyStep>
  __device__ __forceinline__ void wait_for_dout(AnyStep step) const {
    shared_.dout_full[step.slot()].wait(step.parity());
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_dv(Registers& r, AnyStep step) {
    multiply_add<Element>(r.dv, r.rounded, QuerySum(descriptor_of_(shared_.dout[step.slot()])));
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_dp(Registers& r, AnyStep step) {
    multiply<Element>(r.scores, r.v, QueryRows(descriptor_of_(shared_.dout[step.slot()])));
  }

  template <typename AnyStep>
  __device__ __forceinline__ void issue_dk(Registers& r, AnyStep step) {
    multiply_add<Element>(r.dk, r.rounded, QuerySum(descriptor_of_(shared_.q[step.slot()])));
  }

  // A consumer that has arrived on ds_full has completed dQ of the step before, so two buffers of dS need no `empty`
  // barrier.
  template <typename AnyStep>
  __device__ __forceinline__ void issue_dq(Registers& r, AnyStep step) {
    shared_.ds_full[step.slot()].wait(step.parity());
    multiply<Element, Config::kKey>(r.dq(),
                                    KeySum(descriptor_of_(key_tile()), Config::kSplitDqByHeadDim ? consumer_ : 0),
                                    QueryRows(descriptor_of_(shared_.ds[step.slot()]),
                                              Config::kSplitDqByHeadDim ? 0 : consumer_ * Config::kDqQueries));
  }

  // S becomes P.
  template <typename AnyStep>
  __device__ __forceinline__ void make_p(Scores& s, AnyStep step) const {
    const int first_query = shared_.query_tile[step.slot()] * Config::kQuery;
    const int first_key = shared_.kv_tile[step.slot()] * Config::kKey;
    const Mask<Config::kCausal> mask{params_.problem.seqlen_k, params_.problem.diagonal};
    if (mask.needs_masking(first_query, first_key, Config::kKey)) {
      apply_mask(s, mask, first_query, first_key + consumer_ * kWarpgroupRows);
    }
    exponentiate(s, shared_.lse[step.slot()]);
  }

  __device__ __forceinline__ void round_p(Registers& r) const {
    pack_slices<Element>(r.rounded, r.scores);
    pin(r.rounded);
  }

  // dP and P become dS, rounded, in registers for dK and in shared memory for dQ.
  template <typename AnyStep>
  __device__ __forceinline__ void make_ds(Registers& r, AnyStep step) {
    // Lets ptxas mix the stores with the sums, which pays where there are many.
    if constexpr (kScoreRegisters > 32) { forget(thread_); }
    differentiate(r.rounded, r.scores, shared_.delta[step.slot()]);
    shared_.dout_empty[step.slot()].arrive();
    store_transposed(shared_.ds[step.slot()] + consumer_ * kDsBlock, r.rounded, thread_ / 32, thread_ % 32);
  }

  template <int kSize>
  static __device__ __forceinline__ void clear(float (&acc)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) { acc[i] = 0.f; }
  }

  __device__ __forceinline__ void apply_mask(Scores& s, const Mask<Config::kCausal>& mask, int first_query,
                                             int first_key) const {
#pragma unroll
    for (int i = 0; i < kScoreRegisters; ++i) {
      if (!mask.visible(first_query + fragment_column(thread_, i), first_key + fragment_row(thread_, i))) {
        s[i] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void exponentiate(Scores& s, const float* lse) const {
#pragma unroll
    for (int slice = 0; slice < kScoreRegisters / 8; ++slice) {
      const SliceStatistics row = statistics(lse, slice);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = s[8 * slice + i];
        x = ptx::exp2_approx(fmaf(x, params_.softmax_scale_log2, -row.of[i / 4][i % 2]));
      }
    }
  }

  __device__ __forceinline__ void differentiate(RoundedScores& p, const Scores& dp, const float* delta) const {
#pragma unroll
    for (int slice = 0; slice < kScoreRegisters / 8; ++slice) {
      const SliceStatistics row = statistics(delta, slice);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const x = dp + 8 * slice + 2 * i;
        p[slice][i] = multiply_pair<Element>(p[slice][i], x[0] - row.of[i / 2][0], x[1] - row.of[i / 2][1]);
      }
    }
  }

  // Of the queries (columns) of a thread's registers 8 * slice ... 8 * slice + 7.
  struct SliceStatistics {
    float of[2][2];
  };

  __device__ __forceinline__ SliceStatistics statistics(const float* rows, int slice) const {
    const float4 four = *reinterpret_cast<const float4*>(rows + slice_statistics(thread_, slice));
    return {{{four.x, four.y}, {four.z, four.w}}};
  }

  // One arrival a warp: its threads have finished with what the barrier guards.
  __device__ __forceinline__ void arrive(const cutlass::arch::ClusterBarrier& barrier) const {
    __syncwarp();
    if (cute::elect_one_sync()) { barrier.arrive(); }
  }

  // What the threads of the warp have stored may be read by products and bulk operations. The fence takes hundreds of
  // clocks, so a product should be running.
  __device__ __forceinline__ void announce(const cutlass::arch::ClusterBarrier& barrier) const {
    ptx::fence_async_shared();
    arrive(barrier);
  }

  template <typename AnyStep>
  __device__ __forceinline__ void wait_for_staging(AnyStep step) const {
    shared_.dq_empty[step.slot()].wait(step.empty_parity());
  }

  template <typename AnyStep>
  __device__ __forceinline__ void stage_dq(const DqPartial& dq, AnyStep step) {
    float4* const buffer = reinterpret_cast<float4*>(shared_.dq[step.slot()]);
    const auto store = [&](int quad, float x, float y, float z, float w) {
      buffer[Layout::quad_index(consumer_, quad, thread_)] = make_float4(x, y, z, w);
    };
    if (stage_dq_on_grid(dq, step.count, store)) { return; }
#pragma unroll
    for (int quad = 0; quad < Layout::kQuads; ++quad) {
      store(quad, dq[4 * quad], dq[4 * quad + 1], dq[4 * quad + 2], dq[4 * quad + 3]);
    }
  }

  // Order-free, unless the head needs the order.
  template <typename Store>
  __device__ __forceinline__ bool stage_dq_on_grid(const DqPartial& dq, uint32_t step, const Store& store) {
    if constexpr (Config::kOrderFree) {
      const int slot = RingIndex<Config::kGridSlots>{step}.slot();
      forget(thread_);
      const int tile = shared_.grid_tile[slot];
      if (tile == kNoGrid) { return false; }
      const Grid<Config> grid(shared_.scales[slot], consumer_, thread_);
      grid.round(dq, params_.workspace.scales + int64_t(tile) * Config::kQuery, store);
      return true;
    }
    return false;
  }

  // Whether the sums are complete, and this claim is the one to write them.
  __device__ __forceinline__ bool sum_over_splits(Gradient& dk, Gradient& dv) {
    if (params_.problem.head_splits == 1) { return true; }
    return carry_gradients<Config>(params_, work(), dk, dv);
  }

  // Rounds dK and dV, stages them, and lets TMA write what lies inside the tensors.
  __device__ __forceinline__ void store_gradients(Gradient& dk, const Gradient& dv) {
    RegisterSlice packed[kGradientRegisters / 8];
    Element* const dv_rows = staged_dv();
    Element* const dk_rows = staged_dk();
    pack_slices<Element>(packed, dv);
    sync_consumers_done_with_k();
    store_rows<kWarpgroupRows>(dv_rows, 0, packed, thread_ / 32, thread_ % 32);
#pragma unroll
    for (int i = 0; i < kGradientRegisters; ++i) { dk[i] *= params_.softmax_scale; }
    pack_slices<Element>(packed, dk);
    store_rows<kWarpgroupRows>(dk_rows, 0, packed, thread_ / 32, thread_ % 32);
    ptx::fence_async_shared();
    sync_warpgroup(consumer_);
    if (thread_ == 0) {
      store_rows_by_tma(params_.dv, dv_rows);
      store_rows_by_tma(params_.dk, dk_rows);
      ptx::bulk_commit();
    }
  }

  // The consumer's rows of dV and dK on their way out. Both go where its last dS was; where they are too large for that, dV
  // goes in the place of K and dK takes both slots of dS.
  __device__ __forceinline__ Element* staged_dv() const {
    return Config::kStageInDs ? shared_.ds[step_.previous().slot()] + consumer_ * kDsBlock
                              : key_tile() + consumer_ * kGradientElements;
  }
  __device__ __forceinline__ Element* staged_dk() const {
    return Config::kStageInDs ? staged_dv() + kGradientElements : shared_.ds[0] + consumer_ * kGradientElements;
  }

  // Each consumer's dQ reads all of K and dS.
  static __device__ __forceinline__ void sync_consumers_done_with_k() {
    cutlass::arch::NamedBarrier::sync(Config::kConsumers * kWarpgroupThreads, 0u);
  }

  __device__ __forceinline__ void store_rows_by_tma(const CUtensorMap& map, const Element* rows) const {
    const Work& tile_of = work();
    const int first_row = tile_of.kv_tile * Config::kKey + consumer_ * kWarpgroupRows;
#pragma unroll
    for (int column = 0; column < Config::kHeadDim; column += kSwizzleColumns) {
      cute::SM90_TMA_STORE_4D::copy(&map, rows + column * kWarpgroupRows, column, first_row, tile_of.kv_head,
                                    tile_of.batch);
    }
  }

  Shared& shared_;
  const KernelParams& params_;
  const TileDescriptors descriptor_of_;
  const int consumer_;
  int thread_;
  RingIndex<Config::kClaimSlots> claims_;
  Step step_;
};

}  // namespace dash_attn::backward
