// The plan of a mask by key columns (columns/plan.h), on the host.
#pragma once

#include <cuda_runtime_api.h>

#include "backward_plan.h"
#include "forward_plan.h"

namespace dash_attn {

// Throws std::runtime_error if the plan of a pass with these tiles is too large to be counted in 32 bits.
void check_column_sizes(const AttentionArguments& a, const Tiling& tiling);

ColumnArrays take_column_arrays(WorkspaceAllocator& allocator, const AttentionArguments& a, const Tiling& tiling);

// Of a dense batch, also clears the counter of tiles.
void launch_column_plan(const ForwardPlan& plan, cudaStream_t stream);
void launch_column_plan(const BackwardPlan& plan, cudaStream_t stream);

}  // namespace dash_attn
