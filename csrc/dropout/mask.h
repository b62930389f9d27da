// Which elements of P dropout keeps: one bit for each query and key, where it is stored, and how it is generated. Plain
// C++ without CUDA or torch, for the generators on the GPU and on the host.
//
// Contract: a bit is a function of the state (seed, offset), the sequence's number, the query head, the query, the key,
// the probability, the mapping and the rounds. Queries and keys count from the start of their sequence. Nothing here
// knows tiles, schedules, the batch or the GPU. Only `Mapping::kFlashAttention2` knows the number of heads, like that
// library's own masks.
//
// Layout. A block of 32 queries x 32 keys is one line of 128 bytes, and blocks are [sequence][head][queries][keys].
// With
//     query = 32 I + 16 a + 8 b + 2 c + d        key = 32 J + 16 A + 8 B + 2 C + D
// in which c and C have two bits and the others one, the element is bit 16 d + 8 D + 4 A + 2 B + b of the little-endian
// 32-bit word 2 (4 c + C) + a of block (I, J). A bit of 1 means kept. A lane of a wgmma fragment then finds its
// elements side by side, whether rows are queries (one 16-bit load for 32 keys, all of whose bits it uses) or keys (one
// 64-bit load for 32 queries): docs/dropout.md.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "philox.h"

namespace dash_attn::dropout {

inline constexpr int kBlockRows = 32;  // both queries and keys
inline constexpr int kBlockWords = 32;
inline constexpr int kBlockBytes = 4 * kBlockWords;
inline constexpr int kBitsAlignment = 16;  // of the first line, in bytes, as bulk copies require

DASH_HOST_DEVICE constexpr int num_blocks(int seqlen) { return (seqlen + kBlockRows - 1) / kBlockRows; }

enum class Mapping {
  kBitSliced,        // dash_attn's own: 32 elements at a time, one step for each binary digit of the probability
  kFlashAttention2,  // the bits that FlashAttention-2's kernels derive from a seed and an offset
};

struct State {
  uint64_t seed, offset;
};

// Elements are kept with probability threshold / 256. As in FlashAttention-2, whose 1 - p is in fp32, random bytes up
// to floor(255 (1 - p)) are kept. The threshold is from 1 to 256 if p is below 1 in fp32.
DASH_HOST_DEVICE constexpr int keep_threshold(float p) {
  return static_cast<int>(255.0 * static_cast<double>(1.0f - p)) + 1;
}

// The inputs of a sequence's masks.
struct Source {
  State state;
  uint32_t sequence;
  uint32_t heads;  // of the whole model, over all its shards; used only by kFlashAttention2
  int threshold;
};

// Limits of the counter below, which holds the sequence and the head in one word and has room for 16 planes a word.
// Finer probabilities would keep the existing digits.
inline constexpr int kMaxSequences = 1 << 16;
inline constexpr int kMaxHeads = 1 << 16;
inline constexpr int kWordCalls = 4;
inline constexpr int kBlockCalls = kWordCalls * kBlockWords;

struct Place {
  int word, bit;
};

// The place of an element in its block.
DASH_HOST_DEVICE constexpr Place place_of(int query, int key) {
  auto const digit = [](int row, int place) { return row >> place & 1; };
  auto const pair = [](int row) { return row >> 1 & 3; };
  return {2 * (4 * pair(query) + pair(key)) + digit(query, 4),
          16 * digit(query, 0) + 8 * digit(key, 0) + 4 * digit(key, 4) + 2 * digit(key, 3) + digit(query, 3)};
}

// How many calls of Philox a word of kBitSliced takes: none if everything is kept, and one if 16 divides the threshold,
// because the last four planes then do not matter.
DASH_HOST_DEVICE constexpr int calls_of_word(int threshold) {
  return threshold == 256 ? 0 : threshold % 16 == 0 ? 1 : 2;
}

// Word `word` of block (I, J): bit e of plane k is the digit of weight 2^(7 - k) of the random byte u of element e, and
// u < threshold is kept. kCalls is calls_of_word(source.threshold).
template <int kRounds, int kCalls>
DASH_HOST_DEVICE constexpr uint32_t bit_sliced_word_of_calls(Source const& source, uint32_t head, uint32_t I,
                                                             uint32_t J, int word) {
  auto const& [seed, offset] = source.state;
  PhiloxKey const key{{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32 ^ offset >> 32)}};
  if (kCalls == 0) return ~uint32_t{0};
  uint32_t less = 0;
  // From the last digit to the first: whether the digits of u so far are less than those of the threshold.
  for (int call = kCalls - 1; call >= 0; --call) {
    PhiloxCounter const counter{{kBlockCalls * J + static_cast<uint32_t>(kWordCalls * word + call), I,
                                 kMaxHeads * source.sequence + head, static_cast<uint32_t>(offset)}};
    PhiloxCounter const planes = philox4x32<kRounds>(counter, key);
    for (int i = 3; i >= 0; --i) {
      uint32_t const plane = planes.word[i];
      uint32_t const digit = -static_cast<uint32_t>(source.threshold >> (7 - 4 * call - i) & 1);  // of all elements
      less = (~plane & less) | (digit & (~plane | less));
    }
  }
  return less;
}

