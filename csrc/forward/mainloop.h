// The consumers. Each warpgroup owns 64 rows of the query tile and computes, from the last KV tile to the first,
//
//   S = score(Q K^T)     P = exp2(scale S - reference)     O = correction O + P V
//
// Dropout zeroes elements of P after the sum over the row and before the product with V.
//
// Products run in the order in which they are issued, while the threads compute. For tile j after tile j + 1, with two
// consumers:
//
//   tensor cores:   | S(j)  P(j+1) V(j+1)     |                                       | S(j-1)  ...
//   threads:        | wait  | reference, P(j) | O *= correction(j) if any, round P(j) | wait
//
// With three, whose products keep the tensor cores busy anyway:
//
//   threads:        | wait  | reference, exponents | O *= correction(j) if any, P(j) and its rounding | wait
//
// The last P V of a query tile overlaps the first S of the next, and the output is stored while the next tile's first P
// waits for its product. The warpgroups do not synchronise with each other: each computes while products of the others
// run.
#pragma once

#include "../device/fragment.h"
#include "../device/hidden_keys.h"
#include "../device/warp_roles.h"
#include "config.h"
#include "live_walk.h"
#include "params.h"
#include "row_bits.h"
#include "rows.h"
#include "score_tile.h"
#include "softmax.h"

namespace dash_attn::forward {

template <typename Variant>
class Consumer {
 public:
  using Element = typename Variant::Element;
  using Score = typename Variant::Score;
  using Shared = SharedStorage<Variant>;

  __device__ Consumer(Shared& shared, const KernelParams& params)
      : shared_(shared),
        params_(params),
        descriptor_of_(&shared),
        consumer_(warpgroup_index() - 1),
        thread_(threadIdx.x % kWarpgroupThreads) {}

  __device__ void run() {
    Output out;
    PackedScores p;
    Softmax softmax(params_.score);
    // `rows` are those of the previous tile. If `pending`, they have yet to be stored, and if they see keys, their last
    // P awaits its product with V.
    Rows rows{};
    bool pending = false;
    for (;; q_ = q_.next()) {
      const int end = next_tile();
      Rows next{};
      if (end != kNoMoreTiles) {
        const Sequence sequence = sequence_of_tile();
        next = Rows(params_, sequence, end, consumer_, loaded_tiles(sequence, end), live_tiles_of_rows());
        if constexpr (Score::kMayHaveSlopes) { set_slopes(next); }
        if constexpr (Variant::kKeepsRowOfBits) { next.bits.first = bits().find(next); }
      }
      if (Variant::kCrosses && rows.kv.count > 0 && next.kv.count > 0 && may_cross(rows, next)) {
        cross(out, p, softmax, rows, next);
      } else {
        if (pending) { end_rows(out, p, softmax, rows, q_.previous()); }
        if (end == kNoMoreTiles) { break; }
        softmax = Softmax(params_.score);
        clear(out);
        if (next.kv.count > 0) {
          begin(p, softmax, next);
        } else {
          pass_tiles(next.passed_before + next.passed_after);
        }
      }
      rows = next;
      if (rows.kv.count > 0) { walk(out, p, softmax, rows); }
      // If tiles do not cross, the last product does not wait for the next tile.
      pending = Variant::kCrosses && !passes_many(rows.passed_after);
      if (!pending) {
        end_rows(out, p, softmax, rows, q_);
        if (rows.kv.count == 0) { release_q(); }
        rows.kv.count = 0;
      }
    }
    if constexpr (Variant::kOutputInValues) {  // tells the storer
      shared_.out_left[consumer_].wait(q_.empty_parity());
      arrive_together(shared_.out_full[0][consumer_]);
    }
  }

 protected:  // ShortConsumer's too
  using Swizzle = typename Variant::Swizzle;
  using QueryRows = KMajor<Swizzle, Variant::kQuery>;  // Q as A of S
  using KeyRows = KMajor<Swizzle, Variant::kKey>;      // K as B of S
  using KeySum = MnMajor<Swizzle, Variant::kKey>;      // V as B of O

