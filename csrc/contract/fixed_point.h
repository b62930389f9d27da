// The fixed-point scale of order-free accumulation: a power of two for each row of dQ, and the heads that have too
// little room for it. Derived in docs/order_free.md. Plain C++: no CUDA or torch.
//
// Determinism contract: a row's scale is a function of its dO and D, of its KV head's statistics and of the number of
// keys; the rule for a head, of those of the rows of its KV head's group, of their LSE, the lengths and the mask.
// Nothing here knows the batch, the schedule or the GPU.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../host_device.h"
#include "tile_shapes.h"

namespace dash_attn::fixed_point {

// Keys whose rows of K and V are measured together: keys 0 to 7, 8 to 15, and so on. Any run of twice as many keys,
// less one, has a whole window in it.
inline constexpr int kWindow = 8;

// The rows of a head are measured in chunks of whole windows: at most kMaxChunks, one for each lane of a warp.
inline constexpr int kMaxChunks = 32;
inline constexpr int kMinChunkRows = 256;
DASH_HOST_DEVICE constexpr int chunk_rows(int seqlen) {
  constexpr int kRowsOfWindows = kMaxChunks * kWindow;  // one in each chunk
  int const rows = (seqlen + kRowsOfWindows - 1) / kRowsOfWindows * kWindow;
  return rows < kMinChunkRows ? kMinChunkRows : rows;
}
DASH_HOST_DEVICE constexpr int num_chunks(int seqlen) {
  int const rows = chunk_rows(seqlen);
  return (seqlen + rows - 1) / rows;
}

// Of a KV head, or of some of its rows. Norms are upper bounds of Euclidean norms of rows. The maxima are not finite
// where the inputs are not.
struct KeyStatistics {
  float max_element;  // of K
  float max_product;  // of a key's |V row| and its largest element of K
  // Over windows: of the sum of magnitudes of the difference between two neighbouring rows of K, in the mean over the
  // window's pairs, times the norm of that difference of V, in the mean too. Infinite where no window has a pair.
  float min_step_product;
};

// An LSE beyond this leaves fp32 too few digits to promise that a row of P sums to little more than 1.
inline constexpr float kMaxLse = 4096;
// The proof that no sum overflows allows for the forward's sum of no more keys.
inline constexpr int kMaxKeys = 1 << 20;
// What a row's error may be, relative to the norm of a row of dQ as dO and the differences between neighbouring rows of
// K and of V let expect it.
inline constexpr double kMaxError = 1e-4;
inline constexpr double kMeanMagnitudeToDeviation = 1.2533;  // of a normal distribution: sqrt(pi / 2)
inline constexpr float kSmallestProduct = 1e-30f;
// Units that the bound of a row may take: 2^31, less what relative rounding errors can add to it, a factor of 1.27.
inline constexpr double kCapacity = 1.5 * (1 << 30);

// Whether dQ of the head is summed in fp32 in the order of ranks instead, whatever its rows are.
DASH_HOST_DEVICE inline bool keys_need_order(KeyStatistics const& keys, int seqlen_k) {
  // A smaller product may have lost digits of its own in fp32, or all of them. A difference may overflow where the
  // values do not. Written so that NaN needs the order.
  return !(seqlen_k <= kMaxKeys && keys.max_product >= kSmallestProduct && keys.max_product <= FLT_MAX &&
           keys.min_step_product <= FLT_MAX);
}

// The same for a row's sake. Infinities are of rows that see no key, and NaN makes NaN of the row.
DASH_HOST_DEVICE inline bool lse_needs_order(float lse) {
  float const magnitude = std::fabs(lse);
  return magnitude > kMaxLse && magnitude <= FLT_MAX;
}

template <typename Bits, typename Value>
DASH_HOST_DEVICE inline Bits bits_of(Value value) {
  static_assert(sizeof(Bits) == sizeof(Value));
  Bits bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// A row is in units of 2^-e. What the kernel multiplies by is the float 2^(e - kFractionBits), of which the exponent's
// bits are stored. The product plus kHighOffset, a float whose last bit is 2^kLowBits units, has the multiples of those
// there; what remains of it, plus kLowOffset, whose last bit is one unit, has the others.
inline constexpr int kFractionBits = 22, kLowBits = 9;
inline constexpr float kLowOffset = 3.f, kHighOffset = kLowOffset * (1 << kLowBits);
inline constexpr uint32_t kOffsetBits = 0x40400000u + (0x44c00000u << kLowBits);  // of both, as they are put together

inline constexpr int kMinExponent = -96;    // of a bound of 1.5 * 2^126: a partial of a larger one might overflow fp32
inline constexpr int kMaxExponent = 126;    // 2^-126, the unit then, is the smallest normal float
inline constexpr uint8_t kNotFinite = 255;  // the row is NaN

DASH_HOST_DEVICE constexpr uint8_t stored_scale(int exponent) {
  return static_cast<uint8_t>(exponent - kFractionBits + 127);
}
DASH_HOST_DEVICE constexpr int stored_exponent(uint8_t scale) { return scale - 127 + kFractionBits; }

// The bits of x's number of units, rounded to nearest even, plus kOffsetBits. For |x * scale| < 2^9, which every
// partial keeps to where LSE is the log-sum-exp of the scores.
DASH_HOST_DEVICE inline uint32_t in_units(float x, float scale) {
  float const high = fmaf(x, scale, kHighOffset);  // rounded to 2^kLowBits units
  float const low = fmaf(x, scale, (kHighOffset + kLowOffset) - high);
  return (bits_of<uint32_t>(high) << kLowBits) + bits_of<uint32_t>(low);
}

// Half the smallest subnormal number of the inputs' type: what rounding a smaller number than its normal ones can add.
DASH_HOST_DEVICE constexpr double subnormal_error(bool half_precision) {
  return half_precision ? 1.0 / (1 << 25) : 1.0 / (1ull << 62) / (1ull << 62) / (1 << 10);
}

// Of the sum of the magnitudes of a row's partials, but for relative rounding errors. max_element is K's.
DASH_HOST_DEVICE inline double row_bound(double dout_norm, double delta, double max_product, double max_element,
                                         int seqlen_k, bool half_precision) {
  // dS of every key is rounded to the inputs' type, and dP - D, which P weights, that is once more.
  double const roundings = double(seqlen_k) + 2;
  return dout_norm * max_product + (std::fabs(delta) + roundings * subnormal_error(half_precision)) * max_element;
}

// Of an exponent that a double has.
DASH_HOST_DEVICE inline double power_of_two(int exponent) {
  uint64_t const bits = uint64_t(1023 + exponent) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Largest e with bound * 2^e <= kCapacity, at most kMaxExponent. Where that is below kMinExponent, or the bound is not
// finite, it is kMinExponent - 1.
DASH_HOST_DEVICE inline int row_exponent(double bound) {
  if (!(bound <= DBL_MAX)) return kMinExponent - 1;
  if (bound == 0) return 0;
  // Both are a number in [1, 2) times a power of two, but for subnormal bounds, whose exponent is limited anyway.
  uint64_t const of_capacity = bits_of<uint64_t>(kCapacity), of_bound = bits_of<uint64_t>(bound);
  uint64_t const significand = (uint64_t(1) << 52) - 1;
  int const exponent = int(of_capacity >> 52) - int(of_bound >> 52) -
                       ((of_bound & significand) > (of_capacity & significand) ? 1 : 0);
  if (exponent < kMinExponent) return kMinExponent - 1;
  return exponent < kMaxExponent ? exponent : kMaxExponent;
}

// Whether units of 2^-exponent are too coarse for a row, so that its head needs the order. `keys` are those that the
// row sees, in `tiles` KV tiles.
DASH_HOST_DEVICE inline bool row_needs_order(int exponent, double dout_norm, double min_step_product, HeadDims dims,
                                             int keys, int tiles) {
  if (exponent < kMinExponent) return true;
  if (dout_norm == 0) return false;  // nothing to round
  // Squares of two things per element of dQ. Rounding the partials leaves sqrt(tiles / 12) units. Rows of K and V that
  // all are attended alike leave 1 / sqrt(keys) of what one of them would; what all have in common cancels, so only
  // differences count. Those of two normal values are sqrt(2) of one. The difference of K is measured by the sum of its
  // magnitudes, that of V by its norm. Both sides times keys * qk^2 * v, which spares the kernel a division.
  double const unit = power_of_two(-exponent);
  double const noise = unit * unit * (tiles * (1.0 / 12));
  double const steps = dout_norm * min_step_product * (kMeanMagnitudeToDeviation / 2 * kMaxError);
  double const shares = double(dims.qk) * dims.qk * dims.v * (keys > 0 ? keys : 1);
  return !(noise * shares <= steps * steps);
}

}  // namespace dash_attn::fixed_point
