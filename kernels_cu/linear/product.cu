// y = z weightᵀ + bias by the tensor cores of sm_90a, launched so that it begins while the norm that makes z still
// runs: weight is on its way before z is there.
//
// Every CTA has all rows of z and kOuts rows of weight. One warp, the producer, fills a ring of stages, each 64 columns
// of both; each warpgroup multiplies 64 rows of z.
#pragma once
#include "rows/platform.cuh"
#include "linear/hopper.cuh"

namespace cunorm {

constexpr int kStageColumns = 64;  // 128 bytes, a row of shared memory as tensor cores read it
constexpr int kGroupRows = 64;     // rows of z of a warpgroup

// kAhead: stages of weight that are fetched before z is there. Behind more of them z would wait for all of their bytes.
template <int kRows_, int kOuts_, int kStages_, int kAhead_>
struct ProductTile {
  static constexpr int kRows = kRows_;
  static constexpr int kOuts = kOuts_;
  static constexpr int kStages = kStages_;
  static constexpr int kAhead = kAhead_;
  static constexpr int kConsumers = kRows / kGroupRows * 4;  // warps
  static_assert(kRows % kGroupRows == 0 && kOuts % 8 == 0 && kAhead <= kStages);
};

template <class T, class Tile>
struct ProductMemory {
  alignas(1024) T z[Tile::kStages][Tile::kRows][kStageColumns];
  alignas(1024) T weight[Tile::kStages][Tile::kOuts][kStageColumns];
  Barrier full[Tile::kStages], empty[Tile::kStages];
};

// One thread: weight and z in the order in which they are needed. Boxes of z have as many rows as z, because rows
// beyond it come slowly (docs/tuning.md). What stands in their place is multiplied in vain.
template <class T, class Tile, class Memory>
DEVICE void produce(const TensorMap& z, const TensorMap& weight, Memory& memory, int stages, int rows, int first_out) {
  const int bytes = (rows + Tile::kOuts) * kStageColumns * static_cast<int>(sizeof(T));
  const auto once = cache_policy<Lifetime::kOnce>(), again = cache_policy<Lifetime::kAgain>();
  const auto fetch_weight = [&](int stage, int i) {
    memory.full[stage].expect(bytes);
    tensor_copy(memory.weight[stage], weight, i * kStageColumns, first_out, memory.full[stage], once);
  };
  const auto fetch_z = [&](int stage, int i) {
    tensor_copy(memory.z[stage], z, i * kStageColumns, 0, memory.full[stage], again);
  };
  const int ahead = stages < Tile::kAhead ? stages : Tile::kAhead;
  for (int i = 0; i < ahead; ++i) fetch_weight(i, i);
  wait_for_kernel_before();
  for (int i = 0; i < ahead; ++i) fetch_z(i, i);
  for (int i = ahead; i < stages; ++i) {
    const int stage = i % Tile::kStages;
    if (i >= Tile::kStages) memory.empty[stage].wait((i / Tile::kStages - 1) % 2);
    fetch_weight(stage, i);
    fetch_z(stage, i);
  }
}

// Lanes of a row have, of each of four blocks of 8 columns, the two columns that their place among four says.
// Afterwards each has all columns of the block of its place.
DEVICE void gather_block(uint32 (&words)[4]) {
  const int place = static_cast<int>(threadIdx.x) % 4;
  const auto exchange = [&](uint32& low, uint32& high, int lane_mask) {
    const bool upper = place & lane_mask;
    const uint32 other = shuffle_xor(upper ? low : high, lane_mask);
    if (upper) {
      low = other;
    } else {
      high = other;
    }
  };
  exchange(words[0], words[1], 1);
  exchange(words[2], words[3], 1);
  exchange(words[0], words[2], 2);
  exchange(words[1], words[3], 2);
}

// Two numbers for each of 8 columns of a block and of the rows `row` and `row + 8` of a lane, to y.
template <class T, int kCount>
DEVICE void store_rows(const float (&sums)[kCount], const T* bias, T* y, int row, int rows, int first_out, int outs) {
  constexpr int kBlocks = kCount / 4;
  const int place = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int block = 0; block < kBlocks; block += 4) {
    const int there = kBlocks - block < 4 ? kBlocks - block : 4;
    float low[4] = {}, high[4] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int k = 0; k < there; ++k) {
        const int out = first_out + (block + k) * 8 + place * 2;
        uint32 word[1];
        load_words<Cache::kKept>(bias + out, word, out < outs);
        low[k] = T::decode_low(word[0]);
        high[k] = T::decode_high(word[0]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 words[4] = {};
#pragma unroll
      for (int k = 0; k < there; ++k) {
        const int at = (block + k) * 4 + half * 2;
        words[k] = T::encode_word(sums[at] + low[k], sums[at + 1] + high[k]);
      }
      gather_block(words);
      const int own_row = row + half * 8, out = first_out + (block + place) * 8;
      if (own_row < rows && out < outs && place < there)
        store_words<Cache::kStreamed>(y + static_cast<int64>(own_row) * outs + out, words);
    }
  }
}

template <class T, class Tile, class Memory>
DEVICE void consume(Memory& memory, const T* bias, T* y, int stages, int rows, int first_out, int outs) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = warp / 4 * kGroupRows;
  const auto give_back = [&](int i) {
    if (lane == 0) memory.empty[i % Tile::kStages].arrive();
  };
  float sums[Tile::kOuts / 2];
  for (int i = 0; i < stages; ++i) {
    const int stage = i % Tile::kStages;
    memory.full[stage].wait(i / Tile::kStages % 2);
    start_of_products();
#pragma unroll
    for (int column = 0; column < kStageColumns; column += 16) {
      const auto z = matrix_in_shared(&memory.z[stage][first_row][column]);
      multiply_group(T{}, sums, z, matrix_in_shared(&memory.weight[stage][0][column]), i > 0 || column > 0);
    }
    end_of_products();
    wait_for_products<1>();
    if (i > 0) give_back(i - 1);
  }
  wait_for_products<0>(sums);
  store_rows(sums, bias, y, first_row + warp % 4 * 16 + lane / 4, rows, first_out, outs);
}

// The grid has a CTA for each kOuts rows of weight.
template <class Tile, int kBytes, class T>
DEVICE void product(const TensorMap& z, const TensorMap& weight, const T* bias, T* y, int rows, int cols, int outs) {
  using Memory = ProductMemory<T, Tile>;
  static_assert(sizeof(Memory) == kBytes, "the host asks for this memory");
  auto& memory = *reinterpret_cast<Memory*>(shared_matrices());
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      memory.full[stage].init(1);
      memory.empty[stage].init(Tile::kConsumers);
    }
    Barrier::publish();
  }
  __syncthreads();
  const int stages = (cols + kStageColumns - 1) / kStageColumns;
  const int first_out = static_cast<int>(blockIdx.x) * Tile::kOuts;
  if (threadIdx.x < 32 * Tile::kConsumers) {
    consume<T, Tile>(memory, bias, y, stages, rows, first_out, outs);
  } else if (threadIdx.x == 32 * Tile::kConsumers) {
    produce<T, Tile>(z, weight, memory, stages, rows, first_out);
  }
}

}  // namespace cunorm
