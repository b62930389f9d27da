// What schedule="auto" means. This is part of the bit contract, because another policy is another order of sums.
//
// It may depend on what a KV head knows of itself: not on the number of heads or sequences of a call, nor on the GPU,
// because a head keeps its bits when a call is split over GPUs by heads; nor on lengths, which for a pack only the
// device knows. A change here changes the bits of every user who does not name a policy, and so must be noted in
// CHANGELOG.md.
#pragma once

#include "policy.h"
#include "tile_shapes.h"

namespace dash_attn {

constexpr Policy automatic_policy(MaskKind /*mask*/, HeadDims /*padded*/) { return Policy::kDescending; }

}  // namespace dash_attn
