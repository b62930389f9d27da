// Warpgroup products on the host (PTX ISA 9.7.15): operands by their descriptors, fragments as the PTX ISA lays them
// out. A product runs when it is issued or when it is waited for, as the machine's seed says; until then its sums are
// NaN, and an A operand in registers must not change.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

constexpr int kProductDepth = 16;  // of a product, along which it sums
constexpr int kFragmentWords = 4;  // of A that a thread has in registers

// An operand in shared memory, whose `rows` are those of M or N.
struct Operand {
  uint64_t descriptor;
  int rows;
  bool is_transposed, is_fp16;
};

// The products of a thread that have not been waited for.
class Products {
 public:
  // Of A and B in shared memory, or of a thread's words of A, which the four lanes of its rows give.
  void issue(float* registers, Operand a, Operand b, bool adds);
  void issue(float* registers, const uint32_t* words, Operand b, bool adds);
  void commit() { ++committed_; }
  void wait(uint64_t pending);

 private:
  // The sums of an accumulator's products, which are in one group: in each row those of all columns, one after the
  // other.
  struct Sums {
    float* registers;  // null when they have been handed over
    int count, products;
    std::vector<float> numbers;

    template <typename F>
    void for_pairs(float* registers, F&& f);
  };
  struct Product {
    uint64_t group;
    Sums* sums;
    bool adds, has_run;
    Operand a, b;
    const uint32_t* words;  // A's registers, if it is there
    uint32_t given[kFragmentWords];
    float rows[2][kProductDepth];
  };

  void start(Product& product, float* registers, Operand b, bool adds);
  Sums* sums_of(float* registers, int count);
  static void run(Product& product);
  static void require_same_words(const Product& product);
  static void finish(Product& product);

  uint64_t committed_ = 0;  // groups
  std::vector<Product> products_;
  std::vector<std::unique_ptr<Sums>> sums_;  // free where they have no products
};

}  // namespace emulator
