// products.h, which most of the time is spent in: compiled once, for all kernels.
#include "products.h"

#include <cmath>
#include <string_view>

#include "device/elements.h"
#include "machine.h"

using namespace dash_attn;

namespace emulator {
namespace {

constexpr int kSumsOfEight = 2;  // that a thread has in each row of every eight columns
constexpr int kLanesOfRow = 4;

// A run of sums of a row, and of the elements of B that it needs of one k, in eights of which the last may be cut.
int eights_of(int columns) { return (columns / kLanesOfRow + 7) / 8; }

EightFloats load(const float* numbers) {
  EightFloats result;
  std::memcpy(&result, numbers, sizeof(result));
  return result;
}
void store(float* numbers, const EightFloats& eight) { std::memcpy(numbers, &eight, sizeof(eight)); }

using Chunk = uint16_t __attribute__((vector_size(16)));  // eight elements that lie side by side
constexpr int kChunksOfRow = kProductDepth / 8, kMostChunks = 256 * kChunksOfRow;

// Where the elements of an operand are in shared memory, by (i, k), i along M or N.
class Addresses {
 public:
  explicit Addresses(const Operand& operand)
      : start_(field(operand, 0)),
        leading_(field(operand, 16)),
        stride_(field(operand, 32)),
        is_transposed_(operand.is_transposed) {
    const int mode = int(operand.descriptor >> 62);
    if (mode != 1 && mode != 2) { fail("a descriptor with a swizzle that is not of 128 or 64 bytes"); }
    log_columns_ = mode == 1 ? 6 : 5;
  }
  uint32_t operator()(int i, int k) const {
    const uint32_t columns = 1 << log_columns_, row_bytes = 2 * columns;
    const uint32_t address = is_transposed_ ? start_ + (i >> log_columns_) * leading_ + k / 8 * stride_ +
                                                  k % 8 * row_bytes + (i & (columns - 1)) * 2
                                            : start_ + i / 8 * stride_ + i % 8 * row_bytes + k * 2;
    return address ^ (address >> 7 & (columns / 8 - 1)) << 4;
  }
  template <typename T>
  T read(int i, int k) const {
    T found;
    std::memcpy(&found, shared_at((*this)(i, k), sizeof(found)), sizeof(found));
    return found;
  }

 private:
  static uint32_t field(const Operand& operand, int bit) { return (operand.descriptor >> bit & 0x3fff) << 4; }

