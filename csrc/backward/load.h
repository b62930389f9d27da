// The loader: a warp that claims work, brings in K, V, Q, dO and D by TMA, and LSE itself.
//
//   order of loads in a claim:   K  dO0  Q0  V   dO1  Q1   dO2  Q2  ...
//   (Q and dO have two stages each; the place of dO is free half a step before that of Q. K goes where V of the claim
//   before was, and so arrives before that claim has ended; V where its K was, when that is done with. S needs K and Q0
//   only, so it starts while V is on its way)
//
// LSE is the caller's: natural, at any address that fp32 may have. All lanes read it, while they wait for the place of Q,
// and write it in base 2 in the consumers' order. All else is done by one of them.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "../device/fragment.h"
#include "claims.h"
#include "config.h"
#include "params.h"
#include "plan.h"

namespace dash_attn::backward {

// Query tiles are read once by each KV tile of a head, K and V once in all.
template <typename Config>
class Loader {
 public:
  using Element = typename Config::Element;
  using Shared = SharedStorage<Config>;
  using Barrier = typename Shared::TransactionBarrier;

  __device__ Loader(Shared& shared, const KernelParams& params) : shared_(shared), params_(params) {}

  __device__ void run() {
    Work work;
    for (;; claims_ = claims_.next()) {
      if (is_leader()) { request_claim(shared_, params_, claims_); }
      if (!next_work<Reader::kWarp>(work, shared_, params_, claims_)) {
        // The conversion may start: it waits for adds of claims that have all been taken.
        ptx::launch_dependents();
        return;
      }
      shared_.v_empty.wait(tile().empty_parity());
      if (work.valid()) {
        load_claim(work);
      } else {
        skip_claim();
      }
    }
  }

 private:
  static constexpr int kLseOfLane = Config::kQuery / 32;

  // Of queries lane, lane + 32, ... of a tile.
  struct Lse {
    float of[kLseOfLane];
  };

  // Always the same lane. Called by the whole warp.
  static __device__ __forceinline__ bool is_leader() { return cute::elect_one_sync(); }

  // There is one K and one V a claim.
  __device__ __forceinline__ RingIndex<1> tile() const { return {claims_.count}; }

  __device__ __forceinline__ void skip_claim() {
    if (!is_leader()) { return; }
    shared_.k_full.arrive();
    shared_.k_empty.wait(tile().empty_parity());
    shared_.v_full.arrive();
  }

  // What the steps need of the claim and the plan stays in shared memory, to spare registers.
  __device__ void load_claim(const Work& claimed) {
    const int place = claims_.count % 2;
    Work& work = shared_.work[place];
    if (is_leader()) {
      work = claimed;
      load_key_tile(params_.k, shared_.k_full, shared_.kv[place], work);
    }
    __syncwarp();
    bool v_pending = true;
    for (bool last = false; !last; plan_ = plan_.next()) {
      const PlannedStep& step = wait_for_step(shared_, plan_);
      load_dout(step, work);
      load_q(step, work);
      last = step.is_last_of_claim();
      release_step(shared_, plan_);
      if (v_pending) {
        shared_.k_empty.wait(tile().empty_parity());
        if (is_leader()) { load_key_tile(params_.v, shared_.v_full, shared_.kv[1 - place], work); }
        v_pending = false;
      }
    }
  }

  __device__ __forceinline__ void load_key_tile(const CUtensorMap& map, Barrier& full, Element* tile,
                                                const Work& work) {
    full.arrive_and_expect_tx(Config::kKeyTileBytes);
    load_tile<Config::kKey>(map, full, tile, work.kv_tile, work.kv_head, work.batch, kReadOnce);
  }

