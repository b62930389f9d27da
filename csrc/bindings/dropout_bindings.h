// Python's view of the dropout masks (csrc/dropout): the generator, the bits of a sequence and single elements of it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../dropout/fragment.h"
#include "../dropout/mask.h"
#include "tile_bindings.h"

namespace dash_attn::dropout {

// Rounds below kFewestRounds are for the tests of the tests alone: dash_attn.dropout refuses them.
template <class F>
auto with_rounds(int64_t rounds, F&& f) {
  switch (rounds) {
    case 3:
      return f(std::integral_constant<int, 3>{});
    case 5:
      return f(std::integral_constant<int, 5>{});
    case 7:
      return f(std::integral_constant<int, 7>{});
    case 10:
      return f(std::integral_constant<int, 10>{});
    default:
      throw py::value_error("rounds must be one of 3, 5, 7, 10, got " + std::to_string(rounds));
  }
}

template <class F>
auto with_mapping(std::string const& mapping, int64_t rounds, F&& f) {
  return with_rounds(rounds, [&](auto rounds_type) {
    if (mapping == "bit_sliced") return f(std::integral_constant<Mapping, Mapping::kBitSliced>{}, rounds_type);
    if (mapping == "flash_attention_2") {
      return f(std::integral_constant<Mapping, Mapping::kFlashAttention2>{}, rounds_type);
    }
    throw py::value_error("mapping must be one of 'bit_sliced', 'flash_attention_2', got '" + mapping + "'");
  });
}

inline int checked_threshold(double p) {
  if (!(p >= 0) || !(static_cast<float>(p) < 1.0f)) {
    throw py::value_error("p must be at least 0 and below 1 in fp32, got " + std::to_string(p));
  }
  return keep_threshold(static_cast<float>(p));
}

// Where the bits of a call lie among all that there are.
struct Region {
  Source source;
  int first_head, query_blocks, key_blocks, first_query_block, first_key_block;

  Region(uint64_t seed, uint64_t offset, double p, int64_t sequence, int64_t first_head_number, int64_t heads,
         int64_t total_heads, int64_t seqlen_q, int64_t seqlen_k, int64_t first_query, int64_t first_key) {
    constexpr int64_t kEnd = int64_t{1} << 30;
    source.state = {seed, offset};
    source.sequence = static_cast<uint32_t>(in_range("sequence", sequence, 0, kMaxSequences));
    source.heads = static_cast<uint32_t>(in_range("total_heads", total_heads, 1, kMaxHeads + 1));
    source.threshold = checked_threshold(p);
    in_range("heads", heads, 1, total_heads + 1);
    first_head = in_range("first_head", first_head_number, 0, total_heads - heads + 1);
    query_blocks = num_blocks(in_range("seqlen_q", seqlen_q, 0, kEnd));
    key_blocks = num_blocks(in_range("seqlen_k", seqlen_k, 0, kEnd));
    first_query_block = block("first_query", first_query, kEnd - seqlen_q);
    first_key_block = block("first_key", first_key, kEnd - seqlen_k);
  }

