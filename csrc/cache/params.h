// The parameters of the kernel that appends to a cache.
#pragma once

#include <cstdint>

#include "../placement/sequences.h"

namespace dash_attn::cache {

// New keys or new values, (rows, heads, units), and their cache, (pages, page_rows, heads, units). Strides are in
// units.
struct AppendedRows {
  const void* rows;
  void* cache;
  int64_t of_row, of_head, of_unit;
  int64_t of_page, of_page_row, of_cache_head, of_cache_unit;
  int units;  // of a head's row
};

struct AppendParams {
  AppendedRows k, v;
  int rows, heads, batch;
  const int* seqlens;     // (batch): the keys before
  int* ends;              // (batch): and after
  const int* cu_seqlens;  // (batch + 1): the new rows of each sequence; or null
  int step;               // without cu_seqlens, the rows of each
  PageTable pages;        // without a table, sequence i has page i
};

}  // namespace dash_attn::cache
