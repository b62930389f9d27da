// What the simulator (simulator.h) is told and what it says. Host only.
#pragma once

#include <cstdint>
#include <vector>

namespace dash_attn {

enum class Mapping {
  kCounter,      // clusters take groups of KV tiles from a counter, as the kernel does
  kIndependent,  // the KV tiles of the groups are taken one by one, by CTAs that need not be resident together
  kPublished,    // the paper's static mapping of one SM a KV tile, heads one after the other
};

struct SimulationOptions {
  int sms = 1;
  double product_time = 1;
  double spread = 0;     // products take product_time * (1 - spread ... 1 + spread), evenly, the same each time
  double mask_time = 0;  // what products take longer where the causal diagonal crosses the tile
  double add_time = 0;
  double signal_time = 0;  // from the end of an add until the next rank's CTA knows of it
  // From taking up a partial until the semaphore is known to stand at its rank, when it does already; not for rank 0.
  double poll_time = 0;
  // From the end of a work tile's products to the start of the next one's: dK and dV out, K and Q in.
  double work_time = 0;
  double split_time = 0;  // for which a split adds its dK and dV up, when the split before has
  double load_time = 0;   // from the start of a work tile of few steps until its loads have gone out
  // For which a work tile's K, V, dK and dV keep memory busy, which serves one after the other.
  double memory_work_time = 0;
  double memory_tile_time = 0;  // the same for a query tile that is not in cache: Q, dO and the sum of dQ
  double miss_time = 0;         // what products take longer then, even if memory has nothing else to do
  double cache_time = 1e12;     // what the cache holds: a tile leaves it at 0.5 to 1.5 of this use of memory
  int staging = 0;              // partials that may be under way while products go on; 0: products wait for the add
  int adders = 1;       // partials of a CTA that may wait for their rank or be added at a time, taken round robin
  int loads_ahead = 0;  // steps loaded ahead: a work tile is taken this many steps before the end of the one before
  bool ordered = true;  // false: partials are added when they are ready, in any order
  Mapping mapping = Mapping::kCounter;
  // For which who decides how a head's divided KV tiles are worked on waits for CTAs to begin. It costs nothing here.
  double patience = 0;
  std::vector<double> launch_times;  // when each cluster (each SM, without clusters) becomes resident; empty: 0
  bool record_tasks = false;
};

struct SimulatedTask {
  int sm, batch, head, kv_tile, query_tile;
  double start, products_end, add_start, end;
};

struct Simulation {
  double makespan = 0;
  double busy = 0;         // time that products take, and adds that products wait for
  double memory_time = 0;  // that memory takes to serve all requests
  int64_t num_tasks = 0;
  std::vector<SimulatedTask> tasks;  // in the order in which they end
};

}  // namespace dash_attn