template <int kRounds>
DASH_HOST_DEVICE constexpr uint32_t bit_sliced_word(Source const& source, uint32_t head, uint32_t I, uint32_t J,
                                                    int word) {
  switch (calls_of_word(source.threshold)) {
    case 0:
      return bit_sliced_word_of_calls<kRounds, 0>(source, head, I, J, word);
    case 1:
      return bit_sliced_word_of_calls<kRounds, 1>(source, head, I, J, word);
    default:
      return bit_sliced_word_of_calls<kRounds, 2>(source, head, I, J, word);
  }
}

// The same word in FlashAttention-2's mapping: each half is one call of Philox, whose 16 bytes are the random numbers
// of its 16 elements. That library calls Philox once for each lane of a warp and each 16 queries x 32 keys.
template <int kRounds>
DASH_HOST_DEVICE constexpr uint32_t flash_attention_2_word(Source const& source, uint32_t head, uint32_t I, uint32_t J,
                                                           int word) {
  PhiloxKey const key{{static_cast<uint32_t>(source.state.seed), static_cast<uint32_t>(source.state.seed >> 32)}};
  int const c = word >> 3, C = word >> 1 & 3, a = word & 1;
  uint64_t const first = source.state.offset + (uint64_t{source.sequence} * source.heads + head) * 32;
  uint32_t kept = 0;
  for (int d = 0; d < 2; ++d) {
    uint64_t const lane = first + static_cast<uint32_t>(4 * (2 * c + d) + C);
    PhiloxCounter const bytes = philox4x32<kRounds>(
        {{static_cast<uint32_t>(lane), static_cast<uint32_t>(lane >> 32), 2 * I + static_cast<uint32_t>(a), J}}, key);
    for (int element = 0; element < 16; ++element) {
      // Bit 8 D + 4 A + 2 B + b of the half is byte 8 A + 4 B + 2 b + D of the call.
      int const D = element >> 3, A = element >> 2 & 1, B = element >> 1 & 1, b = element & 1;
      int const byte = 8 * A + 4 * B + 2 * b + D;
      int const random = static_cast<int>(bytes.word[byte / 4] >> 8 * (byte % 4) & 0xFF);
      kept |= static_cast<uint32_t>(random < source.threshold) << (16 * d + element);
    }
  }
  return kept;
}

// Word `word` of block (I, J) of a head. I and J count from the sequence's start, and `head` from the model's first.
template <Mapping kMapping, int kRounds>
DASH_HOST_DEVICE constexpr uint32_t mask_word(Source const& source, uint32_t head, uint32_t I, uint32_t J, int word) {
  if constexpr (kMapping == Mapping::kBitSliced) {
    return bit_sliced_word<kRounds>(source, head, I, J, word);
  } else {
    return flash_attention_2_word<kRounds>(source, head, I, J, word);
  }
}

// Whether an element is kept. The bits of every generator must agree with this.
template <Mapping kMapping, int kRounds>
DASH_HOST_DEVICE constexpr bool keeps(Source const& source, uint32_t head, uint32_t query, uint32_t key) {
  auto const [word, bit] = place_of(static_cast<int>(query % kBlockRows), static_cast<int>(key % kBlockRows));
  return mask_word<kMapping, kRounds>(source, head, query / kBlockRows, key / kBlockRows, word) >> bit & 1;
}

}  // namespace dash_attn::dropout
