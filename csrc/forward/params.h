// The parameters of the forward kernel.
#pragma once

#include <cuda.h>

#include "../device/dropout_bits.h"
#include "../device/score.h"
#include "../placement/columns.h"
#include "../placement/forward_tiles.h"
#include "largest_logits.h"

namespace dash_attn::forward {

// K or V of all pages, for loads without TMA.
struct RowsOfPages {
  const void* data;
  int64_t stride_row, stride_head;  // in elements
  int columns;
};

struct KernelParams {
  CUtensorMap q, out;  // boxes of a swizzle block's columns x 64 rows of a query tile
  CUtensorMap k, v;    // boxes of a swizzle block's columns x one KV tile
  float* softmax_lse;  // (batch, heads, seqlen_q); of a pack (heads, total_q)
  int64_t lse_head_stride;
  Window window;
  QueryTileScheduler scheduler;
  PackView pack;
  const int* seqlens_k;  // (batch) of a pack without a plan: a step of decoding, with a tile for each CTA; else null
  int* tiles_taken;  // counts the tiles taken after each CTA's first; null if each CTA has a fixed share
  ScoreParams score;
  const float* sinks;  // (heads): an extra logit for each row; null if there are none
  dropout::BitsView dropout;
  ColumnsView columns;  // for kColumns
  PageTable pages;  // a table for kernels for windows alone
  LargestLogits largest;
  RowsOfPages rows_of_k, rows_of_v;  // where pages cut boxes
};

}  // namespace dash_attn::forward
