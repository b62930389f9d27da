// The paper's static mapping of work tiles to SMs, for the simulator. Host only.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "problem.h"

namespace dash_attn {

// The static mapping of the paper: which KV tiles SM s owns, in order. Needs as many SMs as KV tiles.
template <Policy policy>
std::vector<std::vector<WorkTile>> published_mapping(Problem const& problem, int sms) {
  int const n = problem.grid.kv_tiles();
  if (policy == Policy::kSpt) throw std::invalid_argument("the paper gives no static mapping for schedule='spt'");
  if (sms != n) {
    throw std::invalid_argument("sms must be the number of KV tiles, " + std::to_string(n) +
                                ", in the published mapping, got " + std::to_string(sms));
  }
  if (policy == Policy::kSymmetricShift && n % 2) {
    throw std::invalid_argument("the published symmetric shift needs an even number of KV tiles, got " +
                                std::to_string(n));
  }
  std::vector<std::vector<WorkTile>> work(sms);
  int const heads = problem.scheduler.batch * problem.scheduler.kv_heads;
  for (int head = 0; head < heads * problem.scheduler.splits; ++head) {
    auto const give = [&](int sm, int kv) {
      int const kv_heads = problem.scheduler.kv_heads;
      WorkPlace const place =
          WorkPlace::of(head % heads / kv_heads, head % kv_heads, head / heads, Visits::kAll, kv);
      work[sm].push_back(problem.scheduler.at<policy>(problem.grid, place));
    };
    for (int s = 0; s < n; ++s) {
      if (policy == Policy::kSymmetricShift) {
        if (s < n / 2) {
          int const sm = head % 2 * (n / 2) + s;  // two heads side by side, half of the SMs each
          give(sm, s);
          give(sm, n - 1 - s);
        }
      } else {
        bool const mirrored = problem.grid.mask.kind == MaskKind::kCausal && head % 2;
        give(s, mirrored ? n - 1 - s : s);
      }
    }
  }
  return work;
}

}  // namespace dash_attn