  static constexpr int kScoreRegisters = Variant::kKey / 2;        // a 64 x kKey fragment
  static constexpr int kOutputRegisters = Variant::kValueDim / 2;  // a 64 x kValueDim fragment

  // Whether the mask hides keys of a tile from some rows; and whether columns do, beside the rest of the mask.
  enum class Tile { kUnmasked, kMasked, kHidden };

  using Scores = float[kScoreRegisters];
  using PackedScores = uint32_t[kScoreRegisters / 8][4];
  using Output = float[kOutputRegisters];
  using BitsRead = typename BitsOfRows<Variant>::Read;
  using HiddenKeys = HiddenOfWarp<Variant::kKey>;
  using Rows = WarpgroupRows<Variant>;
  using Softmax = OnlineSoftmax<Variant::kFindsLargest>;
  using QuerySlot = RingIndex<Variant::kQueryStages>;

  // The shuffle tells the compiler that all that follows from the value is uniform.
  __device__ __forceinline__ int next_tile() { return __shfl_sync(0xffffffff, wait_for_tile(shared_, q_), 0); }

  __device__ __forceinline__ Sequence sequence_of_tile() const {
    const Sequence& sequence = shared_.tile(q_).sequence;
    return {__shfl_sync(0xffffffff, sequence.seqlen_q, 0), __shfl_sync(0xffffffff, sequence.seqlen_k, 0)};
  }

  // The KV tiles that are loaded for the query tile. Under a mask by key columns these are their ranks.
  __device__ __forceinline__ Range loaded_tiles(const Sequence& sequence, int end) const {
    if constexpr (Variant::kHasColumns) { return ranks_of(shared_.columns_of(q_).loaded); }
    return kv_tiles_of_query_tile<Variant>(params_, sequence, end);
  }
  __device__ __forceinline__ Range live_tiles_of_rows() const {
    if constexpr (Variant::kHasColumns) { return ranks_of(shared_.columns_of(q_).loaded, consumer_); }
    return {};
  }

  // Waits for the first K of the rows or of a word, and reads what is walked from that tile on.
  __device__ __forceinline__ void wait_for_first_k(const Rows& rows) {
    wait_for_k();
    if constexpr (Variant::kHasColumns) {
      word_ = TilesToWalk(shared_.columns.words[k_.slot()], consumer_, rows.kv_seen_whole(params_));
    }
  }

  // Between two of the following functions no product is in flight, so that ptxas can trace each product to its wait.

  // Computes the first scores of `rows`.
  __device__ __forceinline__ void begin(PackedScores& p, Softmax& softmax, const Rows& rows) {
    Scores s;
    const bool passes_together = passes_many(rows.passed_before);
    if (passes_together) {
      pass_tiles(rows.passed_before);
    } else {
      pass_keys(rows.passed_before);
    }
    wait_for_first_k(rows);
    issue_s(s);
    const BitsRead bits_read = bits().read_last(rows);
    wait_products<0>();
    release_k(s);
    if (rows.kv.count == 1) { release_q(); }
    make_scores(s, rows, rows.kv.end() - 1);
    exponentiate_first(s, softmax, rows);
    softmax.set_limits(finds_largest());
    if (!passes_together) { pass_values(rows.passed_before); }
    shared_.v_full[v_.slot()].wait(v_.parity());
    round_p(p, s, bits_read, rows.kv.end() - 1);
  }

