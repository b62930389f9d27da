// Included by the translation units that setup.py writes from variants.def.
#pragma once

#include "launch_forward.h"
#include "variant.h"

#define DASH_INSTANTIATE_FORWARD(dtype, head_dims, mask, score)                                                    \
  template void dash_attn::launch_forward<                                                                         \
      dash_attn::ForwardVariant<dash_attn::dtype, dash_attn::Dims##head_dims, dash_attn::mask, dash_attn::score>>( \
      const dash_attn::ForwardArguments&, cudaStream_t);
