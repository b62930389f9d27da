// Everything that the host decides about one call of the forward, before it launches anything.
#pragma once

#include <cstdint>

#include "../forward/params.h"
#include "../placement/pack_needs.h"
#include "arguments.h"
#include "kernels.h"
#include "workspace.h"

namespace dash_attn {

struct ForwardPlan {
  ForwardArguments call;         // with the mask that its kernel serves (scores.h)
  const ForwardKernel* kernel;
  bool plans_pack;               // whether packing/plan.h runs before the kernel; never for a dense batch
  ForwardPackRule pack_rule;     // of a pack
  PackCapacity capacity;         // of a pack: an upper bound of what its sequences need
  forward::KernelParams params;  // complete except for what lies in the workspace
  int ctas;

  // In the workspace.
  PackArrays pack;  // with plans_pack
  ColumnArrays columns;

  Tiling tiling() const { return {params.scheduler.tile_positions, kernel->key_rows, 1}; }
};

// Throws std::runtime_error where this build or the kernels cannot serve the call.
ForwardPlan plan_forward(const ForwardArguments& call);

// Cuts the workspace that starts at `base` into the plan's arrays and returns its size. With a null `base` only the
// size means anything.
int64_t place_workspace(ForwardPlan& plan, void* base);

}  // namespace dash_attn
