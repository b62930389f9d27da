// The loader: one thread that claims work and brings in K, V, Q, dO, LSE and D by TMA.
//
//   order of loads in a claim:   K  Q0  dO0  V   Q1  dO1   Q2  dO2  ...
//   (S needs K and Q0 only, so it starts while dO0 and V are on their way; Q and dO have two stages each. K goes where V
//   of the claim before was, and so arrives before that claim has ended; V where its K was, when that is done with)
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

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
      request_claim(shared_, params_, claims_);
      if (!next_work<Reader::kThread>(work, shared_, params_, claims_)) {
        // The conversion may start: it waits for adds of claims that have all been taken.
        ptx::launch_dependents();
        return;
      }
      shared_.v_empty.wait(tile().empty_parity());
      if (work.valid()) {
        load_claim(work);
      } else {
        shared_.k_full.arrive();
        shared_.k_empty.wait(tile().empty_parity());
        shared_.v_full.arrive();
      }
    }
  }

 private:
  // There is one K and one V a claim.
  __device__ __forceinline__ RingIndex<1> tile() const { return {claims_.count}; }

  __device__ void load_claim(const Work& work) {
    const int place = claims_.count % 2;
    shared_.work[place] = work;
    load_key_tile(params_.k, shared_.k_full, shared_.kv[place], work);
    const int first_head = first_query_head(params_.problem, work);
    PlannedStep step;
    bool v_pending = true;
    do {
      step = planned_step(shared_, plan_);
      const int head = first_head + step.head;
      load_q(step.query_tile, head, work.batch, step.tile);
      load_dout(step, head, work.batch);
      if (v_pending) {
        shared_.k_empty.wait(tile().empty_parity());
        load_key_tile(params_.v, shared_.v_full, shared_.kv[1 - place], work);
        v_pending = false;
      }
      plan_ = plan_.next();
    } while (!step.last_of_claim);
  }

  __device__ __forceinline__ void load_key_tile(const CUtensorMap& map, Barrier& full, Element* tile,
                                                const Work& work) {
    full.arrive_and_expect_tx(Config::kKeyTileBytes);
    load_tile<Config::kKey>(map, full, tile, work.kv_tile, work.kv_head, work.batch, kReadOnce);
  }

  __device__ __forceinline__ void load_q(int query_tile, int head, int batch, int tile_index) {
    const RingIndex<Config::kStages> stage{plan_.count};
    const int slot = stage.slot();
    shared_.q_empty[slot].wait(stage.empty_parity());
    shared_.query_tile[slot] = query_tile;
    shared_.kv_tile[slot] = shared_.work[claims_.count % 2].kv_tile;
    load_query_rows(params_.q, shared_.q_full[slot], shared_.q[slot], query_tile, head, batch);
    load_statistic(params_.workspace.lse_log2, shared_.q_full[slot], shared_.lse[slot], tile_index);
  }

  __device__ __forceinline__ void load_dout(const PlannedStep& step, int head, int batch) {
    const RingIndex<Config::kStages> stage{plan_.count};
    const int slot = stage.slot();
    shared_.dout_empty[slot].wait(stage.empty_parity());
    const int grid_slot = RingIndex<Config::kGridSlots>{plan_.count}.slot();
    if constexpr (Config::kOrderFree) { shared_.grid_tile[grid_slot] = step.rank == kAnyTurn ? step.tile : kNoGrid; }
    load_query_rows(params_.dout, shared_.dout_full[slot], shared_.dout[slot], step.query_tile, head, batch,
                    Config::kScaleBytes);
    load_statistic(params_.workspace.delta, shared_.dout_full[slot], shared_.delta[slot], step.tile);
    if constexpr (Config::kOrderFree) {
      cute::SM90_BULK_COPY_G2S::copy(params_.workspace.scales + int64_t(step.tile) * Config::kQuery,
                                     reinterpret_cast<uint64_t*>(&shared_.dout_full[slot]), shared_.scales[grid_slot],
                                     Config::kScaleBytes);
    }
  }

  __device__ __forceinline__ void load_query_rows(const CUtensorMap& map, Barrier& full, Element* tile, int query_tile,
                                                  int head, int batch, int further_bytes = 0) {
    full.arrive_and_expect_tx(Config::kQueryTileBytes + Config::kRowStatBytes + further_bytes);
    load_tile<Config::kQuery>(map, full, tile, query_tile, head, batch, kKeepInL2);
  }

  __device__ __forceinline__ void load_statistic(const float* rows, Barrier& full, float* tile, int tile_index) {
    cute::SM90_BULK_COPY_G2S::copy(rows + int64_t(tile_index) * Config::kQuery, reinterpret_cast<uint64_t*>(&full),
                                   tile, Config::kRowStatBytes);
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
