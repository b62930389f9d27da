#pragma once

#if defined(__CUDACC__)
#define DASH_HOST_DEVICE __host__ __device__
#else
#define DASH_HOST_DEVICE
#endif

namespace dash_attn {

// Takes the place of a member that a variant of a kernel does not have.
struct Empty {};

}  // namespace dash_attn
