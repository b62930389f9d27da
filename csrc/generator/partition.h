// How the lines of bits are partitioned among warps. Plain C++.
#pragma once

#include <cstdint>

#include "../contract/mask.h"
#include "../dropout/mask.h"

namespace dash_attn::dropout {

inline constexpr int kGeneratorThreads = 256;

// The blocks that run on an SM at a time, given their registers. All blocks of a launch run at once.
constexpr int generator_blocks_of_sm(Mapping mapping) { return mapping == Mapping::kBitSliced ? 6 : 5; }

constexpr int64_t generator_warps(Mapping mapping, int sms) {
  return int64_t{sms} * generator_blocks_of_sm(mapping) * (kGeneratorThreads / 32);
}

// The unit_shift (lines.h) for units of at most kLinesOfUnit lines, for warps that take one unit after the other.
constexpr int shift_of_small_units(int key_blocks) {
  constexpr int kLinesOfUnit = 16;
  int shift = 0;
  while (ceil_div(key_blocks, 1 << shift) > kLinesOfUnit) ++shift;
  return shift;
}

// The unit_shift for warps whose units are known beforehand. If there are many units they are large, because starting
// one takes as long as two lines, but each warp gets at least four, so that under a mask warps end together. If warps
// would otherwise have no unit, units are small.
constexpr int shift_of_units(int64_t rows, int key_blocks, int64_t warps) {
  constexpr int kManyRounds = 4, kFewLines = 2;
  int shift = shift_of_small_units(key_blocks);
  while (shift > 0 && (rows << shift) / 2 >= kManyRounds * warps) --shift;
  while (rows << shift < 2 * warps && ceil_div(key_blocks, 1 << shift) > kFewLines) ++shift;
  return shift;
}

}  // namespace dash_attn::dropout
