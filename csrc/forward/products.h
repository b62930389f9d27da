// The consumers: each warpgroup owns 64 rows of the query tile and computes, KV tile by KV tile from the last to the
// first,
//
//   S = Q K^T     P = exp2(scale S - max)     O = correction O + P V
//
// Products run in the order in which they are issued, while the thread computes. For tile j after tile j + 1:
//
//   tensor cores:   | S(j)  P(j+1) V(j+1) |                         | S(j-1)  ...
//   threads:        | wait  | max, P(j)   | O *= correction(j), pack | wait
//
// and the warpgroups take turns at issuing them, so that the softmax of one is covered by the products of the others.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "../device/fragment.h"
#include "../device/mask.h"
#include "config.h"
#include "params.h"
#include "softmax.h"

namespace dash_attn::forward {

template <typename Config>
class Consumer {
 public:
  using Element = typename Config::Element;
  using Shared = SharedStorage<Config>;

  __device__ Consumer(Shared& shared, const KernelParams& params)
      : shared_(shared),
        params_(params),
        tiles_at_(&shared),
        // A shuffle, so that the compiler knows it is uniform.
        consumer_(__shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0) - 1),
        thread_(threadIdx.x % kWarpgroupThreads) {}

  __device__ void run() {
    const TileOrder& order = params_.order;
    if (consumer_ == Config::kConsumers - 1) { pass_turn(); }
    for (int round = 0; round * int(gridDim.x) < order.num_tiles; ++round) {
      const int position = order.position(round, blockIdx.x, gridDim.x);
      if (position < order.num_tiles) { process(order.tile(position)); }
    }
    if (consumer_ == 0) { take_turn(); }
  }

 private:
  using QueryRows = SumOverColumns<Config::kQuery>;  // Q as A of S
  using KeyRows = SumOverColumns<Config::kKey>;      // K as B of S
  using KeySum = SumOverRows<Config::kKey>;          // V as B of O
  using Ring = RingIndex<Config::kStages>;

  static constexpr int kScoreRegisters = Config::kKey / 2;       // a 64 x kKey fragment
  static constexpr int kOutputRegisters = Config::kHeadDim / 2;  // a 64 x kHeadDim fragment

  using Scores = float[kScoreRegisters];
  using PackedScores = uint32_t[kScoreRegisters / 8][4];
  using Output = float[kOutputRegisters];

  // No product is in flight where one iteration ends and the next begins, so that ptxas can follow each to its wait.
  __device__ __forceinline__ void process(const QueryTile& tile) {
    Output out;
    clear(out);
    OnlineSoftmax softmax(params_.softmax_scale_log2);
    const int first_position = tile.index * params_.order.positions_per_tile();
    int kv_tile = live_kv_tiles<Config>(params_.order, tile.index);
    if (kv_tile > 0) {
      const Mask<Config::kCausal> mask = make_mask();
      PackedScores p;
      first_scores(p, softmax, mask, first_position, --kv_tile);
      while (kv_tile > 0 && mask.needs_masking(first_position, (kv_tile - 1) * Config::kKey, Config::kKey)) {
        step<Tile::kMasked>(out, p, softmax, mask, first_position, --kv_tile);
      }
      for (; kv_tile > 0; --kv_tile) { step<Tile::kUnmasked>(out, p, softmax, mask, first_position, kv_tile - 1); }
      last_product(out, p);
    }
    store(out, softmax, tile, first_position);
  }

  __device__ __forceinline__ void first_scores(PackedScores& p, OnlineSoftmax& softmax,
                                               const Mask<Config::kCausal>& mask, int first_position, int kv_tile) {
    Scores s;
    RowStatistic correction;
    shared_.q_full.wait(q_.parity());
    shared_.k_full[k_.slot()].wait(k_.parity());
    take_turn();
    issue_s(s);
    pass_turn();
    wait_products<0>();
    pin(s);
    release(shared_.k_empty[k_.slot()]);
    k_ = k_.next();
    apply_mask(s, mask, first_position, kv_tile);
    softmax.exponentiate<Tile::kMasked>(s, correction);
    pack_slices<Element>(p, s);
    shared_.v_full[v_.slot()].wait(v_.parity());
  }

  template <Tile kTile>
  __device__ __forceinline__ void step(Output& out, PackedScores& p, OnlineSoftmax& softmax,
                                       const Mask<Config::kCausal>& mask, int first_position, int kv_tile) {
    Scores s;
    RowStatistic correction;
    shared_.k_full[k_.slot()].wait(k_.parity());
    take_turn();
    issue_s(s);
    issue_out(out, p);
    pass_turn();
    wait_products<1>();  // S
    pin(s);
    release(shared_.k_empty[k_.slot()]);
    k_ = k_.next();
    if constexpr (kTile == Tile::kMasked) { apply_mask(s, mask, first_position, kv_tile); }
    softmax.exponentiate<kTile>(s, correction);
    pin(s);
    // For the next product. Here because it ends a basic block: ptxas would move the exponentials behind the wait for
    // P V, which is to run at the same time.
    shared_.v_full[v_.next().slot()].wait(v_.next().parity());
    wait_products<0>();  // P V
    pin(out);
    pin(p);
    release(shared_.v_empty[v_.slot()]);
    v_ = v_.next();
    multiply_rows(out, correction);
    pack_slices<Element>(p, s);
  }

