#include <algorithm>

#include "../generator/generate.h"
#include "dropout.h"
#include "generator.h"
#include "launch.h"

namespace dash_attn {

void run_generator(const GeneratorArguments& a, cudaStream_t stream) {
  const dropout::GeneratorParams params = make_generator_params(a);
  constexpr int kWarps = dropout::kGeneratorThreads / 32;
  with_mapping(a, [&](auto mapping, auto rounds) {
    const int64_t at_a_time = int64_t{a.num_sms} * dropout::generator_blocks_of_sm(mapping());
    const int64_t blocks = std::min((params.units() + kWarps - 1) / kWarps, at_a_time);
    launch("the generator of dropout's bits", dropout::generator_kernel<mapping(), rounds()>, params,
           within_margin(blocks, dropout::kGeneratorThreads, 0, a.num_sms, a.sm_margin), stream);
  });
}

}  // namespace dash_attn
