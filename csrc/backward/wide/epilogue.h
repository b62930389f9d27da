// The end of a work tile: a consumer adds the sums of the previous splits to its gradient, dV or dK, rounds it, stages
// it in place of V or K, and writes it by TMA.
//
// The caller has made sure that nobody reads that V or K any more. The next tile may be loaded there once TMA has read
// the staged gradient. Only one thread waits for that.
#pragma once

#include "../../device/fragment.h"
#include "../../device/tma.h"
#include "../../device/warp_roles.h"
#include "../carried_sums.h"
#include "../params.h"
#include "../split_reduction.h"
#include "storage.h"

namespace dash_attn::backward::wide {

// A gradient of which a thread holds, for each block of 64 columns, its part of the transpose over all keys.
template <typename Variant, int kColumns>
struct Gradient {
  static constexpr int kBlocks = kColumns / kWarpgroupRows;
  static constexpr int kBlockRegisters = Variant::kKey / 2;
  using Block = float[kBlockRegisters];

  Block block[kBlocks];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (Block& b : block) { dash_attn::clear(b); }
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (Block& b : block) {
#pragma unroll
      for (float& x : b) { x *= factor; }
    }
  }
  __device__ __forceinline__ void fence_operand() {
#pragma unroll
    for (Block& b : block) { dash_attn::fence_operand(b); }
  }
};

// The first float of a KV tile's sum in the workspace. dK follows dV.
template <typename Variant>
__device__ __forceinline__ int64_t first_float_of_sum(const WorkTile& work, bool is_dk) {
  constexpr int kTileFloats = Variant::kKey * (Variant::kQkDim + Variant::kValueDim);
  return int64_t(work.split_tile) * kTileFloats + (is_dk ? Variant::kKey * Variant::kValueDim : 0);
}

template <typename Variant, int kColumns>
__device__ __forceinline__ auto& registers_of(Gradient<Variant, kColumns>& gradient) {
  return reinterpret_cast<float (&)[kColumns / kWarpgroupRows * Variant::kKey / 2]>(gradient.block);
}

// Clears the gradient, or loads what the previous call has left.
template <typename Variant, int kColumns>
__device__ __forceinline__ void begin_sum(const KernelParams& params, const WorkTile& work,
                                          Gradient<Variant, kColumns>& gradient, bool is_dk) {
  gradient.clear();
  if constexpr (Variant::kMayCarry) {
    begin_carried_sum(params, first_float_of_sum<Variant>(work, is_dk), int(is_dk), registers_of(gradient));
  }
}

template <typename Variant, int kColumns>
__device__ __forceinline__ bool reduce_splits(const KernelParams& params, const WorkTile& work,
                                              Gradient<Variant, kColumns>& gradient, bool is_dk) {
  constexpr int kRegisters = kColumns / kWarpgroupRows * Variant::kKey / 2;
  const int thread = read_thread_index() % kWarpgroupThreads;
  const SplitSum<kRegisters> sum(
      params.workspace.split_semaphores + 2 * int64_t(work.split_tile) + is_dk,
      reinterpret_cast<float4*>(params.workspace.split_sums) + first_float_of_sum<Variant>(work, is_dk) / 4, int(is_dk),
      thread);
  auto& registers = registers_of(gradient);
  const bool is_last = work.split + 1 == work.splits;
  if (work.split > 0) { sum.add_to(registers, work.split); }
  if (!is_last) { sum.pass_on(registers, work.split); }
  return is_last;
}

// Returns whether the gradient is complete once the sums of the previous splits are added. If not, it is left to
// whoever continues it.
template <typename Variant, int kColumns>
__device__ __forceinline__ bool is_complete(const KernelParams& params, const WorkTile& work,
                                            Gradient<Variant, kColumns>& gradient, bool is_dk) {
  if (Variant::kMayCarry && params.carried.exist) {
    return end_carried_sum(params, first_float_of_sum<Variant>(work, is_dk), int(is_dk), registers_of(gradient));
  }
  return work.splits == 1 || reduce_splits<Variant>(params, work, gradient, is_dk);
}

template <typename Variant, int kColumns>
__device__ __forceinline__ void store_gradient(const CUtensorMap& map, typename Variant::Element* place,
                                               const KernelParams& params, const WorkTile& work,
                                               const Gradient<Variant, kColumns>& gradient, int named_barrier) {
  using Swizzle = typename Variant::Swizzle;
  const int thread = read_thread_index() % kWarpgroupThreads;
#pragma unroll
  for (int b = 0; b < Gradient<Variant, kColumns>::kBlocks; ++b) {
    RegisterSlice packed[Variant::kKey / kProductDepth];
    pack_slices<typename Variant::Element>(packed, gradient.block[b]);
    store_transposed<Swizzle, Variant::kKey>(place + b * Variant::kKey * kWarpgroupRows, packed, thread / 32,
                                             thread % 32);
  }
  ptx::fence_async_shared();
  sync_warpgroup(named_barrier);
  if (thread == 0) {
    const RowOrigin rows = RowOrigin::of(params.pack.is_pack(), work.k_outer, work.sequence.seqlen_k);
    store_tile<Swizzle, Variant::kKey, kColumns>(map, place, rows, work.kv_tile * Variant::kKey, work.kv_head);
    ptx::bulk_commit();
    ptx::bulk_wait_read();
  }
}

}  // namespace dash_attn::backward::wide