  // Walks all KV tiles but the first in this order, which is the last of the sequence.
  __device__ __forceinline__ void walk(Output& out, PackedScores& p, Softmax& softmax, const Rows& rows) {
    int kv_tile = rows.kv.end() - 1;
    if constexpr (Variant::kHasColumns) {
      while (kv_tile > rows.kv.first) {
        if (word_.live == 0) { wait_for_first_k(rows); }
        const int next_to_mask = max_int(rows.kv.first, kv_tile - word_.leave_unmasked());
        while (kv_tile > next_to_mask) { step<Tile::kUnmasked>(out, p, softmax, rows, --kv_tile); }
        if (word_.live == 0 || kv_tile == rows.kv.first) { continue; }
        if (word_.hides_keys_of_next()) {
          step<Tile::kHidden>(out, p, softmax, rows, --kv_tile);
        } else {
          step<Tile::kMasked>(out, p, softmax, rows, --kv_tile);
        }
        word_.leave_next();
      }
    } else {
      walk_range(out, p, softmax, rows, kv_tile);
    }
    if (!passes_many(rows.passed_after)) { pass_keys(rows.passed_after); }
  }

  // The same without columns.
  __device__ __forceinline__ void walk_range(Output& out, PackedScores& p, Softmax& softmax, const Rows& rows,
                                             int kv_tile) {
    const Range whole = rows.kv_seen_whole(params_);
    if constexpr (starts_at_first_key(Variant::kMask)) {
      const int first_masked_after = max_int(rows.kv.first, whole.end());
      if constexpr (Variant::kMask != MaskKind::kFull) {
        while (kv_tile > first_masked_after) { step<Tile::kMasked>(out, p, softmax, rows, --kv_tile); }
      }
      while (kv_tile > whole.first) { step<Tile::kUnmasked>(out, p, softmax, rows, --kv_tile); }
    } else {
      // Masked tiles, which come before and after the others, share the code of a step.
      while (kv_tile > rows.kv.first) {
        if (kv_tile <= whole.end()) {
          while (kv_tile > whole.first) { step<Tile::kUnmasked>(out, p, softmax, rows, --kv_tile); }
          if (kv_tile == rows.kv.first) { break; }
        }
        step<Tile::kMasked>(out, p, softmax, rows, --kv_tile);
      }
    }
  }

  template <Tile kTile>
  __device__ __forceinline__ void step(Output& out, PackedScores& p, Softmax& softmax, const Rows& rows,
                                       int kv_tile) {
    Scores s;
    RowStatistic correction;
    wait_for_k();
    issue_s(s);
    issue_out(out, p);
    const BitsRead bits_read = bits().read(rows, kv_tile);
    [[maybe_unused]] HiddenKeys hidden;
    if constexpr (kTile == Tile::kHidden) { hidden = hidden_keys_of_next(rows); }
    wait_products<1>();  // S
    release_k(s);
    if (kv_tile == rows.kv.first) { release_q(); }
    make_scores(s, rows, kv_tile);
    if constexpr (kTile != Tile::kUnmasked) { apply_mask(s, rows, kv_tile); }
    if constexpr (kTile == Tile::kHidden) { hide_keys(s, hidden, thread_anew()); }
    // A wait ends a basic block. Within one, ptxas moves exponentials and roundings freely.
    if constexpr (Variant::kRoundsBesideExponentials) { wait_for_next_v(); }
    const bool corrects = softmax.follow(s, correction, finds_largest());
    softmax.subtract_reference(s);  // this overlaps P V
    if constexpr (!Variant::kRoundsBesideExponentials) { softmax.exponentiate(s, corrects, correction); }
    fence_operand(s);
    if constexpr (!Variant::kRoundsBesideExponentials) { wait_for_next_v(); }
    complete_out(out, p);
    if (corrects) { correct_rows(out, correction); }
    if constexpr (Variant::kRoundsBesideExponentials) { softmax.exponentiate(s, corrects, correction); }
    round_p(p, s, bits_read, kv_tile);
  }