  __device__ __forceinline__ void last_product(Output& out, PackedScores& p) {
    release(shared_.q_empty);
    q_ = q_.next();
    issue_out(out, p);
    wait_products<0>();
    pin(out);
    pin(p);
    release(shared_.v_empty[v_.slot()]);
    v_ = v_.next();
  }

  __device__ __forceinline__ void issue_s(Scores& s) {
    multiply<Element, Config::kHeadDim>(s, QueryRows(tiles_at_(shared_.q), consumer_ * kWarpgroupRows),
                                        KeyRows(tiles_at_(shared_.k[k_.slot()])));
  }

  __device__ __forceinline__ void issue_out(Output& out, PackedScores& p) {
    multiply_add<Element>(out, p, KeySum(tiles_at_(shared_.v[v_.slot()])));
  }

  // The consumers issue their products in turn, the first one first.
  __device__ __forceinline__ void take_turn() const {
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads, uint32_t(consumer_));
  }

  __device__ __forceinline__ void pass_turn() const {
    const int next = consumer_ == Config::kConsumers - 1 ? 0 : consumer_ + 1;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads, uint32_t(next));
  }

  __device__ __forceinline__ void sync_warpgroup() const {
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, uint32_t(Config::kConsumers + consumer_));
  }

  // One arrival a warp, whose products have completed.
  __device__ __forceinline__ void release(const cutlass::arch::ClusterBarrier& barrier) const {
    if (cute::elect_one_sync()) { barrier.arrive(); }
  }

  __device__ __forceinline__ Mask<Config::kCausal> make_mask() const {
    return {params_.order.problem.seqlen_k, params_.order.problem.diagonal};
  }

  // Row of the query tile that the thread's row `row` is.
  __device__ __forceinline__ int tile_row(int row) const {
    return consumer_ * kWarpgroupRows + fragment_row(thread_, 2 * row);
  }

  __device__ __forceinline__ void apply_mask(Scores& s, const Mask<Config::kCausal>& mask, int first_position,
                                             int kv_tile) const {
    const int first_key = kv_tile * Config::kKey + fragment_column(thread_, 0);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int position = first_position + (tile_row(row) >> params_.order.group_shift);
      const int visible = mask.visible_keys(position) - first_key;
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i) {
        if (row_of(i) == row && fragment_column(0, i) >= visible) { s[i] = -INFINITY; }
      }
    }
  }

  static __device__ __forceinline__ void clear(Output& out) {
#pragma unroll
    for (int i = 0; i < kOutputRegisters; ++i) { out[i] = 0.f; }
  }

  __device__ __forceinline__ void store(Output& out, OnlineSoftmax& softmax, const QueryTile& tile,
                                        int first_position) {
    RowStatistic inverse_sum, lse;
    softmax.finish(inverse_sum, lse);
    multiply_rows(out, inverse_sum);
    const TileOrder& order = params_.order;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int in_group = tile_row(row) & ((1 << order.group_shift) - 1);
      const int position = first_position + (tile_row(row) >> order.group_shift);
      if (make_mask().visible_keys(position) <= 0) {
        lse[row] = INFINITY;
#pragma unroll
        for (int i = 0; i < kOutputRegisters; ++i) {
          if (row_of(i) == row) { out[i] = 0.f; }
        }
      }
      if (thread_ % 4 == 0 && position < order.problem.seqlen_q) {
        const int64_t head =
            (int64_t(tile.batch) * order.head_groups + tile.head_group) * (1 << order.group_shift) + in_group;
        params_.softmax_lse[head * order.problem.seqlen_q + position] = lse[row];
      }
    }
    store_rows_by_tma(out, tile, first_position);
  }

  // Rounds the output, stages it, and lets TMA write what lies inside the tensor.
  __device__ __forceinline__ void store_rows_by_tma(const Output& out, const QueryTile& tile, int first_position) const {
    uint32_t packed[kOutputRegisters / 8][4];
    pack_slices<Element>(packed, out);
    if (thread_ == 0) { ptx::bulk_wait_read(); }
    sync_warpgroup();  // the tile before has left the staging rows
    const int first_row = consumer_ * kWarpgroupRows;
    store_rows<Config::kQuery>(shared_.out, first_row, packed, thread_ / 32, thread_ % 32);
    ptx::fence_async_shared();
    sync_warpgroup();
    if (thread_ == 0) {
#pragma unroll
      for (int column = 0; column < Config::kHeadDim; column += kSwizzleColumns) {
        cute::SM90_TMA_STORE_5D::copy(
            &params_.out, shared_.out + column * Config::kQuery + first_row * kSwizzleColumns, column, 0,
            first_position + (first_row >> params_.order.group_shift), tile.head_group, tile.batch);
      }
      ptx::bulk_commit();
    }
  }

  Shared& shared_;
  const KernelParams& params_;
  const TileAddresses tiles_at_;
  const int consumer_;
  const int thread_;
  RingIndex<1> q_;
  Ring k_, v_;
};

}  // namespace dash_attn::forward
