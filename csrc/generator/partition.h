// How the lines of bits are dealt to warps. Plain C++.
#pragma once

#include <cstdint>

#include "../dropout/mask.h"
#include "../schedule/mask.h"

namespace dash_attn::dropout {

inline constexpr int kGeneratorThreads = 256;

// That run at a time, with the registers that they need: so all of a launch do.
constexpr int generator_blocks_of_sm(Mapping mapping) { return mapping == Mapping::kBitSliced ? 6 : 5; }

constexpr int64_t generator_warps(Mapping mapping, int sms) {
  return int64_t{sms} * generator_blocks_of_sm(mapping) * (kGeneratorThreads / 32);
}

// The unit_shift (lines.h) with which units have so many lines or fewer, for warps that take one after the other.
constexpr int shift_of_small_units(int key_blocks) {
  constexpr int kLinesOfUnit = 16;
  int shift = 0;
  while (ceil_div(key_blocks, 1 << shift) > kLinesOfUnit) ++shift;
  return shift;
}

// For warps whose units are known beforehand. Few large units where there are many, as each takes as long to begin as
// two lines, but at least four a warp, so that under a mask warps end together; and small ones where warps would have
// none.
constexpr int shift_of_units(int64_t rows, int key_blocks, int64_t warps) {
  constexpr int kManyRounds = 4, kFewLines = 2;
  int shift = shift_of_small_units(key_blocks);
  while (shift > 0 && (rows << shift) / 2 >= kManyRounds * warps) --shift;
  while (rows << shift < 2 * warps && ceil_div(key_blocks, 1 << shift) > kFewLines) ++shift;
  return shift;
}

}  // namespace dash_attn::dropout
