// The loader: one thread that loads Q, K and V by TMA. It goes through KV tiles from the last to the first, so that
// masked tiles, which are the last ones, come before the loop. Where keys lie in pages, the loader is a warp: each lane
// looks up the page of one box of a KV tile, and one lane does all else. For short query tiles, whose KV tiles follow
// each other fast, another warp loads V. Where pages cut boxes, all lanes of both warps copy (gather.h).
//
//   order of loads in a tile:   Q  K(n-1)   K(n-2)  V(n-1)   K(n-3)  V(n-2)   ...   K(0)  V(1)   V(0)
//   (the order in which they are used: S runs one step ahead of P V)
#pragma once

#include "../device/tma.h"
#include "../device/warp_roles.h"
#include "config.h"
#include "gather.h"
#include "live_walk.h"
#include "params.h"
#include "rows.h"

namespace dash_attn::forward {

// Where the keys of a call lie: in a tensor, in pages that consist of boxes, or in pages that cut boxes.
enum class Keys { kInTensor, kInPages, kInRows };

// Kernels for windows serve calls with pages, which have no dropout.
template <typename Variant>
constexpr bool kMayHavePages = Variant::kMask == MaskKind::kWindow && !Variant::Score::kDrops;

// What a loader loads.
enum class Loads { kAll, kAllButV, kV };

// Each query tile of the heads that share K and V reads them once. Q is read once in all.
template <typename Variant, Keys kKeys = Keys::kInTensor, Loads kLoads = Loads::kAll>
class Loader {
 public:
  using Element = typename Variant::Element;
  using Shared = SharedStorage<Variant>;
  using Barrier = TransactionBarrier;

  // `leads`: of a loader that is a warp, whether this lane does what one lane does for its warp. Must come from
  // elect_one, because the compiler then knows that no other lane runs such code.
  __device__ Loader(Shared& shared, const KernelParams& params, bool leads)
      : shared_(shared), params_(params), leads_(leads) {}

  __device__ void run() {
    if constexpr (kLoads == Loads::kV) { return load_announced_values(); }
    const PackView& pack = params_.pack;
    const QueryTileScheduler& scheduler = params_.scheduler;
    const int places = pack.is_pack() ? pack.totals->units * scheduler.head_groups : scheduler.num_tiles;
    int round = 0;
    for (int place = blockIdx.x; place < places;) { place = load(tile_at(place), ++round); }
    Barrier& full = announce({kNoMoreTiles});
    if (leads()) { full.arrive(); }
  }

 private:
  static constexpr bool kHasPages = kKeys != Keys::kInTensor;
  static constexpr bool kIsWarp = kHasPages || kLoads == Loads::kV;
  using Swizzle = typename Variant::Swizzle;
  using Ring = RingIndex<Variant::kStages>;

  __device__ __forceinline__ bool leads() const { return !kIsWarp || leads_; }

  // The place in the list of the CTA's tile number `round`. With pages, the reduction keeps the lanes together even
  // where a tile has no keys.
  __device__ __forceinline__ int take_place(int round) const {
    if (!params_.tiles_taken) { return round * int(gridDim.x) + int(blockIdx.x); }
    int taken = 0;
    if (leads()) { taken = atomicAdd(params_.tiles_taken, 1); }
    if constexpr (kHasPages) { taken = int(__reduce_max_sync(0xffffffff, uint32_t(taken))); }
    return int(gridDim.x) + taken;
  }

  // Whether a KV tile is found while the one before it is loaded. There are no registers for that beside other scores,
  // nor, with three consumers, beside the places of the outputs.
  static constexpr bool kFindsEarly = kHasPages && Variant::Score::serves(ScoreKind::kPlain) &&
                                      !(Variant::kConsumers == 3 && Variant::kOutputInValues);

  struct Tile : AnnouncedTile {
    RowOrigin key_rows;
  };

  // A KV tile, and with pages the row of the tensor at which the lane's box of it ends, or the places of its keys.
  struct KeyTile {
    int number;
    std::conditional_t<kKeys == Keys::kInPages, int, Empty> end_of_box;
    std::conditional_t<kKeys == Keys::kInRows, PlacesOfKeys<Variant::kKey>, Empty> keys;
  };

