// A block of 64 columns of dQ, from the registers of a consumer to the adder of its part.
#pragma once

#include <type_traits>
#include <utility>

#include "../../device/warp_roles.h"
#include "../dq_layout.h"
#include "../order_free/rounding.h"
#include "../params.h"
#include "storage.h"

namespace dash_attn::backward::wide {

// Calls function(std::integral_constant<int, i>) for each i below kCount.
template <int... kI, typename Function>
__device__ __forceinline__ void for_each(std::integer_sequence<int, kI...>, const Function& function) {
  (function(std::integral_constant<int, kI>{}), ...);
}
template <int kCount, typename Function>
__device__ __forceinline__ void for_each(const Function& function) {
  for_each(std::make_integer_sequence<int, kCount>{}, function);
}

template <typename Variant, int kBlock>
class DqStager {
 public:
  using Layout = DqLayout<Variant>;
  using Partial = float[Layout::kRegisters];

  __device__ __forceinline__ DqStager(SharedStorage<Variant>& shared, const KernelParams& params, uint32_t step,
                                      int thread)
      : shared_(shared), params_(params), step_(step), thread_(thread) {
    forget(step_);  // no register for places in the ring that blocks have in common
    first_.count = step_ * Variant::dq_pieces(kPart) + (kBlock - Variant::first_dq_block(kPart)) * kPieces;
  }

  // `issue_next` is called when `dq` is free: what the adder is told last takes long, and products should run.
  template <typename Issue>
  __device__ __forceinline__ void stage(const Partial& dq, const Issue& issue_next) {
    const auto store = [&](int quad, float x, float y, float z, float w) {
      const int piece = quad / kQuadsOfPiece;
      if (quad % kQuadsOfPiece == 0) {
        if (piece > 0 && piece % kAtOnce == 0) { announce(piece - kAtOnce, piece); }
        shared_.dq_empty[slot(piece)].wait(at(piece).empty_parity());
      }
      float4* const buffer = reinterpret_cast<float4*>(shared_.dq[slot(piece)]);
      buffer[Layout::quad_index(quad % kQuadsOfPiece, thread_)] = make_float4(x, y, z, w);
    };
    if (!stage_as_integers(dq, store)) {
#pragma unroll
      for (int quad = 0; quad < Layout::kQuads; ++quad) {
        const float* const x = dq + 4 * quad;
        store(quad, x[0], x[1], x[2], x[3]);
      }
    }
    issue_next();
    announce((kPieces - 1) / kAtOnce * kAtOnce, kPieces);
  }

 private:
  static constexpr int kPart = kBlock < Variant::first_dq_block(1) ? 0 : 1;
  static constexpr int kPieces = Variant::kDqPiecesOfBlock, kQuadsOfPiece = Layout::kQuads / kPieces;
  using Slot = RingIndex<Variant::dq_slots(kPart)>;
  static constexpr int kFirstSlot = kPart == 0 ? 0 : Variant::dq_slots(0);
  // Pieces are announced together: it takes a fence.
  static constexpr int kAtOnce = min_int(kPieces, Variant::dq_slots(kPart));

  __device__ __forceinline__ Slot at(int piece) const { return {first_.count + piece}; }
  __device__ __forceinline__ int slot(int piece) const { return kFirstSlot + at(piece).slot(); }

  // Order-free, unless the head needs the order.
  template <typename Store>
  __device__ __forceinline__ bool stage_as_integers(const Partial& dq, const Store& store) const {
    if constexpr (Variant::kOrderFree) {
      const uint32_t scale_slot = RingIndex<Variant::kScaleSlots>{step_}.slot();
      if (shared_.scale_tile[scale_slot] == kNoScale) { return false; }
      const uint8_t* const scales = shared_.scales[scale_slot] + fragment_row(thread_, 0);
      const float of_row[] = {scale_of(scales[0]), scale_of(scales[8])};
      const auto mark = [&](int i) {
        forget_memory();  // rare, and no register is left for what it needs
        const int64_t first_row = int64_t(shared_.scale_tile[scale_slot]) * Variant::kQuery;
        params_.workspace.scales[first_row + fragment_row(read_thread_index() % kWarpgroupThreads, i)] =
            fixed_point::kNotFinite;
      };
      round_to_units(dq, [&](int i) { return of_row[i / 2 % 2]; }, mark, store);
      return true;
    }
    return false;
  }

  // What has been staged may be added.
  __device__ __forceinline__ void announce(int first, int end) const {
    ptx::fence_async_shared();
    __syncwarp();
#pragma unroll
    for (int piece = first; piece < end; ++piece) { arrive_once(shared_.dq_full[slot(piece)]); }
  }

  SharedStorage<Variant>& shared_;
  const KernelParams& params_;
  uint32_t step_;
  int thread_;
  Slot first_;
};

}  // namespace dash_attn::backward::wide
