// Included by the translation units that setup.py writes from variants.def.
#pragma once

#include "launch_backward.h"
#include "variant.h"

#define DASH_INSTANTIATE_BACKWARD(dtype, head_dims, mask, score, policies)                                    \
  template void dash_attn::launch_backward<dash_attn::BackwardVariant<                                        \
      dash_attn::dtype, dash_attn::Dims##head_dims, dash_attn::mask, dash_attn::score, dash_attn::policies>>( \
      const dash_attn::BackwardArguments&, cudaStream_t);