  __device__ __forceinline__ Tile tile_at(int place) const {
    const PackView& pack = params_.pack;
    const QueryTileScheduler& scheduler = params_.scheduler;
    if (!pack.is_pack()) {
      const QueryTile tile = scheduler.tile(place);
      if constexpr (Variant::serves_steps(kHasPages)) {
        if (params_.seqlens_k) { return tile_of_step(tile); }
      }
      const RowOrigin rows = RowOrigin::of(false, tile.batch, 0);
      const int64_t heads = scheduler.head_groups << scheduler.group_shift;
      return {{scheduler.end_position(tile.index), tile.head_group, scheduler.sequence, rows,
               tile.batch * heads * params_.lse_head_stride, tile.batch},
              rows};
    }
    const PackedSequence& sequence = pack.sequences[pack.place_of(place, scheduler.head_groups)];
    const QueryTileScheduler alone = scheduler.of(sequence);
    const QueryTile tile = alone.tile(sequence.number_within(place, scheduler.head_groups));
    const Sequence lengths = sequence.lengths;
    return {{alone.end_position(tile.index), tile.head_group, lengths,
             RowOrigin::of(true, sequence.end_q, lengths.seqlen_q), sequence.end_q - lengths.seqlen_q, sequence.number},
            RowOrigin::of(true, sequence.end_k, lengths.seqlen_k)};
  }

  // Without a plan, no kernel has checked the sequence's length yet.
  __device__ __forceinline__ Tile tile_of_step(const QueryTile& tile) const {
    const int number = tile.batch, rows = params_.scheduler.sequence.seqlen_q, end_q = (number + 1) * rows;
    const int keys = max_int(0, min_int(params_.seqlens_k[number], params_.pages.capacity()));
    return {{params_.scheduler.end_position(tile.index), tile.head_group, {rows, keys},
             RowOrigin::of(true, end_q, rows), end_q - rows, number},
            RowOrigin::of(true, kHasPages ? keys : number * params_.pages.page_distance + keys, keys)};
  }

  // Announces the tile to the other warps. They read it when the barrier that is returned has completed.
  __device__ __forceinline__ Barrier& announce(const AnnouncedTile& tile) {
    shared_.q_empty[q_.slot()].wait(q_.empty_parity());
    if (leads()) { shared_.tile(q_) = tile; }
    return shared_.q_full[q_.slot()];
  }

  // Returns the CTA's next place in the list. The place is taken late, so that CTAs that are early get the next tiles,
  // but before the wait for the last buffer of V, which takes longer than the atomic.
  __device__ __forceinline__ int load(const Tile& tile, int next_round) {
    if constexpr (Variant::kHasColumns) { return load_live_tiles(tile, next_round); }
    const Range kv_tiles = kv_tiles_of_query_tile<Variant>(params_, tile.sequence, tile.end);
    const int kv_head = params_.scheduler.kv_head(tile.head_group);
    // Q is loaded even without keys, because its barrier announces the tile. If there is one buffer of Q, a buffer of K
    // is free earlier.
    const bool k_first = Variant::kQueryStages == 1 && kv_tiles.count > 0;
    if (!k_first) { load_q(tile); }
    if (kv_tiles.count == 0) { return take_place(next_round); }
    const auto find_before = [&](const KeyTile& found) {
      return find(kFindsEarly ? max_int(kv_tiles.first, found.number - 1) : found.number - 1, tile);
    };
    KeyTile kv_tile = find(kv_tiles.end() - 1, tile);
    KeyTile next = kFindsEarly ? find_before(kv_tile) : kv_tile;
    prefetch_bits(tile, kv_tile.number);
    load_k(kv_tile, kv_head, tile);
    if (k_first) { load_q(tile); }
#pragma unroll 1
    while (kv_tile.number > kv_tiles.first) {
      const KeyTile found = find_before(kFindsEarly ? next : kv_tile);
      if constexpr (!kFindsEarly) { next = found; }
      prefetch_bits(tile, next.number);
      load_k(next, kv_head, tile);
      load_v(kv_tile, kv_head, tile);
      kv_tile = next;
      if constexpr (kFindsEarly) { next = found; }
    }
    const int next_place = take_place(next_round);
    load_v(kv_tile, kv_head, tile);
    end_copies();
    return next_place;
  }

