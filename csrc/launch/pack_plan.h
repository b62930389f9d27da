// The kernel before either pass over a pack: it plans the work (packing/plan.h) and clears results of rows that belong
// to no sequence. Beside a forward that needs no plan, another kernel checks the cache (packing/check.h).
#pragma once

#include "backward_plan.h"
#include "forward_plan.h"

namespace dash_attn {

void launch_pack_plan(const ForwardPlan& plan, cudaStream_t stream);
void launch_pack_plan(const BackwardPlan& plan, cudaStream_t stream);
void launch_cache_check(const ForwardPlan& plan, cudaStream_t stream);

}  // namespace dash_attn
