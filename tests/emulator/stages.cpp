// The backward's kernels beside the main one, for all rows of the table of tiles.
#include "launch/stages.cu"
