// The rotation of the symmetric shift: the m KV tiles of a group walk the same run of query tiles, each starting one
// further on, so that in lockstep no two of them are at the same query tile.
//
// A run longer than the group is cut into blocks of m to 2m-1 query tiles and rotated block by block. One rotation over
// the whole run would finish its first query tiles last, and the next group, which starts there, would wait for all of
// it.
#pragma once

#include "../host_device.h"
#include "mask.h"

namespace dash_attn {

struct RotationBlock {
  int start;  // the first position of the block in the run
  int size;
};

struct Rotation {
  int length;   // query tiles in the run
  int members;  // m: KV tiles in the group

  // The block that holds `position`: max(1, length / m) blocks, as even as possible, the larger ones first.
  DASH_HOST_DEVICE constexpr RotationBlock block(int position) const {
    int const count = max_int(1, length / members);
    int const small = length / count;
    int const in_larger = (length - count * small) * (small + 1);
    if (position < in_larger) return {position / (small + 1) * (small + 1), small + 1};
    return {in_larger + (position - in_larger) / small * small, small};
  }

  // The position in the run that member `l` visits at `step`. Blocks are taken from the end of the run to its start.
  DASH_HOST_DEVICE constexpr int visit_downwards(int l, int step) const {
    int const from_end = length - 1 - step;
    RotationBlock const b = block(from_end);
    return b.start + rotate(b.size, l, b.start + b.size - 1 - from_end);
  }

  // The rank of member `l` among the group's adds at `position`: members come in the order in which lockstep brings
  // them there, (p - l) mod max(size, m) steps into the block.
  DASH_HOST_DEVICE constexpr int rank(int l, int position) const {
    int const p = position - block(position).start;
    int const turn = min_int(p, members - 1) - l;
    return turn < 0 ? turn + members : turn;
  }

  // A block shorter than the group (size < m) is rotated modulo m without its missing positions: the members past its
  // end then start at its first position.
  DASH_HOST_DEVICE static constexpr int rotate(int size, int l, int step) {
    if (l >= size) return step;
    int const p = l + step;
    return p < size ? p : p - size;
  }
};

}  // namespace dash_attn