  uint32_t start_, leading_, stride_;
  bool is_transposed_;
  int log_columns_;
};

EightFloats floats_of(EightWords bits, bool is_fp16) { return is_fp16 ? fp16::floats(bits) : bf16::floats(bits); }

// Elements of a row of A, from k on.
void read_a(const Operand& a, int row, int k, float* elements) {
  const Addresses addresses(a);
  EightWords bits;
  if (a.is_transposed) {
    for (int n = 0; n < 8; ++n) { bits[n] = addresses.read<uint16_t>(row, k + n); }
  } else {
    bits = __builtin_convertvector(addresses.read<Chunk>(row, k), EightWords);
  }
  store(elements, floats_of(bits, a.is_fp16));
}

// B's elements by k and the lane that needs them, those of its columns 2 lane and 2 lane + 1 of every eight.
const float* read_b(const Operand& b) {
  constexpr int kUnusedBits = 53;  // of twice a descriptor
  Machine::Read& found = machine->read_of((b.descriptor * 2 + b.is_transposed) ^ uint64_t(b.rows) << kUnusedBits);
  if (std::exchange(found.writes, machine->writes()) == machine->writes()) { return found.numbers.data(); }
  const Addresses addresses(b);
  const auto first_i = [&](int chunk) { return b.is_transposed ? chunk / kProductDepth * 8 : chunk / kChunksOfRow; };
  const auto first_k = [&](int chunk) { return b.is_transposed ? chunk % kProductDepth : chunk % kChunksOfRow * 8; };
  Chunk chunks[kMostChunks];
  const int count = b.rows * kChunksOfRow;
  for (int chunk = 0; chunk < count; ++chunk) {
    chunks[chunk] = addresses.read<Chunk>(first_i(chunk), first_k(chunk));
  }
  // Most writes are to other places.
  const std::string_view bytes(reinterpret_cast<const char*>(chunks), count * sizeof(Chunk));
  if (found.bytes == bytes) { return found.numbers.data(); }
  found.bytes = bytes;
  const int run = 8 * eights_of(b.rows);
  found.numbers.resize(kProductDepth * kLanesOfRow * run);
  for (int chunk = 0; chunk < count; ++chunk) {
    const EightFloats floats = floats_of(__builtin_convertvector(chunks[chunk], EightWords), b.is_fp16);
    for (int n = 0; n < 8; ++n) {
      const int i = first_i(chunk) + (b.is_transposed ? n : 0), k = first_k(chunk) + (b.is_transposed ? 0 : n);
      const int lane = i % 8 / kSumsOfEight;
      found.numbers[(k * kLanesOfRow + lane) * run + i / 8 * kSumsOfEight + i % kSumsOfEight] = floats[n];
    }
  }
  return found.numbers.data();
}

// Both rows' sums of some eights.
template <int kEights>
void add_products(const float (&rows)[2][kProductDepth], const float* b, int distance, float* first, float* second) {
  EightFloats of_first[kEights], of_second[kEights];
  for (int e = 0; e < kEights; ++e) {
    of_first[e] = load(first + 8 * e);
    of_second[e] = load(second + 8 * e);
  }
  for (int k = 0; k < kProductDepth; ++k, b += distance) {
    for (int e = 0; e < kEights; ++e) {
      const EightFloats elements = load(b + 8 * e);
      of_first[e] += rows[0][k] * elements;
      of_second[e] += rows[1][k] * elements;
    }
  }
  for (int e = 0; e < kEights; ++e) {
    store(first + 8 * e, of_first[e]);
    store(second + 8 * e, of_second[e]);
  }
}

}  // namespace

void Products::issue(float* registers, Operand a, Operand b, bool adds) {
  Product& product = products_.emplace_back();
  product.a = a;
  start(product, registers, b, adds);
}

void Products::issue(float* registers, const uint32_t* words, Operand b, bool adds) {
  Product& product = products_.emplace_back();
  product.words = words;
  std::copy_n(words, kFragmentWords, product.given);
  const auto given = machine->exchange("wgmma", product.given);
  const unsigned first_lane = machine->current % kWarpLanes / kLanesOfRow * kLanesOfRow;
  for (int half = 0; half < 2; ++half) {
    EightWords pairs;
    for (int i = 0; i < 8; ++i) {
      uint32_t of_lane[kFragmentWords];
      std::memcpy(of_lane, given[first_lane + i % kLanesOfRow], sizeof(of_lane));
      pairs[i] = of_lane[half + i / kLanesOfRow * 2];
    }
    const EightFloats even = floats_of(pairs & 0xffff, b.is_fp16), odd = floats_of(pairs >> 16, b.is_fp16);
    for (int i = 0; i < 8; ++i) {
      product.rows[half][2 * i] = even[i];
      product.rows[half][2 * i + 1] = odd[i];
    }
  }
  start(product, registers, b, adds);
}

void Products::start(Product& product, float* registers, Operand b, bool adds) {
  product.group = committed_;
  product.sums = sums_of(registers, b.rows / 2);
  product.adds = adds;
  product.b = b;
  ++product.sums->products;
  if (!machine->is_lazy()) { run(product); }
}

// Calls f(a pair of registers, a pair of sums).
template <typename F>
void Products::Sums::for_pairs(float* registers, F&& f) {
  float *first = numbers.data(), *second = first + numbers.size() / 2;
  for (int r = 0; r < count; r += 4) {
    f(registers + r, first + r / 2);
    f(registers + r + 2, second + r / 2);
  }
}

Products::Sums* Products::sums_of(float* registers, int count) {
  Sums* unused = nullptr;
  for (const auto& sums : sums_) {
    if (sums->products > 0 && sums->registers == registers) { return sums.get(); }
    if (sums->products == 0) { unused = sums.get(); }
  }
  if (!unused) { unused = sums_.emplace_back(std::make_unique<Sums>()).get(); }
  unused->registers = registers;
  unused->count = count;
  unused->numbers.resize(2 * 8 * eights_of(2 * count));
  unused->for_pairs(registers, [](const float* from, float* to) { std::memcpy(to, from, 2 * sizeof(float)); });
  std::fill_n(registers, count, NAN);
  return unused;
}

void Products::run(Product& product) {
  require_same_words(product);
  product.has_run = true;
  const unsigned thread = machine->current;
  if (!product.words) {
    const int first_row = int(thread % 128 / 32 * 16 + thread % 32 / kLanesOfRow);
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < kProductDepth; k += 8) {
        read_a(product.a, first_row + 8 * half, k, &product.rows[half][k]);
      }
    }
  }
  const int eights = eights_of(product.b.rows), run = 8 * eights, distance = kLanesOfRow * run;
  float *first = product.sums->numbers.data(), *second = first + run;
  if (!product.adds) { std::fill_n(first, 2 * run, 0.f); }
  const float* b = read_b(product.b) + thread % kLanesOfRow * run;
  constexpr int kTogether = 4;
  for (int e = 0; e < eights; e += kTogether, first += 8 * kTogether, second += 8 * kTogether, b += 8 * kTogether) {
    switch (std::min(eights - e, kTogether)) {
      case 2:
        add_products<2>(product.rows, b, distance, first, second);
        break;
      case 3:
        add_products<3>(product.rows, b, distance, first, second);
        break;
      case 4:
        add_products<4>(product.rows, b, distance, first, second);
        break;
      default:
        fail("a product of a number of columns that no kernel has");
    }
  }
}

void Products::require_same_words(const Product& product) {
  if (product.words && !std::equal(product.given, product.given + kFragmentWords, product.words)) {
    fail("a register changed while a product read it");
  }
}

// Of products on the same sums the first hands them over, when all have run.
void Products::finish(Product& product) {
  require_same_words(product);
  Sums& sums = *product.sums;
  --sums.products;
  float* const registers = std::exchange(sums.registers, nullptr);
  if (!registers) { return; }
  const bool was_written = !std::all_of(registers, registers + sums.count, [](float x) { return std::isnan(x); });
  sums.for_pairs(registers, [](float* to, const float* from) { std::memcpy(to, from, 2 * sizeof(float)); });
  if (was_written) { fail("a sum was written while its product ran"); }
}

void Products::wait(uint64_t pending) {
  // They may take long: others go on meanwhile.
  unsigned turns = machine->is_lazy() ? machine->random() % kLongestTime : 0;
  machine->wait("products", [turns]() mutable { return turns-- == 0; });
  while (!products_.empty() && products_.front().group + pending < committed_) {
    const auto end = std::find_if(products_.begin(), products_.end(), [group = products_.front().group](auto& product) {
      return product.group != group;
    });
    for (auto product = products_.begin(); product != end; ++product) {
      if (!product->has_run) { run(*product); }  // not when it was issued
    }
    for (auto product = products_.begin(); product != end; ++product) { finish(*product); }
    products_.erase(products_.begin(), end);
  }
}

}  // namespace emulator
