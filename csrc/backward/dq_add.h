// The adder: one thread that adds each dQ partial to global memory when its turn has come. The only place that waits a turn.
//
// A partial of rank r at a query tile may be added when turns[query tile] == r, that is when partial r - 1 has been
// PERFORMED at gpu scope, not merely issued. The chain that makes this so, from CTA to CTA:
//   bulk add -> wait_group 0 (performed) -> fence, st.release turns = r + 1
//   -> ld.acquire turns -> fence.proxy.async (the next bulk add is an access of the async proxy)
// Rank 0 stores instead of adding, so the accumulator is never cleared.
#pragma once

#include "claims.h"
#include "config.h"
#include "params.h"

namespace dash_attn::backward {

template <typename Config>
class Adder {
 public:
  using Shared = SharedStorage<Config>;

  __device__ Adder(Shared& shared, const KernelParams& params) : shared_(shared), params_(params) {}

  __device__ void run() {
    Work work;
    while (next_work<Reader::kThread>(work, shared_, params_, claims_)) {
      if (work.valid) { add_claim(work); }
    }
  }

 private:
  __device__ void add_claim(const Work& work) {
    const Problem& problem = params_.problem;
    const int steps = problem.live_query_tiles(work.kv_tile);
    const int first_head = (work.batch * problem.kv_heads + work.kv_head) * problem.queries_per_kv;
    for (int i = 0; i < problem.queries_per_kv; ++i) {
      for (int step = 0; step < steps; ++step) {
        const int query_tile = Config::Order::visit(problem, work.kv_tile, step);
        const int rank = Config::Order::rank(problem, work.kv_tile, query_tile);
        add_tile(int64_t(first_head + i) * problem.query_tiles + query_tile, rank);
      }
    }
  }

  __device__ __forceinline__ void add_tile(int64_t tile, int rank) {
    float* const accumulator = params_.workspace.dq_accumulator + tile * Config::kDqTileFloats;
    const float* const partial = shared_.dq[buffers_.slot()];
    int* const turn = params_.workspace.turns + tile;
    constexpr int kBytes = Config::kDqTileFloats * sizeof(float);

    shared_.dq_full[buffers_.slot()].wait(buffers_.parity());
    if (rank == 0) {
      ptx::bulk_store(accumulator, partial, kBytes);
    } else {
      while (ptx::load_acquire(turn) != rank) {}
      ptx::fence_async_global();
      ptx::bulk_add_f32(accumulator, partial, kBytes);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_performed();
    ptx::fence_async_global();
    __threadfence();
    ptx::store_release(turn, rank + 1);
    shared_.dq_empty[buffers_.slot()].arrive();
    buffers_ = buffers_.next();
  }

  Shared& shared_;
  const KernelParams& params_;
  RingIndex<Config::kClaimSlots> claims_;
  RingIndex<Config::kStages> buffers_;
};

}  // namespace dash_attn::backward