  // What comes after a wait is ready before it: consumers wait for Q.
  __device__ __forceinline__ void load_q(const PlannedStep& step, const Work& work) {
    const RingIndex<Config::kStages> stage{plan_.count};
    const int slot = stage.slot();
    Barrier& full = shared_.q_full[slot];
    const int query_tile = step.query_tile, head = step.head(), batch = work.batch;
    const Lse lse = read_lse(query_tile, head, batch);
    shared_.q_empty[slot].wait(stage.empty_parity());
    if (is_leader()) {
      load_tile<Config::kQuery>(params_.q, full, shared_.q[slot], query_tile, head, batch, kKeepInL2);
      shared_.query_tile[slot] = query_tile;
      shared_.kv_tile[slot] = work.kv_tile;
    }
    write_lse(lse, shared_.lse[slot]);
    if (is_leader()) {
      full.arrive_and_expect_tx(Config::kQueryTileBytes);
    } else {
      full.arrive();
    }
  }

  __device__ __forceinline__ void load_dout(const PlannedStep& step, const Work& work) {
    const RingIndex<Config::kStages> stage{plan_.count};
    const int slot = stage.slot();
    Barrier& full = shared_.dout_full[slot];
    const int query_tile = step.query_tile, head = step.head(), batch = work.batch;
    shared_.dout_empty[slot].wait(stage.empty_parity());
    if (!is_leader()) { return; }
    load_tile<Config::kQuery>(params_.dout, full, shared_.dout[slot], query_tile, head, batch, kKeepInL2);
    const int64_t first_row = int64_t(step.tile) * Config::kQuery;
    copy_rows(params_.workspace.delta + first_row, full, shared_.delta[slot], Config::kRowStatBytes);
    if constexpr (Config::kOrderFree) {
      const int grid_slot = RingIndex<Config::kGridSlots>{plan_.count}.slot();
      shared_.grid_tile[grid_slot] = step.rank == kAnyTurn ? step.tile : kNoGrid;
      copy_rows(params_.workspace.scales + first_row, full, shared_.scales[grid_slot], Config::kScaleBytes);
    }
    full.arrive_and_expect_tx(Config::kQueryTileBytes + Config::kRowStatBytes + Config::kScaleBytes);
  }

  __device__ __forceinline__ Lse read_lse(int query_tile, int head, int batch) const {
    const Problem& problem = params_.problem;
    const int first = query_tile * Config::kQuery + threadIdx.x % 32;
    const int heads_before = batch * problem.kv_heads * problem.queries_per_kv + head;
    const float* const rows = params_.softmax_lse + (int64_t(heads_before) * problem.seqlen_q + first);
    Lse lse;
#pragma unroll
    for (int i = 0; i < kLseOfLane; ++i) { lse.of[i] = first + 32 * i < problem.seqlen_q ? rows[32 * i] : INFINITY; }
    return lse;
  }

  // In base 2; +inf for rows that see no key and past the end, so that P = 0 there.
  static __device__ __forceinline__ void write_lse(const Lse& lse, float* tile) {
#pragma unroll
    for (int i = 0; i < kLseOfLane; ++i) {
      const float value = lse.of[i];
      tile[statistic_position(threadIdx.x % 32) + 32 * i] = value == -INFINITY ? INFINITY : value * float(M_LOG2E);
    }
  }

  template <typename T>
  static __device__ __forceinline__ void copy_rows(const T* rows, Barrier& full, T* tile, int bytes) {
    cute::SM90_BULK_COPY_G2S::copy(rows, reinterpret_cast<uint64_t*>(&full), tile, bytes);
  }

  template <int kRows>
  __device__ __forceinline__ void load_tile(const CUtensorMap& map, Barrier& full, Element* tile, int index, int head,
                                            int batch, uint64_t hint) {
#pragma unroll
    for (int column = 0; column < Config::kHeadDim; column += kSwizzleColumns) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, tile + column * kRows, column,
                                   index * kRows, head, batch);
    }
  }

  Shared& shared_;
  const KernelParams& params_;
  RingIndex<Config::kClaimSlots> claims_;
  RingIndex<Config::kPlanSlots> plan_;
};

}  // namespace dash_attn::backward
