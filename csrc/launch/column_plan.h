// The plan of a mask by key columns (columns/plan.h), on the host.
#pragma once

#include <cuda_runtime_api.h>

#include "../contract/tile_grid.h"
#include "../placement/columns.h"
#include "arguments.h"
#include "workspace.h"

namespace dash_attn {

// Throws std::runtime_error if the plan of a pass with these tiles is too large to be counted in 32 bits.
void check_column_sizes(const AttentionArguments& a, const Tiling& tiling);

ColumnArrays take_column_arrays(WorkspaceAllocator& allocator, const AttentionArguments& a, const Tiling& tiling);

// `mask`: the mask that the pass's kernel sees.
void launch_column_plan(const AttentionArguments& a, const MaskRule& mask, const Tiling& tiling,
                        const ColumnArrays& arrays, cudaStream_t stream);

}  // namespace dash_attn