  // Loads V of the query tiles that the loader of K announces.
  __device__ __forceinline__ void load_announced_values() {
    for (;; q_ = q_.next()) {
      const int end = wait_for_tile(shared_, q_);
      if (end == kNoMoreTiles) { return; }
      const Tile tile{shared_.tile(q_), shared_.key_rows.of[q_.count % Variant::kTileSlots]};
      const Range kv_tiles = kv_tiles_of_query_tile<Variant>(params_, tile.sequence, end);
      const int kv_head = params_.scheduler.kv_head(tile.head_group);
      if (kv_tiles.count > 0) {
        KeyTile next = find(kv_tiles.end() - 1, tile);
#pragma unroll 1
        for (int count = kv_tiles.count; count > 0; --count) {
          const KeyTile kv_tile = next;
          next = find(max_int(kv_tiles.first, kv_tile.number - 1), tile);
          load_v(kv_tile, kv_head, tile);
        }
        end_copies();
      }
      shared_.q_empty[q_.slot()].arrive();
    }
  }

  // The same under a mask by key columns, in the same order, for the plan's query tile with the number of `tile`.
  __device__ __forceinline__ int load_live_tiles(Tile tile, int next_round) {
    const int kv_head = params_.scheduler.kv_head(tile.head_group), rows = params_.scheduler.tile_positions;
    const int query_tile = tile.end / rows - 1;
    tile.end = end_of_query_tile(Pass::kForward, query_tile, rows, tile.sequence.seqlen_q);
    LiveWalk walk(params_, tile, query_tile, kv_head);
    announced_ = {walk.tiles(), params_.columns.keys(kv_head, first_key_row(tile))};
    const bool k_first = Variant::kQueryStages == 1 && walk.left() > 0;
    if (!k_first) { load_q(tile); }
    if (walk.left() == 0) { return take_place(next_round); }
    KeyTile kv_tile = load_next_k(walk, kv_head, tile);
    if (k_first) { load_q(tile); }
#pragma unroll 1
    while (walk.left() > 0) {
      const KeyTile next = load_next_k(walk, kv_head, tile);
      load_v(kv_tile, kv_head, tile);
      kv_tile = next;
    }
    const int next_place = take_place(next_round);
    load_v(kv_tile, kv_head, tile);
    return next_place;
  }

  // The row of a sequence's first key among all rows of keys.
  __device__ __forceinline__ int first_key_row(const Tile& tile) const {
    const int seqlen_k = tile.sequence.seqlen_k;
    return params_.pack.is_pack() ? tile.key_rows.outer - seqlen_k : tile.number * seqlen_k;
  }

  // Returns the KV tile.
  __device__ __forceinline__ KeyTile load_next_k(LiveWalk& walk, int kv_head, const Tile& tile) {
    shared_.k_empty[k_.slot()].wait(k_.empty_parity());
    // Read when K has arrived.
    const KeyTile kv_tile{walk.next([&](const WordOfTiles& word) { shared_.columns.words[k_.slot()] = word; })};
    load_k(kv_tile, kv_head, tile);
    return kv_tile;
  }

