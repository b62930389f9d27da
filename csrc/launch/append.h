// What the bindings call to write new keys and values into a cache, on raw pointers. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../cache/params.h"

namespace dash_attn {

// `arguments`: units are elements of 16 bits. `num_sms`: the SMs of the device less the margin.
void run_append(const cache::AppendParams& arguments, int num_sms, int sm_margin, cudaStream_t stream);

}  // namespace dash_attn
