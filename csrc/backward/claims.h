// Handing out work. The loader of a cluster's first CTA takes the next number from a counter in global memory and sends
// it to every CTA of the cluster through a short ring in shared memory, ahead of its use.
//
// A claim is what makes waiting safe: a CTA that holds claim n waits only for claims below n (schedule/order.h), all of
// which are held by CTAs that are running or have finished, so the lowest unfinished claim never waits.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "../device/ptx.h"
#include "../schedule/assignment.h"
#include "config.h"
#include "params.h"

namespace dash_attn::backward {

template <typename Config>
__device__ __forceinline__ int cluster_cta_rank() {
  return Config::kClusterSize == 1 ? 0 : int(cute::block_rank_in_cluster());
}

// Called by the loader thread of every CTA, once per claim: the cluster's first one takes a number and sends it to all.
template <typename Config>
__device__ __forceinline__ void request_claim(SharedStorage<Config>& shared, const KernelParams& params,
                                              const RingIndex<Config::kClaimSlots>& ring) {
  if constexpr (Config::kClusterSize == 1) {
    shared.claim_empty[ring.slot()].wait(ring.empty_parity());
    shared.claim[ring.slot()] = atomicAdd(params.workspace.next_claim, 1);
    shared.claim_full[ring.slot()].arrive();
  } else {
    shared.claim_full[ring.slot()].arrive_and_expect_tx(sizeof(int));
    if (cluster_cta_rank<Config>() != 0) { return; }
    shared.claim_empty[ring.slot()].wait(ring.empty_parity());
    const int claim = atomicAdd(params.workspace.next_claim, 1);
#pragma unroll
    for (int cta = 0; cta < Config::kClusterSize; ++cta) {
      ptx::store_async(ptx::map_shared(&shared.claim[ring.slot()], cta), claim,
                       ptx::map_shared(&shared.claim_full[ring.slot()], cta));
    }
  }
}

template <typename Config>
__device__ __forceinline__ void arrive_on_first_cta(const cutlass::arch::ClusterBarrier& barrier) {
  if constexpr (Config::kClusterSize == 1) {
    barrier.arrive();
  } else {
    barrier.arrive(0u);
  }
}

enum class Reader { kThread, kWarp };

// Waits for the next claim; returns false when there is no more work. A warp reads as a whole and arrives once.
template <Reader kReader, typename Config>
__device__ __forceinline__ bool next_work(Work& work, SharedStorage<Config>& shared, const KernelParams& params,
                                          const RingIndex<Config::kClaimSlots>& ring) {
  shared.claim_full[ring.slot()].wait(ring.parity());
  const int claim = shared.claim[ring.slot()];
  if constexpr (kReader == Reader::kWarp) { __syncwarp(); }
  if (kReader == Reader::kThread || cute::elect_one_sync()) {
    arrive_on_first_cta<Config>(shared.claim_empty[ring.slot()]);
  }
  if (claim >= params.num_claims) { return false; }
  work = assign<Config::kPolicy>(specialised_problem<Config>(params), claim, cluster_cta_rank<Config>());
  return true;
}

}  // namespace dash_attn::backward
