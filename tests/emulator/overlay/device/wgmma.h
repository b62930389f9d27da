// csrc/device/wgmma.h on the host: operands by their descriptors, fragments as the PTX ISA lays them out (9.7.15). A
// product runs when it is issued or when it is waited for, as the machine's seed says; until then its sums are NaN, and
// an A operand in registers must not change.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "elements.h"
#include "machine.h"

namespace dash_attn::wgmma {

using emulator::machine;

// An operand in shared memory.
template <typename Element, int kRows, bool kIsTransposed>
struct SharedOperand {
  uint64_t descriptor;

  // Element (i, k), i along M or N, is at kAlong i + kAcross k.
  static constexpr int kAlong = kIsTransposed ? 1 : 16, kAcross = kIsTransposed ? kRows : 1;
  const float* read() const {
    constexpr int kUnusedBits = 53;  // of twice a descriptor, from there on
    const uint64_t key = (descriptor * 2 + kIsTransposed) ^ uint64_t{kRows} << kUnusedBits;
    return machine->read_once(key, kRows * 16, [&](float* elements) {
      // Eight at a time, which lie side by side.
      for (int chunk = 0; chunk < kRows * 2; ++chunk) {
        const int i = kIsTransposed ? chunk / 16 * 8 : chunk / 2, k = kIsTransposed ? chunk % 16 : chunk % 2 * 8;
        uint16_t eight __attribute__((vector_size(16)));
        std::memcpy(&eight, emulator::shared_at(address_of(i, k), sizeof(eight)), sizeof(eight));
        const EightFloats floats = Element::floats(__builtin_convertvector(eight, EightWords));
        std::memcpy(elements + kAlong * i + kAcross * k, &floats, sizeof(floats));
      }
    });
  }

