// What schedule="auto" means: part of the bit contract, because another policy is another order of sums.
//
// It may look at what a KV head knows of itself. Not at how many heads or sequences a call has, nor at the GPU: a head
// keeps its bits when a call is split over GPUs by heads. Nor at lengths, which in a pack the device alone knows. A
// change here changes the bits of every user who does not name a policy, and so belongs in CHANGELOG.md.
#pragma once

#include "../config/tile_shapes.h"
#include "policy.h"

namespace dash_attn {

constexpr Policy automatic_policy(MaskKind /*mask*/, HeadDims /*padded*/) { return Policy::kDescending; }

}  // namespace dash_attn
