// What the kernels rely on although NVIDIA's documents do not promise it, tried once on each device before its first
// use:
//   - a bulk addition keeps subnormal numbers: the bits of dQ do not depend on who makes dQ of a sum (finishing.h);
//   - TMA addresses wrap at 2^64: a pack's tensor map clips at the end of a sequence (tensor_map.cu).
#pragma once

#include <cuda_runtime_api.h>

namespace dash_attn {

// Throws std::runtime_error, which says what does not hold, where the current device does not behave like that. The
// first call on a device runs a small kernel on a stream of its own and waits for it, also while another stream is
// captured. No GPU fails the check, so only what it says of its facts is tested (tests/test_self_check.py).
void require_self_check();

}  // namespace dash_attn