  __device__ __forceinline__ void load_q(const Tile& tile) {
    Barrier& full = announce(tile);
    if constexpr (Variant::kHasColumns) {
      shared_.columns_of(q_) = announced_;
    }
    if constexpr (Variant::kIsShort) {
      if (leads()) { shared_.key_rows.of[q_.count % Variant::kTileSlots] = tile.key_rows; }
    }
    Element* rows = shared_.q[q_.slot()];
    q_ = q_.next();
    if (!leads()) { return; }
    const int warpgroups = warpgroups_with_rows(params_, tile.end);
    full.arrive_and_expect_tx(warpgroups * kWarpgroupRows * Variant::kQkDim * sizeof(Element));
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
      const int position = WarpgroupRows<Variant>::first_row(params_, tile.end, warpgroup);
#pragma unroll
      for (int column = 0; column < Variant::kQkDim; column += Swizzle::kColumns) {
        ptx::load_box(rows + column * Variant::kQuery + warpgroup * kWarpgroupRows * Swizzle::kColumns, params_.q,
                      {column, tile.head_group << params_.scheduler.group_shift, tile.rows.first + position,
                       tile.rows.outer, tile.rows.wrap},
                      &full, kReadOnce);
      }
    }
  }

  __device__ __forceinline__ void prefetch_bits(const AnnouncedTile& tile, int kv_tile) const {
    if constexpr (Variant::Score::kDrops) {
      dropout::prefetch<Variant::kKey>(params_.dropout,
                                       params_.dropout.of_head(tile.number, tile.head_group),  // heads are not packed
                                       params_.scheduler.first_position(tile.end), tile.end, kv_tile * Variant::kKey);
    }
  }

  __device__ __forceinline__ void load_k(const KeyTile& kv_tile, int kv_head, const Tile& tile) {
    shared_.k_empty[k_.slot()].wait(k_.empty_parity());
    load_key_tile<Variant::kQkDim>(params_.k, params_.rows_of_k, shared_.k_full[k_.slot()], shared_.k[k_.slot()],
                                   kv_tile, kv_head, tile);
    k_ = k_.next();
  }

  __device__ __forceinline__ void load_v(const KeyTile& kv_tile, int kv_head, const Tile& tile) {
    if constexpr (kLoads == Loads::kAllButV) { return; }
    if constexpr (Variant::kOutputInValues) {
      // The outputs of the previous query tile: q_ is one ahead.
      for (auto& left : shared_.out_left) { left.wait(q_.previous().empty_parity()); }
    }
    shared_.v_empty[v_.slot()].wait(v_.empty_parity());
    load_key_tile<Variant::kValueDim>(params_.v, params_.rows_of_v, shared_.v_full[v_.slot()], shared_.v[v_.slot()],
                                      kv_tile, kv_head, tile);
    v_ = v_.next();
  }

  // With pages, begins to read the page table: called before the places are needed (kFindsEarly). In kernels for short
  // tiles, lanes without a key read the entry of the last one: a branch around the read would make each look-up wait
  // for the one before. Kernels for tall tiles have no registers for that.
  __device__ __forceinline__ KeyTile find(int kv_tile, const Tile& tile) const {
    KeyTile found{kv_tile};
    const int lane = int(threadIdx.x) % 32, last_key = tile.sequence.seqlen_k - 1;
    const auto place_of = [&](int key) { return params_.pages.place_of(tile.number, key); };
    if constexpr (kKeys == Keys::kInPages) {
      const int key = first_key_of_box(kv_tile, lane);
      const int count = lane < kBoxes ? PageTable::keys_of_box(tile.sequence.seqlen_k - key) : 0;
      if constexpr (Variant::kIsShort) {
        found.end_of_box = params_.pages.row_within_tensor(place_of(min_int(key, last_key))) + count;
      } else {
        found.end_of_box = count > 0 ? params_.pages.row_of(place_of(key)) + count : 0;
      }
    }
    if constexpr (kKeys == Keys::kInRows) {
#pragma unroll
      for (int i = 0; i * 32 < Variant::kKey; ++i) {
        found.keys.of[i] = place_of(min_int(kv_tile * Variant::kKey + i * 32 + lane, last_key));
      }
    }
    return found;
  }

  // In decoding, one query tile of a sequence reads the keys. Kept in L2, they would displace what all CTAs read, such
  // as instructions.
  __device__ __forceinline__ uint64_t key_hint() const {
    const QueryTileScheduler& scheduler = params_.scheduler;
    return Variant::kIsShort && scheduler.query_tiles * scheduler.groups_per_kv == 1 ? kReadOnce : kKeepInL2;
  }

