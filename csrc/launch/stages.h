// The kernels of the backward beside the main one, which depend on dtype and head dims at most, and on neither mask nor
// policy.
#pragma once

#include "backward_plan.h"

namespace dash_attn {

// Before order-free sums: the statistics of keys that units are made of.
void launch_statistics(const BackwardPlan& plan, cudaStream_t stream);
// Clears dQ of rows that see no key, where the main kernel finishes dQ.
void launch_preprocess(const BackwardPlan& plan, cudaStream_t stream);
// Rounds and stores dQ, where the main kernel does not.
void launch_convert(const BackwardPlan& plan, cudaStream_t stream);
void launch_sinks(const BackwardPlan& plan, cudaStream_t stream);

}  // namespace dash_attn
