// How much the backward's main kernel has under way at a time: read by the kernel, and by the model that plays it.
// Plain C++: no CUDA or torch.
#pragma once

namespace dash_attn::backward {

// Two of everything that changes from step to step, all used in turn, so that one count finds them: Q and dO (one tile
// is loaded while the other is used), dS (one is read while the next is written), dQ (one is added while the next is
// computed). Where heads are wide that holds of Q alone: see Geometry in backward/config.h and wide/storage.h.
inline constexpr int kPipelineStages = 2;

// Warps that add dQ, one for each buffer of it, in turn; where heads are wide, one for each part of its columns.
inline constexpr int kAdderWarps = 2;
static_assert(kAdderWarps == kPipelineStages);

}  // namespace dash_attn::backward
