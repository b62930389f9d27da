// csrc/launch/launch.h on the host.
#pragma once

#include <algorithm>

#include "../device/sm90.h"
#include "check.h"

namespace dash_attn {

struct LaunchShape {
  unsigned blocks;
  int threads, shared_bytes;
};

template <typename Params>
void launch(const char*, void (*kernel)(Params), const Params& params, const LaunchShape& shape, cudaStream_t) {
  emulator::machine->launch(kernel, params, shape.blocks, shape.threads);
}

}  // namespace dash_attn
