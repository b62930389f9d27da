#include <cstdint>

#include "../generator/generate.h"
#include "dropout.h"
#include "generator.h"
#include "launch.h"

namespace dash_attn {

void run_generator(const GeneratorArguments& a, cudaStream_t stream) {
  dropout::GeneratorParams params = make_generator_params(a);
  constexpr int kWarps = dropout::kGeneratorThreads / 32;
  with_mapping(a, [&](auto mapping, auto rounds) {
    params.unit_shift =
        dropout::shift_of_units(params.rows(), params.key_blocks, dropout::generator_warps(mapping(), a.num_sms));
    const int64_t blocks = (params.units() + kWarps - 1) / kWarps;
    launch("the generator of dropout's bits", dropout::generator_kernel<mapping(), rounds()>, params,
           within_margin(blocks, dropout::kGeneratorThreads, 0, a.num_sms, a.sm_margin), stream);
  });
}

}  // namespace dash_attn