  template <int kColumns>
  __device__ __forceinline__ void load_key_tile(const CUtensorMap& map, const RowsOfPages& rows, Barrier& full,
                                                Element* place, const KeyTile& kv_tile, int kv_head,
                                                const Tile& tile) {
    if constexpr (kKeys == Keys::kInRows) {
      gather_tile<Swizzle, kColumns>(place, rows, kv_head, params_.pages, kv_tile.keys,
                                     tile.sequence.seqlen_k - kv_tile.number * Variant::kKey, key_hint());
      complete_copies<kCopiedAhead>(ring_of_copies().next());
    } else {
      if (leads()) { full.arrive_and_expect_tx(Variant::kKey * kColumns * sizeof(Element)); }
      if constexpr (kKeys == Keys::kInPages) {
        load_boxes<kColumns>(map, full, place, kv_tile, kv_head, tile.sequence.seqlen_k);
      } else if (leads()) {
        load_tile<Swizzle, Variant::kKey, kColumns>(map, full, place, tile.key_rows, kv_tile.number * Variant::kKey,
                                                    kv_head, key_hint());
      }
    }
  }

  // How many tiles' copies may be under way when a further tile needs a buffer. The consumer may hold one buffer and
  // wait for the next tile, whose barrier must then have been completed.
  static constexpr int kCopiedAhead = Variant::kStages - 2;

  __device__ __forceinline__ Ring ring_of_copies() const { return kLoads == Loads::kV ? v_ : k_; }

  // Completes the barriers of the tiles before `end` but the last kLeft ones, once their rows have arrived.
  template <int kLeft>
  __device__ __forceinline__ void complete_copies(Ring end) {
    if (end.count - copied_.count <= kLeft) { return; }
    ptx::wait_for_copies<kLeft>();
    ptx::fence_async_shared();
    for (; end.count - copied_.count > kLeft; copied_ = copied_.next()) {
      arrive_together((kLoads == Loads::kV ? shared_.v_full : shared_.k_full)[copied_.slot()]);
    }
  }

  // Completes all barriers. What the loader waits for next may depend on the consumer having all tiles so far.
  __device__ __forceinline__ void end_copies() {
    if constexpr (kKeys == Keys::kInRows) { complete_copies<0>(ring_of_copies()); }
  }

  static constexpr int kBoxes = Variant::kKey / PageTable::kBoxRows;
  static_assert(!kHasPages || Variant::kKey % PageTable::kBoxRows == 0);

  static __device__ __forceinline__ int first_key_of_box(int kv_tile, int box) {
    return kv_tile * Variant::kKey + box * PageTable::kBoxRows;
  }

  template <int kColumns>
  __device__ __forceinline__ void load_boxes(const CUtensorMap& map, Barrier& full, Element* place,
                                             const KeyTile& kv_tile, int kv_head, int seqlen_k) {
    int ends[kBoxes];
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) { ends[i] = __shfl_sync(0xffffffff, kv_tile.end_of_box, i); }
    if (!leads()) { return; }
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int count = PageTable::keys_of_box(seqlen_k - first_key_of_box(kv_tile.number, i));
      const RowOrigin rows = RowOrigin::of(true, ends[i], count);
#pragma unroll
      for (int column = 0; column < kColumns; column += Swizzle::kColumns) {
        ptx::load_box(place + column * Variant::kKey + i * PageTable::kBoxRows * Swizzle::kColumns, map,
                      {column, kv_head, rows.first, rows.outer, rows.wrap}, &full, key_hint());
      }
    }
  }

  Shared& shared_;
  const KernelParams& params_;
  const bool leads_;
  RingIndex<Variant::kQueryStages> q_;
  Ring k_, v_;
  std::conditional_t<kKeys == Keys::kInRows, Ring, Empty> copied_;  // the first tile whose barrier is not complete
  std::conditional_t<Variant::kHasColumns, ColumnsOfTile, Empty> announced_;  // with the next query tile
};

}  // namespace dash_attn::forward
