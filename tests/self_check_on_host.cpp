// What the self-check says of facts of which one is wrong: which of them, and how much it is off, are arguments.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "launch/self_check_facts.h"

using namespace dash_attn::self_check;

int main(int, char** argv) {
  Facts facts{};
  for (int i = 0; i < kSums; ++i) { facts.sums[i] = kAfter[i]; }
  for (int row = 0; row < kTileRows; ++row) { facts.read[row] = row < kLength ? kFirst + row + 1 : 0; }
  for (int row = 0; row < kRows; ++row) { facts.written[row] = row >= kFirst && row < kEnd ? kMark : row + 1; }
  const int place = std::atoi(argv[2]), off = std::atoi(argv[3]);
  if (!std::strcmp(argv[1], "sums")) { facts.sums[place] += off; }
  if (!std::strcmp(argv[1], "read")) { facts.read[place] += off; }
  if (!std::strcmp(argv[1], "written")) { facts.written[place] += off; }
  std::printf("%s", problem_of(facts).c_str());
}
