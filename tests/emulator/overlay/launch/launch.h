// csrc/launch/launch.h on the host. CTAs that are alone on an SM run side by side, a few at a time; of the others one
// runs at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "../device/sm90.h"
#include "check.h"

namespace dash_attn {

struct LaunchShape {
  unsigned blocks;
  int threads, shared_bytes;
};

inline cudaLaunchAttribute starts_before_previous_ends(bool) { return {}; }

inline LaunchShape within_margin(int64_t blocks, int threads, int shared_bytes, int, int) {
  return {unsigned(blocks), threads, shared_bytes};
}

template <typename Params>
void launch(const char*, void (*kernel)(Params), const Params& params, const LaunchShape& shape, cudaStream_t,
            std::initializer_list<cudaLaunchAttribute> = {}) {
  constexpr unsigned kTogether = 4;
  const bool is_alone = shape.shared_bytes > kSharedMemoryLimit / 2;
  emulator::machine->launch(kernel, params, shape.blocks, shape.threads, is_alone ? kTogether : 1);
}

}  // namespace dash_attn