  static int block(char const* argument, int64_t row, int64_t end) {
    if (in_range(argument, row, 0, end) % kBlockRows != 0) {
      throw py::value_error(std::string(argument) + " must be a multiple of " + std::to_string(kBlockRows) + ", got " +
                            std::to_string(row));
    }
    return static_cast<int>(row / kBlockRows);
  }
};

// [head][block of queries][block of keys][128 bytes].
inline py::bytearray mask_bits(Region const& region, int64_t heads, std::string const& mapping, int64_t rounds) {
  int64_t const blocks = heads * region.query_blocks * region.key_blocks;
  std::string bytes(static_cast<size_t>(blocks * kBlockBytes), '\0');
  with_mapping(mapping, rounds, [&](auto mapping_type, auto rounds_type) {
    py::gil_scoped_release const release;
    for (int64_t block = 0; block < blocks; ++block) {
      auto const key_block = static_cast<uint32_t>(block % region.key_blocks + region.first_key_block);
      int64_t const row = block / region.key_blocks;
      auto const query_block = static_cast<uint32_t>(row % region.query_blocks + region.first_query_block);
      auto const head = static_cast<uint32_t>(row / region.query_blocks + region.first_head);
      for (int word = 0; word < kBlockWords; ++word) {
        uint32_t const bits =
            mask_word<mapping_type(), rounds_type()>(region.source, head, query_block, key_block, word);
        char* const target = bytes.data() + block * kBlockBytes + 4 * word;
        for (int i = 0; i < 4; ++i) target[i] = static_cast<char>(bits >> 8 * i & 0xFF);
      }
    }
  });
  return py::bytearray(bytes.data(), bytes.size());
}

// The bits of a head as a thread of a warpgroup gathers them for a fragment: whether it keeps each of its registers.
template <FragmentRows kRows, int kColumns>
std::vector<bool> kept_registers(std::string const& bits, int64_t key_blocks, int first_row, int first_column,
                                 int thread) {
  using Layout = FragmentLayout<kRows, kColumns>;
  uint32_t words[Layout::kWords];
  Layout::gather(words, first_row, first_column, thread, [&](int row_block, int column_block, int byte) {
    int64_t const query_block = Layout::kQueriesAreRows ? row_block : column_block;
    int64_t const key_block = Layout::kQueriesAreRows ? column_block : row_block;
    size_t const start = static_cast<size_t>((query_block * key_blocks + key_block) * kBlockBytes + byte);
    using Loaded = typename Layout::Loaded;
    uint64_t value = 0;
    if (key_block < key_blocks && start + sizeof(Loaded) <= bits.size()) {
      for (size_t i = 0; i < sizeof(Loaded); ++i) {
        value |= uint64_t{static_cast<unsigned char>(bits[start + i])} << 8 * i;
      }
    }
    return static_cast<Loaded>(value);
  });
  std::vector<bool> kept;
  for (int i = 0; i < kColumns / 2; ++i) {
    int const place = Layout::place_of(i / 8, i % 8 / 2) + i % 2 * Layout::kPitch;
    kept.push_back(words[Layout::word_of(i / 8)] >> place & 1);
  }
  return kept;
}

inline std::vector<bool> kept_registers_of(bool queries_are_rows, int64_t columns, std::string const& bits,
                                           int64_t key_blocks, int64_t first_row, int64_t first_column,
                                           int64_t thread) {
  auto const of = [&](auto rows, auto columns_type) {
    constexpr int64_t kEnd = int64_t{1} << 30;
    return kept_registers<rows(), columns_type()>(
        bits, positive("key_blocks", key_blocks), in_range("first_row", first_row, 0, kEnd),
        in_range("first_column", first_column, 0, kEnd), in_range("thread", thread, 0, 128));
  };
  auto const with_columns = [&](auto rows) {
    switch (columns) {  // of the tables of tile shapes
      case 64:
        return of(rows, std::integral_constant<int, 64>{});
      case 80:
        return of(rows, std::integral_constant<int, 80>{});
      case 96:
        return of(rows, std::integral_constant<int, 96>{});
      case 128:
        return of(rows, std::integral_constant<int, 128>{});
      default:
        throw py::value_error("columns must be one of 64, 80, 96, 128, got " + std::to_string(columns));
    }
  };
  return queries_are_rows ? with_columns(std::integral_constant<FragmentRows, FragmentRows::kQueries>{})
                          : with_columns(std::integral_constant<FragmentRows, FragmentRows::kKeys>{});
}

using FourWords = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;
using TwoWords = std::tuple<uint32_t, uint32_t>;

inline void bind_dropout(py::module_& m) {
  m.attr("DROPOUT_BLOCK_ROWS") = kBlockRows;
  m.attr("DROPOUT_BLOCK_BYTES") = kBlockBytes;
  m.def(
      "philox4x32",
      [](FourWords counter, TwoWords key, int64_t rounds) {
        return with_rounds(rounds, [&](auto rounds_type) {
          auto const [c0, c1, c2, c3] = counter;
          auto const [k0, k1] = key;
          auto const [words] = philox4x32<rounds_type()>({{c0, c1, c2, c3}}, {{k0, k1}});
          return FourWords{words[0], words[1], words[2], words[3]};
        });
      },
      py::arg("counter"), py::arg("key"), py::kw_only(), py::arg("rounds"),
      "The 128 random bits of a counter and a key.");
  m.def(
      "dropout_kept_registers",
      [](py::bytes const& bits, bool queries_are_rows, int64_t columns, int64_t key_blocks, int64_t first_row,
         int64_t first_column, int64_t thread) {
        return kept_registers_of(queries_are_rows, columns, bits, key_blocks, first_row, first_column, thread);
      },
      py::arg("bits"), py::kw_only(), py::arg("queries_are_rows"), py::arg("columns"), py::arg("key_blocks"),
      py::arg("first_row"), py::arg("first_column"), py::arg("thread"),
      "Which registers of a 64 x columns accumulator a thread keeps: csrc/dropout/fragment.h.");
  m.def("dropout_threshold", &checked_threshold, py::arg("p"), "How many of 256 random bytes keep an element.");
  m.def(
      "dropout_bits",
      [](uint64_t seed, uint64_t offset, double p, int64_t sequence, int64_t heads, int64_t seqlen_q, int64_t seqlen_k,
         int64_t first_head, int64_t total_heads, int64_t first_query, int64_t first_key, std::string const& mapping,
         int64_t rounds) {
        Region const region(seed, offset, p, sequence, first_head, heads, total_heads, seqlen_q, seqlen_k, first_query,
                            first_key);
        return mask_bits(region, heads, mapping, rounds);
      },
      py::arg("seed"), py::arg("offset"), py::kw_only(), py::arg("p"), py::arg("sequence"), py::arg("heads"),
      py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("first_head"), py::arg("total_heads"), py::arg("first_query"),
      py::arg("first_key"), py::arg("mapping"), py::arg("rounds"),
      "Bits of one sequence, [head][block of 32 queries][block of 32 keys][128 bytes]: csrc/dropout/mask.h.");
  m.def(
      "dropout_keeps",
      [](uint64_t seed, uint64_t offset, double p, int64_t sequence, int64_t head, int64_t query, int64_t key,
         int64_t total_heads, std::string const& mapping, int64_t rounds) {
        constexpr int64_t kEnd = int64_t{1} << 30;
        Region const region(seed, offset, p, sequence, head, 1, total_heads, 0, 0, 0, 0);
        auto const i = static_cast<uint32_t>(in_range("query", query, 0, kEnd));
        auto const j = static_cast<uint32_t>(in_range("key", key, 0, kEnd));
        return with_mapping(mapping, rounds, [&](auto mapping_type, auto rounds_type) {
          return keeps<mapping_type(), rounds_type()>(region.source, static_cast<uint32_t>(head), i, j);
        });
      },
      py::arg("seed"), py::arg("offset"), py::kw_only(), py::arg("p"), py::arg("sequence"), py::arg("head"),
      py::arg("query"), py::arg("key"), py::arg("total_heads"), py::arg("mapping"), py::arg("rounds"),
      "Whether one element is kept.");
}

}  // namespace dash_attn::dropout