 private:
  uint32_t address_of(int i, int k) const {
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4;
    const int mode = int(descriptor >> 62);
    if (mode != 1 && mode != 2) { emulator::fail("a descriptor with a swizzle that is not of 128 or 64 bytes"); }
    const int row_bytes = mode == 1 ? 128 : 64, columns = row_bytes / 2;
    const uint32_t address = kIsTransposed
                                 ? start + i / columns * leading + k / 8 * stride + k % 8 * row_bytes + i % columns * 2
                                 : start + i / 8 * stride + i % 8 * row_bytes + k * 2;
    return address ^ (address >> 7 & (mode == 1 ? 7 : 3)) << 4;
  }
};

struct Fragment {
  static int row(int thread, int r) { return thread % 128 / 32 * 16 + thread % 32 / 4 + r / 2 % 2 * 8; }
  static int column(int thread, int r) { return r / 4 * 8 + thread % 4 * 2 + r % 2; }
};

// Rows of A of 16 elements, as a thread has them.
using RowsOfThread = float[2][16];

// Of four sums one after the other: two neighbouring columns of one row, then of the other.
using Four = float __attribute__((vector_size(16)));

// `read_rows(thread, rows)`.
template <int kRegisters, typename ReadRows, typename B, typename Check>
void issue_product(float (&d)[kRegisters], bool adds, ReadRows read_rows, B b, Check check) {
  emulator::Machine::Thread& self = machine->self();
  float* const acc = d;
  const int thread = int(machine->current);
  auto& sums = self.sums[acc];
  if (!sums) {
    sums = std::make_shared<std::vector<float>>(acc, acc + kRegisters);
    std::fill_n(acc, kRegisters, NAN);
  }
  const auto run = [=, values = sums->data()] {
    check();
    RowsOfThread rows;
    read_rows(thread, rows);
    Four of_row[16];
    for (int k = 0; k < 16; ++k) { of_row[k] = Four{rows[0][k], rows[0][k], rows[1][k], rows[1][k]}; }
    const float* columns = b.read() + B::kAlong * Fragment::column(thread, 0);
    for (int r = 0; r < kRegisters; r += sizeof(Four) / sizeof(float), columns += 8 * B::kAlong) {
      Four sum = {};
      if (adds) { std::memcpy(&sum, values + r, sizeof(sum)); }
      for (int k = 0; k < 16; ++k) {
        const float first = columns[B::kAcross * k], second = columns[B::kAcross * k + B::kAlong];
        sum += of_row[k] * Four{first, second, first, second};
      }
      std::memcpy(values + r, &sum, sizeof(sum));
    }
  };
  emulator::Machine::Product product;
  product.finish = [=, sums = sums, &self] {
    // Of products on the same sums, which are in one group, the first hands them over, when all have run.
    const auto found = self.sums.find(acc);
    const bool is_handed_over = found == self.sums.end() || found->second != sums;
    check();
    if (is_handed_over) { return; }
    self.sums.erase(found);
    for (int r = 0; r < kRegisters; ++r) {
      if (!std::isnan(acc[r])) { emulator::fail("a sum was written while its product ran"); }
      acc[r] = (*sums)[r];
    }
  };
  if (machine->is_lazy()) {
    product.run = run;
  } else {
    run();
  }
  self.open.push_back(std::move(product));
}

template <typename Element, int kSums, bool kTransposesA, bool kTransposesB>
struct SharedProduct {
  static void issue(float (&d)[kSums], uint64_t a, uint64_t b, bool adds) {
    using A = SharedOperand<Element, 64, kTransposesA>;
    const auto read_rows = [operand = A{a}](int thread, RowsOfThread& rows) {
      const float* elements = operand.read();
      for (int half = 0; half < 2; ++half) {
        const float* row = elements + A::kAlong * Fragment::row(thread, 2 * half);
        for (int k = 0; k < 16; ++k) { rows[half][k] = row[A::kAcross * k]; }
      }
    };
    issue_product(d, adds, read_rows, SharedOperand<Element, 2 * kSums, kTransposesB>{b}, [] {});
  }
};

template <typename Element, int kSums, bool kTransposesB>
struct RegisterProduct {
  static void issue(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool adds) {
    struct Own {
      uint32_t words[4];
    } own;
    std::copy_n(a, 4, own.words);
    const auto given = machine->exchange("wgmma", own);
    const int first_lane = int(machine->current % emulator::kWarpLanes / 4 * 4);  // of the four that have its rows
    std::array<Own, 4> lanes;
    for (int i = 0; i < 4; ++i) { std::memcpy(&lanes[i], given[first_lane + i], sizeof(Own)); }
    const auto read_rows = [lanes](int, RowsOfThread& rows) {
      for (int i = 0; i < 32; ++i) {
        const int half = i / 16, k = i % 16;
        const uint32_t word = lanes[k % 8 / 2].words[half + k / 8 * 2];
        const uint16_t bits = uint16_t(k % 2 ? word >> 16 : word);
        Element value;
        std::memcpy(&value, &bits, 2);
        rows[half][k] = float(value);
      }
    };
    const auto unchanged = [a = &a[0], own] {
      if (!std::equal(a, a + 4, own.words)) { emulator::fail("a register changed while a product read it"); }
    };
    issue_product(d, adds, read_rows, SharedOperand<Element, 2 * kSums, kTransposesB>{b}, unchanged);
  }
};

inline void fence() {}

inline void commit() {
  emulator::Machine::Thread& self = machine->self();
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

template <int kPending>
void wait() {
  emulator::Machine::Thread& self = machine->self();
  // They may take long: others go on meanwhile.
  unsigned turns = machine->is_lazy() ? machine->random() % emulator::kLongestTime : 0;
  machine->wait("products", [turns]() mutable { return turns-- == 0; });
  while (self.groups.size() > kPending) {
    for (auto& product : self.groups.front()) {
      if (product.run) { product.run(); }  // not when it was issued
    }
    for (auto& product : self.groups.front()) { product.finish(); }
    self.groups.erase(self.groups.begin());
  }
}

}  // namespace dash_attn::wgmma