  // Crosses from `rows` to `next`: the last product of the former and the first scores of the latter.
  __device__ __forceinline__ void cross(Output& out, PackedScores& p, Softmax& softmax, const Rows& rows,
                                        const Rows& next) {
    Scores s;
    pass_keys(next.passed_before);
    wait_for_first_k(next);
    issue_s(s);
    issue_out(out, p);
    add_largest(softmax, rows, q_.previous());  // no registers hold it beside the next rows'
    wait_products<1>();  // S
    release_k(s);
    make_scores(s, next, next.kv.end() - 1);
    Softmax next_softmax(params_.score);
    exponentiate_first(s, next_softmax, next);
    fence_operand(s);
    wait_for_next_v();
    complete_out(out, p);
    const BitsRead bits_read = bits().read_last(next);  // they arrive while the output is stored
    pass_values(rows.passed_after + next.passed_before);
    store(out, softmax, rows, q_.previous());
    softmax = next_softmax;
    softmax.set_limits(finds_largest());
    clear(out);
    shared_.v_full[v_.slot()].wait(v_.parity());
    round_p(p, s, bits_read, next.kv.end() - 1);
  }

  // The last product of rows that do not cross, if they see a key, and their output.
  __device__ __forceinline__ void end_rows(Output& out, PackedScores& p, Softmax& softmax, const Rows& rows,
                                           QuerySlot slot_of_rows) {
    if (rows.kv.count > 0) {
      issue_out(out, p);
      complete_out(out, p);
      if (passes_many(rows.passed_after)) {
        pass_tiles(rows.passed_after);
      } else {
        pass_values(rows.passed_after);
      }
    }
    add_largest(softmax, rows, slot_of_rows);
    store(out, softmax, rows, slot_of_rows);
  }

  // While the last V of some rows is in use, K of the tiles passed over after theirs and before the next rows' is
  // released, and the first K of the next rows is waited for. The loader loads two tiles of K before it needs a buffer
  // for their V, and may use all buffers but that one (docs/forward.md, "No wait can hang"). Without a window no more
  // tiles are passed over than the rows of the other warpgroups have keys.
  static __device__ __forceinline__ constexpr bool passes_many(int tiles) {
    return !starts_at_first_key(Variant::kMask) && tiles >= Variant::kStages;
  }
  static __device__ __forceinline__ constexpr bool may_cross(const Rows& rows, const Rows& next) {
    return starts_at_first_key(Variant::kMask) || rows.passed_after + next.passed_before <= Variant::kStages;
  }
  static_assert(ceil_div(Variant::kQuery - kWarpgroupRows, Variant::kKey) <= Variant::kStages);

  __device__ __forceinline__ void pass_tiles(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      pass_keys(1);
      pass_values(1);
    }
  }
  __device__ __forceinline__ void pass_keys(int count) { pass(shared_.k_full, shared_.k_empty, k_, count); }
  __device__ __forceinline__ void pass_values(int count) { pass(shared_.v_full, shared_.v_empty, v_, count); }

  // Waits for each tile before releasing it, so that none is released twice in one pass of the ring.
  template <typename Full, typename Empty>
  __device__ __forceinline__ void pass(Full& full, Empty& empty, RingIndex<Variant::kStages>& ring, int count) const {
#pragma unroll 1
    for (; count > 0; --count) {
      full[ring.slot()].wait(ring.parity());
      arrive_once(empty[ring.slot()]);
      ring = ring.next();
    }
  }

  __device__ __forceinline__ void wait_for_next_v() const { shared_.v_full[v_.next().slot()].wait(v_.next().parity()); }

  __device__ __forceinline__ void wait_for_k() const { shared_.k_full[k_.slot()].wait(k_.parity()); }

  __device__ __forceinline__ void issue_s(Scores& s) {
    wgmma_async<Element, Variant::kQkDim>(s,
                                          QueryRows(descriptor_of_(shared_.q[q_.slot()]), consumer_ * kWarpgroupRows),
                                          KeyRows(descriptor_of_(shared_.k[k_.slot()])));
  }

  __device__ __forceinline__ void issue_out(Output& out, PackedScores& p) {
    wgmma_async_add<Element>(out, p, KeySum(descriptor_of_(shared_.v[v_.slot()])));
  }

  __device__ __forceinline__ void release_k(Scores& s) {
    fence_operand(s);
    arrive_once(shared_.k_empty[k_.slot()]);
    k_ = k_.next();
  }

