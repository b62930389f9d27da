#pragma once
#include "machine.h"

namespace cute {
inline bool elect_one_sync() {
  emulator::machine->exchange("elect", 0);
  return emulator::machine->current % emulator::kWarpLanes == 0;
}
// Of clusters, which there are none of.
void cluster_sync();
uint32_t block_rank_in_cluster();
}  // namespace cute
