// Fingerprints of parts of tensors, for receipts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "../receipts/parts.h"

namespace dash_attn {

// Writes all of the `count` sums. Nothing waits, and the stream may be captured.
void run_fingerprint(const std::vector<receipts::Piece>& pieces, int block_shift, uint64_t* sums, int64_t count,
                     cudaStream_t stream);

}  // namespace dash_attn
