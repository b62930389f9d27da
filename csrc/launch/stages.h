// The backward's smaller kernels, which depend on dtype and head dim, and on neither mask nor policy.
#pragma once

#include "../backward/params.h"
#include "arguments.h"

namespace dash_attn {

void launch_statistics(const BackwardArguments& a, const backward::Workspace& workspace, cudaStream_t stream);
void launch_preprocess(const BackwardArguments& a, const backward::Workspace& workspace, cudaStream_t stream);
void launch_convert(const BackwardArguments& a, const backward::Workspace& workspace, cudaStream_t stream);

}  // namespace dash_attn
