// The consumers: each warpgroup owns 64 rows of a tile of y, and adds up the products of x and W over the ring's
// stages, each of which runs while the one before it is waited for. Then each warp adds the bias, rounds once and
// writes its 16 rows by TMA, while the loader fills the ring for the next tile.
#pragma once

#include "../device/fragment.h"
#include "../device/warp_roles.h"
#include "config.h"

namespace dash_attn::linear {

template <typename Variant>
class Consumer {
 public:
  using Element = typename Variant::Element;
  using Shared = SharedStorage<Variant>;

  __device__ Consumer(Shared& shared, const Params<Element>& params)
      : shared_(shared),
        params_(params),
        descriptor_of_(&shared),
        consumer_(warpgroup_index() - 1),
        thread_(int(threadIdx.x) % kWarpgroupThreads) {}

  __device__ void run() {
    const TileList& tiles = params_.tiles;
    const int rank = ptx::cta_rank(), clusters = int(gridDim.x) / tiles.cluster;
    for (int place = int(blockIdx.x) / tiles.cluster; place < tiles.places(); place += clusters) {
      Sums sums;
      const TileOfOutput tile = tiles.tile(place, rank);
      BiasPairs bias;
      add_products(sums, bias, tile.column);
      store(sums, bias, tile);
    }
    ptx::bulk_wait_read();  // shared memory must last as long
  }

 private:
  using Swizzle = typename Variant::Swizzle;
  using Rows = KMajor<Swizzle, kTileRows>;        // x as A
  using Columns = KMajor<Swizzle, kTileColumns>;  // W as B

  static constexpr int kSums = kTileColumns / 2;  // a 64 x kTileColumns fragment
  using Sums = float[kSums];
  using BiasPairs = uint32_t[kTileColumns / 8];  // of the two columns of each 8 that the thread has

  __device__ __forceinline__ Rows rows() const {
    return Rows(descriptor_of_(shared_.x[ring_.slot()]), consumer_ * kWarpgroupRows);
  }
  __device__ __forceinline__ Columns columns() const { return Columns(descriptor_of_(shared_.weight[ring_.slot()])); }

  __device__ __forceinline__ void wait_for_stage() const { shared_.full[ring_.slot()].wait(ring_.parity()); }

  // One arrival a warp in each CTA of the cluster: others write to this CTA's stages, and this one to theirs.
  __device__ __forceinline__ void release(RingIndex<Variant::kStages> stage) const {
    const int lane = thread_ % 32;
    if (lane < params_.tiles.cluster) { shared_.empty[stage.slot()].arrive(uint32_t(lane)); }
  }

  __device__ __forceinline__ void add_products(Sums& sums, BiasPairs& bias, int column_tile) {
    wait_for_stage();
    multiply<Element, kTileDepth>(sums, rows(), columns());
    ring_ = ring_.next();
#pragma unroll 1
    for (int step = 1; step < params_.steps; ++step) {
      wait_for_stage();
      multiply_add<Element, kTileDepth>(sums, rows(), columns());
      wait_products<1>();
      release(ring_.previous());
      ring_ = ring_.next();
    }
    load_bias(bias, column_tile);  // while the last product runs
    wait_products<0>();
    pin(sums);
    release(ring_.previous());
  }

  // Columns past the end, eight at a time, read as zero, and so do all where there is no bias.
  __device__ __forceinline__ void load_bias(BiasPairs& bias, int column_tile) const {
    const int first = column_tile * kTileColumns;
#pragma unroll
    for (int i = 0; i < kTileColumns / 8; ++i) {
      const int column = first + 8 * i;
      const bool is_there = params_.bias != nullptr && column < params_.columns;
      bias[i] = is_there ? *reinterpret_cast<const uint32_t*>(params_.bias + column + fragment_column(thread_, 0)) : 0u;
    }
  }

  __device__ __forceinline__ void store(Sums& sums, const BiasPairs& bias, const TileOfOutput& tile) {
    const int warp = thread_ / 32, lane = thread_ % 32;
    const int first_row = tile.row * kTileRows + consumer_ * kWarpgroupRows + warp * Variant::kWarpRows;
    auto& slots = shared_.out[consumer_ * kWarpgroupWarps + warp];
    constexpr int kOfBlock = Variant::kBlockColumns / 2;  // sums of the thread
#pragma unroll
    for (int block = 0; block < kTileColumns / Variant::kBlockColumns; ++block) {
      auto& of_block = reinterpret_cast<float (&)[kOfBlock]>(sums[block * kOfBlock]);
#pragma unroll
      for (int i = 0; i < kOfBlock; i += 4) {
        const float2 pair = unpack<Element>(bias[(block * kOfBlock + i) / 4]);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          of_block[i + 2 * row] += pair.x;
          of_block[i + 2 * row + 1] += pair.y;
        }
      }
      uint32_t packed[kOfBlock / 8][4];
      pack_slices<Element>(packed, of_block);
      Element* const staged = slots[block % Variant::kOutputSlots];
      if (lane == 0) { ptx::bulk_wait_read<Variant::kOutputSlots - 1>(); }
      __syncwarp();
      store_rows<Swizzle, Variant::kWarpRows>(staged, 0, packed, 0, lane);
      ptx::fence_async_shared();
      __syncwarp();
      const int column = tile.column * kTileColumns + block * Variant::kBlockColumns;
      if (lane == 0) {
        // TMA leaves out rows and columns past the end; of a block that is all past it nothing would be left.
        if (first_row < params_.rows && column < params_.columns) {
          ptx::store_box(params_.out, staged, {column, 0, first_row, 0, 0});
        }
        ptx::bulk_commit();
      }
    }
  }

  Shared& shared_;
  const Params<Element>& params_;
  const TileDescriptors<Swizzle> descriptor_of_;
  const int consumer_, thread_;
  RingIndex<Variant::kStages> ring_;
};

}  // namespace dash_attn::linear
