// Everything that the host decides about one call of the backward, before it launches anything. The stages of the call
// (stages.h) take the plan and decide nothing.
#pragma once

#include <cstdint>

#include "../backward/params.h"
#include "../contract/policy.h"
#include "../contract/tile_grid.h"
#include "../placement/pack_needs.h"
#include "arguments.h"
#include "kernels.h"
#include "workspace.h"

namespace dash_attn {

struct BackwardPlan {
  // With the mask that the kernels beside the main one see, and of which the order of sums is made. Unless the call
  // carries sums or has a mask by key columns, the main kernel sees it too.
  BackwardArguments call;
  MaskRule kernel_mask;  // of the main kernel
  const BackwardKernel* kernel;
  TileGrid grid;               // of a dense batch, as the main kernel sees it
  BackwardPackRule pack_rule;  // of a pack
  // What the call needs, and the numbers that the work counter hands out, one for each group of KV tiles. For a pack,
  // whose lengths the host does not know, both are upper bounds.
  PackCapacity capacity;
  int64_t num_groups;
  backward::KernelParams params;  // complete except for what lies in the workspace
  int ctas;
  bool starts_early;  // kernels may start before the previous one has ended

  // In the workspace.
  PackArrays pack;
  ColumnArrays columns;
  int num_split_semaphores;  // of splits and of first parts
  int num_work_counters;     // next_work and what lies behind it

  bool is_order_free() const { return accumulation(call.policy) == Accumulation::kOrderFree; }
  bool finishes_dq() const { return params.finishes_dq; }
};

// Throws std::runtime_error where this build or the kernels cannot serve the call.
BackwardPlan plan_backward(const BackwardArguments& call);

// Cuts the workspace that starts at `base` into the plan's arrays and returns its size. With a null `base` only the
// size means anything.
int64_t place_workspace(BackwardPlan& plan, void* base);

}  // namespace dash_attn
