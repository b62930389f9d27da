// A call of the backward as Python sees it: the grid of one sequence's tiles, and the work on all of them.
#pragma once

#include "../contract/splits.h"
#include "../contract/tile_grid.h"
#include "../placement/work_tile.h"

namespace dash_attn {

struct Problem {
  TileGrid grid;
  TileScheduler scheduler;

  constexpr int heads_per_split() const { return scheduler.group_size / scheduler.splits; }

  template <Policy P>
  constexpr int64_t num_groups() const {
    return scheduler.num_groups<P>(grid);
  }
  template <Policy P>
  constexpr WorkTile work_tile(int number, int cta_rank) const {
    return scheduler.work_tile<P>(grid, number, cta_rank);
  }
};

}  // namespace dash_attn
