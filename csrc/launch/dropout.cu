#include <cstdint>

#include "../generator/generate.h"
#include "dropout.h"
#include "generator.h"
#include "launch.h"

namespace dash_attn {

namespace {

// Few large units where there are many, as each takes as long to begin as a line or two, and small ones where warps
// would have none. `warps`: that run at a time.
int unit_shift(dropout::GeneratorParams params, int64_t warps) {
  constexpr int kManyRounds = 32, kFewLines = 2;
  while (params.unit_shift > 0 && params.units() / 2 >= kManyRounds * warps) { --params.unit_shift; }
  while (params.units() < 2 * warps && params.most_lines_of_unit() > kFewLines) { ++params.unit_shift; }
  return params.unit_shift;
}

}  // namespace

void run_generator(const GeneratorArguments& a, cudaStream_t stream) {
  dropout::GeneratorParams params = make_generator_params(a);
  constexpr int kWarps = dropout::kGeneratorThreads / 32;
  with_mapping(a, [&](auto mapping, auto rounds) {
    params.unit_shift = unit_shift(params, int64_t{a.num_sms} * dropout::generator_blocks_of_sm(mapping()) * kWarps);
    const int64_t blocks = (params.units() + kWarps - 1) / kWarps;
    launch("the generator of dropout's bits", dropout::generator_kernel<mapping(), rounds()>, params,
           within_margin(blocks, dropout::kGeneratorThreads, 0, a.num_sms, a.sm_margin), stream);
  });
}

}  // namespace dash_attn
