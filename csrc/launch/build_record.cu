// What this binary was built from, as text that `python -m dash_attn.info` reads out of the file: so it needs neither a
// GPU nor a torch with CUDA.
#define DASH_TEXT_OF(x) #x
#define DASH_TEXT(x) DASH_TEXT_OF(x)
#define DASH_FORWARD_VARIANT(dtype, head_dims, mask, score) "forward " #dtype " " #head_dims " " #mask " " #score "\n"
#define DASH_BACKWARD_VARIANT(dtype, head_dims, mask, score, policies) \
  "backward " #dtype " " #head_dims " " #mask " " #score " " #policies "\n"

extern "C" __attribute__((visibility("default"), used)) const char dash_attn_build_record[] =
    "dash_attn build record\n"
    "architecture sm_90a\n"
    "nvcc " DASH_TEXT(__CUDACC_VER_MAJOR__) "." DASH_TEXT(__CUDACC_VER_MINOR__) "." DASH_TEXT(__CUDACC_VER_BUILD__) "\n"
#include "built_variants.def"
    "end\n";

#undef DASH_FORWARD_VARIANT
#undef DASH_BACKWARD_VARIANT
