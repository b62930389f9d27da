#pragma once
#include "machine.h"

namespace cute {
inline bool elect_one_sync() {
  emulator::machine->exchange("elect", 0);
  return emulator::machine->current % emulator::kWarpLanes == 0;
}
}  // namespace cute
