// Python's view of masks and of the forward's query tiles: the part of the _schedule module that knows no policy. What
// asks for a mask asks as the public functions do: causal, window = (left, right), attention_chunk.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "../contract/tile_grid.h"
#include "../placement/forward_tiles.h"

namespace dash_attn {

namespace py = pybind11;

// The value, in [first, end).
inline int in_range(char const* argument, int64_t value, int64_t first, int64_t end) {
  if (value < first || value >= end) {
    throw py::value_error(std::string(argument) + " must be in [" + std::to_string(first) + ", " + std::to_string(end) +
                          "), got " + std::to_string(value));
  }
  return static_cast<int>(value);
}

inline int positive(char const* argument, int64_t value) {
  return in_range(argument, value, 1, int64_t{std::numeric_limits<int>::max()} + 1);
}

using WindowSize = std::pair<int64_t, int64_t>;  // left, right; negative: unbounded
inline constexpr WindowSize kAnyWindow{-1, -1};

inline MaskRule checked_rule(bool causal, WindowSize window, int64_t attention_chunk) {
  in_range("attention_chunk", attention_chunk, 0, int64_t{1} << 31);
  return mask_rule(causal, window.first, window.second, attention_chunk);
}

inline char const* mask_name(MaskKind kind) { return kMaskNames[static_cast<int>(kind)]; }

inline Sequence checked_lengths(int64_t seqlen_q, int64_t seqlen_k) {
  constexpr int64_t kEnd = int64_t{1} << 30;
  return {in_range("seqlen_q", seqlen_q, 1, kEnd), in_range("seqlen_k", seqlen_k, 1, kEnd)};
}

inline int checked_group_size(int64_t heads, int64_t kv_heads) {
  if (positive("heads", heads) % positive("kv_heads", kv_heads) != 0) {
    throw py::value_error("heads must be a multiple of kv_heads=" + std::to_string(kv_heads) + ", got " +
                          std::to_string(heads));
  }
  return static_cast<int>(heads / kv_heads);
}

// Without one of its own, V has the head_dim of Q and K.
inline HeadDims checked_head_dims(int64_t head_dim, std::optional<int64_t> value_head_dim) {
  return {in_range("head_dim", head_dim, 1, kMaxHeadDim + 1),
          in_range("value_head_dim", value_head_dim.value_or(head_dim), 1, kMaxHeadDim + 1)};
}

// The row of the tile table that holds them.
inline HeadDims padded_row(int64_t head_dim, std::optional<int64_t> value_head_dim) {
  HeadDims const dims = checked_head_dims(head_dim, value_head_dim);
  return padded_head_dims(dims.qk, dims.v);
}

inline forward::QueryTileScheduler forward_tiles(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads,
                                                 int64_t kv_heads, int64_t head_dim,
                                                 std::optional<int64_t> value_head_dim, bool causal, int64_t sms,
                                                 WindowSize window, int64_t attention_chunk, bool drops) {
  forward::ForwardProblem problem{};
  problem.mask = mask_of(checked_rule(causal, window, attention_chunk),
                         {positive("seqlen_q", seqlen_q), positive("seqlen_k", seqlen_k)});
  problem.batch = positive("batch", batch);
  checked_group_size(heads, kv_heads);
  problem.kv_heads = static_cast<int>(kv_heads);
  problem.heads = static_cast<int>(heads);
  problem.head_dims = checked_head_dims(head_dim, value_head_dim);
  problem.ctas = positive("sms", sms);
  problem.drops = drops;
  forward::QueryTileScheduler const scheduler = forward::make_scheduler(problem);
  positive("batch * heads * tiles", num_tiles(scheduler));
  return scheduler;
}

inline std::tuple<int, int> as_tuple(Range range) { return {range.first, range.count}; }

inline void bind_masks_and_forward_tiles(py::module_& m) {
  using ForwardTiles = forward::QueryTileScheduler;
  py::class_<ForwardTiles>(m, "ForwardTiles", "The query tiles of a forward, and the list in which they are worked on.")
      .def(py::init(&forward_tiles), py::kw_only(), py::arg("batch"), py::arg("seqlen_q"), py::arg("seqlen_k"),
           py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("value_head_dim") = py::none(),
           py::arg("causal"), py::arg("sms"), py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0,
           py::arg("drops") = false)
      .def_readonly("num_tiles", &ForwardTiles::num_tiles)
      .def_readonly("query_tiles", &ForwardTiles::query_tiles)
      .def_property_readonly("head_groups", [](ForwardTiles const& tiles) { return int{tiles.head_groups}; })
      .def_readonly("tile_positions", &ForwardTiles::tile_positions)
      .def_readonly("last_groups", &ForwardTiles::last_groups)
      .def_readonly("takes_tiles", &ForwardTiles::takes_tiles)
      .def(
          "tile",
          [](ForwardTiles const& tiles, int64_t place) {
            forward::QueryTile const tile = tiles.tile(in_range("place", place, 0, tiles.num_tiles));
            return std::make_tuple(tile.batch, tile.head_group, tile.index);
          },
          py::arg("place"), "(sequence, head group, index) of a place in the list.")
      .def(
          "positions",
          [](ForwardTiles const& tiles, int64_t index) {
            int const tile = in_range("index", index, 0, tiles.query_tiles);
            int const end = tiles.end_position(tile);
            return std::make_tuple(tiles.first_position(end), min_int(end, tiles.sequence.seqlen_q));
          },
          py::arg("index"), "First position of a tile in its sequence, and where the next tile begins.");

  m.def(
      "divide",
      [](int64_t dividend, int64_t divisor) {
        Divisor const by(positive("divisor", divisor));
        int const of = in_range("dividend", dividend, 0, int64_t{1} << 31);
        return std::make_tuple(of / by, of % by);
      },
      py::arg("dividend"), py::arg("divisor"), "(quotient, remainder), as kernels divide by an argument of the call.");

  auto const grid = [](int64_t seqlen_q, int64_t seqlen_k, int64_t tile_k, bool causal, WindowSize window,
                       int64_t attention_chunk) {
    return TileGrid{{1, positive("tile_k", tile_k), 1},
                    mask_of(checked_rule(causal, window, attention_chunk), checked_lengths(seqlen_q, seqlen_k))};
  };
  m.def(
      "keys_of",
      [=](int64_t seqlen_q, int64_t seqlen_k, int64_t query, bool causal, WindowSize window, int64_t attention_chunk) {
        TileGrid const rows = grid(seqlen_q, seqlen_k, 1, causal, window, attention_chunk);
        return as_tuple(rows.mask.keys_of(in_range("query", query, 0, seqlen_q)));
      },
      py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("query"), py::kw_only(), py::arg("causal"),
      py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0, "(first, count) of the keys that a query sees.");
  m.def(
      "queries_of",
      [=](int64_t seqlen_q, int64_t seqlen_k, int64_t key, bool causal, WindowSize window, int64_t attention_chunk) {
        TileGrid const rows = grid(seqlen_q, seqlen_k, 1, causal, window, attention_chunk);
        return as_tuple(rows.mask.queries_of(in_range("key", key, 0, seqlen_k)));
      },
      py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("key"), py::kw_only(), py::arg("causal"),
      py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0, "(first, count) of the queries that see a key.");
  m.def(
      "kv_tiles_of_queries",
      [=](int64_t seqlen_q, int64_t seqlen_k, int64_t tile_k, int64_t first, int64_t end, bool causal,
          WindowSize window, int64_t attention_chunk) {
        TileGrid const tiles = grid(seqlen_q, seqlen_k, tile_k, causal, window, attention_chunk);
        int const from = in_range("first", first, 0, seqlen_q), to = in_range("end", end, first + 1, seqlen_q + 1000);
        return std::make_tuple(as_tuple(tiles.kv_tiles_of_queries(from, to)),
                               as_tuple(tiles.kv_tiles_seen_whole(from, to)));
      },
      py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("tile_k"), py::arg("first"), py::arg("end"), py::kw_only(),
      py::arg("causal"), py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0,
      "(first, count) of the KV tiles of which some of the queries first ... end - 1 sees a key, and of those of which "
      "each sees all.");
}

}  // namespace dash_attn