  // kLater: the groups of products that were issued after P V.
  template <int kLater = 0>
  __device__ __forceinline__ void complete_out(Output& out, PackedScores& p) {
    wait_products<kLater>();
    fence_operand(out);
    fence_operand(p);
    arrive_once(shared_.v_empty[v_.slot()]);
    v_ = v_.next();
  }

  __device__ __forceinline__ void set_slopes(Rows& rows) const {
    const AnnouncedTile& tile = shared_.tile(q_);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int head = Rows::head(params_, tile.head_group, thread_, row);
      rows.slopes.of[row] = params_.score.slope(tile.number, head);
    }
  }

  __device__ __forceinline__ BitsOfRows<Variant> bits() const { return {params_, shared_.tile(q_), thread_}; }

  __device__ __forceinline__ void round_p(PackedScores& p, const Scores& s, const BitsRead& read, int kv_tile) const {
    pack_slices<Element>(p, s);
    if constexpr (Score::kDrops) {
      typename BitsOfRows<Variant>::Bits(read, kv_tile * Variant::kKey).template drop<Element>(p);
    }
  }

  // Releases Q after the last scores of the tile, unless the output will be staged in its place.
  __device__ __forceinline__ void release_q() const {
    if constexpr (Variant::kOutputInValues) { shared_.q_empty[q_.slot()].arrive(); }
  }

  // Turns the rows' products with the keys of a KV tile into scores.
  __device__ __forceinline__ void make_scores(Scores& s, const Rows& rows, int kv_tile) const {
    Score::apply(s, BiasOf<Variant>{params_, rows, kv_tile, thread_}, params_.score);
  }

  // Leaves the limits of the softmax to the caller: `cross` has no registers for them until the output has been stored.
  __device__ __forceinline__ void exponentiate_first(Scores& s, Softmax& softmax, const Rows& rows) {
    const int kv_tile = rows.kv.end() - 1;
    if (hides_part_of_first(rows, kv_tile)) { apply_mask(s, rows, kv_tile); }
    if constexpr (Variant::kHasColumns) {
      if (word_.hides_keys_of_next()) { hide_keys(s, hidden_keys_of_next(rows), thread_anew()); }
      word_.leave_next();
    }
    softmax.start(s);
    softmax.subtract_reference(s);
    softmax.exponentiate(s);
  }

  __device__ __forceinline__ bool hides_part_of_first(const Rows& rows, int kv_tile) const {
    if constexpr (Variant::kHasColumns) { return word_.masks_next(); }
    const Range whole = rows.kv_seen_whole(params_);
    const bool hides_first = !starts_at_first_key(Variant::kMask) && kv_tile < whole.first;
    return kv_tile >= whole.end() || hides_first;  // not in `whole`
  }

  // Masks a tile, except for the keys that columns hide. `kv_tile` is its number only without columns.
  __device__ __forceinline__ void apply_mask(Scores& s, const Rows& rows, int kv_tile) const {
    if constexpr (Variant::kHasColumns) { kv_tile = word_.next_tile(); }
    hide_tile(s, rows, params_, kv_tile, thread_);
  }

  // Read from global memory: called while a product runs. Query tiles are of one head (fixes_rows_of_tiles).
  __device__ __forceinline__ HiddenKeys hidden_keys_of_next(const Rows& rows) const {
    const HiddenQueries* const keys = shared_.columns_of(q_).keys + word_.next_tile() * Variant::kKey;
    return hidden_of_warp<Variant::kKey>(rows.first_position, keys, thread_anew());
  }

  // Hands the rows to the storer and writes the log-sum-exp. `out` is the sum of P V.
  __device__ __forceinline__ void store(Output& out, Softmax& softmax, const Rows& rows,
                                        QuerySlot slot_of_rows) const {
    const AnnouncedTile& tile = shared_.tile(slot_of_rows);
    const int thread = thread_anew();
    RowStatistic inverse_sum, lse;
    const auto sees_no_key = [&](int row) {
      if constexpr (Variant::kHasColumns) {
        if (params_.columns.hide_keys) { return softmax.has_summed_nothing(row); }
      }
      return rows.mask(params_).keys_of(rows.position(params_, thread, row)).count == 0;
    };
    const auto head = [&](int row) { return Rows::head(params_, tile.head_group, thread, row); };
    static_assert(kRowsPerThread == 2);
    softmax.normalize(params_.sinks, {head(0), head(1)}, inverse_sum, lse);
    if constexpr (Score::kDrops) {
      for (float& x : inverse_sum) { x *= params_.dropout.scale; }
    }
    scale_rows(out, inverse_sum);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int position = rows.position(params_, thread, row);
      if (sees_no_key(row)) {
        lse[row] = params_.sinks ? lse_of_sink(params_.sinks[head(row)]) : INFINITY;
#pragma unroll
        for (int i = 0; i < kOutputRegisters; ++i) {
          if (row_of(i) == row) { out[i] = 0.f; }
        }
      }
      if (thread % 4 == 0 && position < rows.sequence.seqlen_q) {
        params_.softmax_lse[tile.first_lse + head(row) * params_.lse_head_stride + position] = lse[row];
      }
    }
    uint32_t packed[kOutputRegisters / 8][4];
    pack_slices<Element>(packed, out);
    if constexpr (Variant::kOutputInValues) {
      // The outputs are staged in the next buffers of V, one for each warpgroup. All consumers are done with those, and
      // the loader waits for the outputs to leave.
      const RingIndex<Variant::kStages> place{v_.count + consumer_};
      shared_.v_empty[place.slot()].wait(place.empty_parity());
      shared_.out_left[consumer_].wait(slot_of_rows.empty_parity());
      if (thread == 0) { shared_.output_slot[consumer_] = place.slot(); }
      stage(shared_.v[place.slot()], 0, packed);
    } else {
      sync_warpgroup(consumer_);  // the products of all warps have read Q
      stage(shared_.q[slot_of_rows.slot()], consumer_ * kWarpgroupRows, packed);
    }
    fence_and_arrive(shared_.out_full[slot_of_rows.slot()][consumer_]);
    if constexpr (!Variant::kOutputInValues) { shared_.q_empty[slot_of_rows.slot()].arrive(); }
  }

  __device__ __forceinline__ bool finds_largest() const { return Variant::kFindsLargest && params_.largest.of_heads; }

  __device__ __forceinline__ void add_largest(const Softmax& softmax, const Rows& rows,
                                              QuerySlot slot_of_rows) const {
    if constexpr (Variant::kFindsLargest) {
      if (!finds_largest()) { return; }
      const AnnouncedTile& tile = shared_.tile(slot_of_rows);
      const int thread = thread_anew();
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const bool exists = rows.position(params_, thread, row) < rows.sequence.seqlen_q;
        // Query tiles are of one head (fixes_rows_of_tiles).
        params_.largest.add_warp(tile.number, tile.head_group, exists ? softmax.largest(row) : -INFINITY);
      }
    }
  }

  __device__ __forceinline__ void stage(Element* tile, int first_row,
                                        const uint32_t (&packed)[kOutputRegisters / 8][4]) const {
    const int thread = thread_anew();
    store_rows<Swizzle, Variant::kOutputRows>(tile, first_row, packed, thread / 32, thread % 32);
  }

  // thread_, hidden from the compiler, which then recomputes what follows from it instead of keeping that in registers.
  __device__ __forceinline__ int thread_anew() const {
    int thread = thread_;
    opaque(thread);
    return thread;
  }

  Shared& shared_;
  const KernelParams& params_;
  const TileDescriptors<Swizzle> descriptor_of_;
  const int consumer_;
  const int thread_;
  QuerySlot q_;  // of the rows whose scores are computed
  RingIndex<Variant::kStages> k_, v_;
  std::conditional_t<Variant::kHasColumns, TilesToWalk, Empty> word_;
};

}  // namespace dash_attn::forward
