// The kernels beside the main ones, which depend on dtype and head dim at most, and on neither mask nor policy.
#pragma once

#include "arguments.h"
#include "forward_work.h"
#include "workspace.h"

namespace dash_attn {

// Of a pack: who works on what, and what is promised of rows outside its sequences.
void launch_forward_plan(const ForwardArguments& a, const ForwardWorkspace& workspace, cudaStream_t stream);
void launch_backward_plan(const BackwardArguments& a, const BackwardWorkspace& workspace, cudaStream_t stream);

void launch_statistics(const BackwardArguments& a, const BackwardWorkspace& workspace, cudaStream_t stream);
// `finishes_dq`: the main kernel does, and leaves out rows that see no key.
void launch_preprocess(const BackwardArguments& a, const BackwardWorkspace& workspace, bool finishes_dq,
                       cudaStream_t stream);
void launch_sinks(const BackwardArguments& a, const BackwardWorkspace& workspace, cudaStream_t stream);
void launch_convert(const BackwardArguments& a, const BackwardWorkspace& workspace, cudaStream_t stream);

}  // namespace dash_attn
