// The loader: one thread that claims work and brings in K, V, Q, dO, LSE and D by TMA.
//
//   order of loads in a claim:   K  Q0  V  dO0   Q1  dO1   Q2  dO2  ...
//   (S needs K and Q0 only, so it starts while V and dO0 are on their way; Q and dO have two stages each)
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "claims.h"
#include "config.h"
#include "params.h"

namespace dash_attn::backward {

// Query tiles are read once by each KV tile of a head, K and V once in all.
constexpr auto kKeepInL2 = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
constexpr auto kReadOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);

template <typename Config>
class Loader {
 public:
  using Shared = SharedStorage<Config>;

  __device__ Loader(Shared& shared, const KernelParams& params) : shared_(shared), params_(params) {}

  __device__ void run() {
    Work work;
    while (true) {
      request_claim(shared_, params_, claims_);
      if (!next_work<Reader::kThread>(work, shared_, params_, claims_)) { return; }
      if (work.valid) { load_claim(work); }
    }
  }

 private:
  __device__ void load_claim(const Work& work) {
    const Problem& problem = params_.problem;
    const int first_key = work.kv_tile * Config::kKey;
    const int steps = problem.live_query_tiles(work.kv_tile);

    shared_.kv_empty.wait(tiles_.empty_parity());
    shared_.k_full.arrive_and_expect_tx(Config::kKeyTileBytes);
    load_tile<Config::kKey>(params_.k, shared_.k_full, shared_.k, first_key, work.kv_head, work.batch, kReadOnce);
    bool v_pending = true;
    for (int i = 0; i < problem.queries_per_kv; ++i) {
      const int head = work.kv_head * problem.queries_per_kv + i;
      for (int step = 0; step < steps; ++step) {
        const int query_tile = Config::Order::visit(problem, work.kv_tile, step);
        const int64_t row = stat_row(work.batch, head, query_tile);
        load_q(query_tile, head, work.batch, params_.workspace.lse_log2 + row);
        if (v_pending) {
          shared_.v_full.arrive_and_expect_tx(Config::kKeyTileBytes);
          load_tile<Config::kKey>(params_.v, shared_.v_full, shared_.v, first_key, work.kv_head, work.batch, kReadOnce);
          v_pending = false;
        }
        load_dout(query_tile, head, work.batch, params_.workspace.delta + row);
        stages_ = stages_.next();
      }
    }
    tiles_ = tiles_.next();
  }

  __device__ __forceinline__ int64_t stat_row(int batch, int head, int query_tile) const {
    const Problem& problem = params_.problem;
    const int64_t tiles = int64_t(batch * problem.kv_heads * problem.queries_per_kv + head) * problem.query_tiles + query_tile;
    return tiles * Config::kQuery;
  }

  __device__ __forceinline__ void load_q(int query_tile, int head, int batch, const float* lse_log2) {
    auto& full = shared_.q_full[stages_.slot()];
    shared_.q_empty[stages_.slot()].wait(stages_.empty_parity());
    shared_.query_tile[stages_.slot()] = query_tile;
    full.arrive_and_expect_tx(Config::kQueryTileBytes + Config::kRowStatBytes);
    load_tile<Config::kQuery>(params_.q, full, shared_.q[stages_.slot()], query_tile * Config::kQuery, head, batch, kKeepInL2);
    load_stat(lse_log2, full, shared_.lse[stages_.slot()]);
  }

  __device__ __forceinline__ void load_dout(int query_tile, int head, int batch, const float* delta) {
    auto& full = shared_.dout_full[stages_.slot()];
    shared_.dout_empty[stages_.slot()].wait(stages_.empty_parity());
    full.arrive_and_expect_tx(Config::kQueryTileBytes + Config::kRowStatBytes);
    load_tile<Config::kQuery>(params_.dout, full, shared_.dout[stages_.slot()], query_tile * Config::kQuery, head, batch, kKeepInL2);
    load_stat(delta, full, shared_.delta[stages_.slot()]);
  }

  template <int kRows>
  __device__ __forceinline__ void load_tile(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& full,
                                            typename Config::Element* tile, int first_row, int head, int batch, uint64_t hint) {
#pragma unroll
    for (int column = 0; column < Config::kHeadDim; column += kSwizzleColumns) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, tile + column * kRows, column, first_row, head,
                                   batch);
    }
  }

  __device__ __forceinline__ void load_stat(const float* stat, cutlass::arch::ClusterTransactionBarrier& full, float* tile) {
    cute::SM90_BULK_COPY_G2S::copy(stat, reinterpret_cast<uint64_t*>(&full), tile, Config::kRowStatBytes);
  }

  Shared& shared_;
  const KernelParams& params_;
  RingIndex<Config::kClaimSlots> claims_;
  RingIndex<1> tiles_;
  RingIndex<Config::kStages> stages_;
};

}  // namespace dash_attn::backward
