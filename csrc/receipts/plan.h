// Turns a call's list of pieces into launches, or into an error that says what is wrong. Host only.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "parts.h"

namespace dash_attn::receipts {

// Calls f(table) for each launch.
template <class F>
void for_tables(const std::vector<Piece>& pieces, int block_shift, uint64_t* sums, F&& f) {
  for (size_t begin = 0; begin < pieces.size(); begin += Table::kPieces) {
    Table table{};
    table.sums = sums;
    table.block_shift = block_shift;
    for (size_t i = begin; i < pieces.size() && table.count < Table::kPieces; ++i) {
      Piece& piece = table.pieces[table.count++] = pieces[i];
      table.units += piece.rows * units_of_row(piece, strip_shift(block_shift));
      piece.units_end = table.units;
    }
    f(static_cast<const Table&>(table));
  }
}

// The memory of a tensor of a call, all of which is words in row-major order.
struct Words {
  std::uintptr_t address;
  int64_t count;
  int bytes;  // of a word
};

// An element of up to 4 bytes is one word. An element of 8 or 16 bytes is 2 or 4 words of 4 bytes.
inline Words words_of(const void* data, int64_t elements, int64_t element_bytes) {
  const int64_t bytes = element_bytes < 4 ? element_bytes : 4;
  return {reinterpret_cast<std::uintptr_t>(data), elements * (element_bytes / bytes), static_cast<int>(bytes)};
}

inline int block_shift_of(int64_t block) {
  for (int shift = kLeastBlockShift; shift <= kMostBlockShift; ++shift) {
    if (block == int64_t{1} << shift) { return shift; }
  }
  throw std::invalid_argument("block must be a power of two from " + std::to_string(1 << kLeastBlockShift) + " to " +
                              std::to_string(1 << kMostBlockShift) + " words, got " + std::to_string(block));
}

// The number of integers that describe a piece: tensor, offset, rows, columns, pitch, first, stride, sums.
constexpr int64_t kPieceNumbers = 8;

// Reads pieces. Throws if one would read outside a tensor, add outside the sums, or overflow.
class PieceReader {
 public:
  PieceReader(const std::vector<Words>& tensors, int64_t block, int64_t sums)
      : tensors_(tensors), shift_(block_shift_of(block)), sums_(sums) {
    if (sums < 0) { throw std::invalid_argument("sums must be at least 0, got " + std::to_string(sums)); }
  }

  template <class Numbers>
  std::vector<Piece> read(const Numbers& numbers) const {
    const auto count = static_cast<int64_t>(numbers.size());
    if (count % kPieceNumbers != 0) {
      throw std::invalid_argument("pieces must have " + std::to_string(kPieceNumbers) + " numbers each, got " +
                                  std::to_string(count) + " numbers");
    }
    std::vector<Piece> pieces;
    pieces.reserve(static_cast<size_t>(count / kPieceNumbers));
    for (int64_t i = 0; i < count; i += kPieceNumbers) {
      int64_t of_piece[kPieceNumbers];
      for (int64_t j = 0; j < kPieceNumbers; ++j) { of_piece[j] = numbers[i + j]; }
      pieces.push_back(piece_of(i / kPieceNumbers, of_piece));
    }
    return pieces;
  }

  int block_shift() const { return shift_; }

 private:
  Piece piece_of(int64_t number, const int64_t (&numbers)[kPieceNumbers]) const {
    const auto& [tensor, offset, rows, columns, pitch, first, stride, sums] = numbers;
    // The text of what is allowed is built only if it is needed: a call has hundreds of pieces.
    const auto check = [number](bool holds, const char* name, int64_t value, auto&& allowed) {
      if (!holds) {
        throw std::invalid_argument(std::string(name) + " of piece " + std::to_string(number) + " must be " +
                                    std::string(allowed()) + ", got " + std::to_string(value));
      }
    };
    // With word numbers below 2^60, everything computed from them fits in 64 bits.
    constexpr int64_t kEnd = int64_t{1} << 60;
    const auto tensors = static_cast<int64_t>(tensors_.size());
    check(tensor >= 0 && tensor < tensors, "tensor", tensor, [&] { return "in [0, " + std::to_string(tensors) + ")"; });
    const Words& words = tensors_[static_cast<size_t>(tensor)];
    const auto inside = [&] { return "within the tensor's " + std::to_string(words.count) + " words"; };
    if (words.address % static_cast<unsigned>(words.bytes) != 0) {
      throw std::invalid_argument("tensors[" + std::to_string(tensor) + "] must begin at a multiple of " +
                                  std::to_string(words.bytes) + " bytes");
    }
    check(columns >= 1 && columns <= words.count, "columns", columns, [&] { return "at least 1 and " + inside(); });
    check(offset >= 0 && offset <= words.count - columns, "offset", offset,
          [&] { return "at least 0 and, with columns, " + inside(); });
    check(rows >= 1 && rows < kEnd, "rows", rows, [] { return "in [1, 2^60)"; });
    check(rows == 1 || pitch >= columns, "pitch", pitch, [] { return "at least columns"; });
    check(rows == 1 || rows - 1 <= (words.count - offset - columns) / pitch, "rows", rows, inside);
    check(first >= 0 && first < kEnd - columns, "first", first,
          [] { return "at least 0 and, with columns, below 2^60"; });
    check(rows == 1 || stride >= columns, "stride", stride, [] { return "at least columns"; });
    check(rows == 1 || rows - 1 <= (kEnd - first - columns) / stride, "stride", stride,
          [] { return "such that words end below 2^60"; });
    const int64_t last = first + (rows == 1 ? 0 : (rows - 1) * stride) + columns - 1;
    check(sums > -kEnd && sums + (first >> shift_) >= 0 && sums < sums_ && sums + (last >> shift_) < sums_, "sums",
          sums, [&, first = first] {
            return "such that blocks " + std::to_string(first >> shift_) + " to " + std::to_string(last >> shift_) +
                   " are among the " + std::to_string(sums_) + " sums";
          });
    Piece piece{};
    piece.address = words.address + static_cast<std::uintptr_t>(offset * words.bytes);
    piece.rows = rows;
    piece.columns = columns;
    piece.pitch = pitch;
    piece.first = first;
    piece.stride = stride;
    piece.sums = sums;
    piece.word_bytes = words.bytes;
    return piece;
  }

  const std::vector<Words>& tensors_;
  int shift_;
  int64_t sums_;
};

}  // namespace dash_attn::receipts
