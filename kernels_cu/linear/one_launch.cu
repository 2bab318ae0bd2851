// y = z weightᵀ + bias of few rows, z = (x - mean) * rstd * ln_weight + ln_bias, in one launch: x and weight are read
// once, y is written once, z is in registers alone unless it is wanted. mean, rstd and z are those of norm_forward.cu,
// to the bit.
//
// The time is that of reading weight. So one warp of a CTA, the producer, does nothing but fill a ring with it, and
// eight consume it. A CTA has some columns of all rows of x, kSlice of them; the CTAs of a cluster together have all,
// and share tiles of kTileOuts rows of weight: each makes partial sums of its columns, which their owner adds up. CTAs
// thus hold little of x, which they must have before the first product. It comes behind one stage of weight: behind a
// full ring it would wait for all of that.
#pragma once
#include "norms/statistics.cuh"
#include "rows/load.cuh"
#include "linear/hopper.cuh"

namespace cunorm {

constexpr int kConsumers = 8;  // warps
constexpr int kTileOuts = 8;   // rows of weight, and columns of y
constexpr int kPair = 64;      // columns that a lane reads in two vectors

// A CTA has kRows rows of x at most, and of each kParts times kStageColumns columns. A stage is as many columns of a
// tile. kSlots: tiles that a CTA owns, at most.
template <int kRows_, int kCluster_, int kParts_, int kStageColumns_, int kStages_, int kSlots_>
struct Division {
  static constexpr int kRows = kRows_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kParts = kParts_;
  static constexpr int kStageColumns = kStageColumns_;
  static constexpr int kStages = kStages_;
  static constexpr int kSlots = kSlots_;
  static constexpr int kSlice = kParts * kStageColumns;
  static constexpr int kHalfTiles = (kRows + 7) / 8;   // of eight rows of x
  static constexpr int kRowTiles = (kRows + 15) / 16;  // of sixteen, as products take them
  static constexpr int kPairs = (kStageColumns / kPair + kConsumers - 1) / kConsumers;  // of a warp, in a stage
  static_assert(kStageColumns % kPair == 0);
};

// Partial sums of tiles, by lane.
template <class Division>
struct PartialSums {
  alignas(128) float by_warp[2][kConsumers][Division::kRowTiles][32][4];  // those of two tiles in turn
  // Of the tiles that this CTA owns.
  alignas(
      128) float by_cta[Division::kCluster > 1 ? Division::kSlots : 1][Division::kCluster][Division::kRowTiles][32][4];
};

template <class Norm, class T, class Shape, class Division, class LnWeight, class LnBias>
struct OneLaunchMemory {
  using Exchange = RowExchange<Shape, 1, Norm::kValues, float>;
  // Whose statistics this CTA finds.
  static constexpr int kOwnRows = (Division::kRows + Division::kCluster - 1) / Division::kCluster;
  alignas(128) T ring[Division::kStages][kTileOuts][Division::kStageColumns];
  union {
    alignas(128) T x[Division::kRows][Division::kSlice];  // until z is known
    PartialSums<Division> partial;                        // from then on, in all CTAs of the cluster
  };
  alignas(128) LnWeight ln_weight[kPresent<LnWeight> ? Division::kSlice : 1];
  alignas(128) LnBias ln_bias[kPresent<LnBias> ? Division::kSlice : 1];
  alignas(128) T bias[Division::kSlots * Division::kCluster * kTileOuts];
  alignas(16) float statistics[Division::kRows][4];  // a Norm::Row of each row
  typename Exchange::Slots slots[kOwnRows];
  Barrier full[Division::kStages], empty[Division::kStages];
  Barrier arrived;  // x, ln_weight, ln_bias and bias
  Barrier statistics_known;
  Barrier x_is_read;  // in all CTAs
  Barrier summed[Division::kCluster > 1 ? Division::kSlots : 1];
};

template <class T>
struct OneLaunchArrays {
  const T* x;
  const T* weight;
  const T* bias;  // may be null, as may those below
  const void* ln_weight;
  const void* ln_bias;
  T* y;
  T* z;
  float* mean;
  float* rstd;
  int rows;
  int outs;
  int64 x_stride;
  int64 weight_stride;
};

template <int kCount>
DEVICE void copy_numbers(float* to, const float* from) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) to[k] = from[k];
}

// Warps of one CTA, all but the producer.
DEVICE void consumers_meet() { barrier(1, 32 * kConsumers); }

// The producer: everything that is read, in the order in which it is needed.
template <class Division, int kCols, class LnWeight, class LnBias, class T, class Memory>
DEVICE void produce(const OneLaunchArrays<T>& given, Memory& memory, int rank, int first, int tiles) {
  constexpr int kStages = Division::kStages;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = rank * Division::kSlice;
  const auto columns_from = [&](int column, int most) { return kCols - column < most ? kCols - column : most; };
  if (lane < kStages) {
    memory.full[lane].init(1);
    memory.empty[lane].init(kConsumers);
  }
  if (lane == 0) memory.arrived.init(1);
  Barrier::publish();
  warp_barrier();

  const auto once = cache_policy<Lifetime::kOnce>(), again = cache_policy<Lifetime::kAgain>();
  int stage = 0, part = 0;
  const T* tile = given.weight + first * kTileOuts * given.weight_stride + begin;
  const auto fill_stage = [&] {
    const int column = part * Division::kStageColumns;
    const int bytes = columns_from(begin + column, Division::kStageColumns) * static_cast<int>(sizeof(T));
    if (lane == 0) memory.full[stage].expect(kTileOuts * bytes);
    warp_barrier();
    if (lane < kTileOuts) {
      const T* from = tile + lane * given.weight_stride + column;
      bulk_copy(memory.ring[stage][lane], from, bytes, memory.full[stage], once);
    }
    warp_barrier();
    stage = stage == kStages - 1 ? 0 : stage + 1;
    if (++part == Division::kParts) {
      part = 0;
      tile += kTileOuts * given.weight_stride;
    }
  };
  const auto fetch_rows = [&] {
    const int columns = columns_from(begin, Division::kSlice);
    const int row_bytes = columns * static_cast<int>(sizeof(T));
    const int bias_bytes = given.bias ? tiles * kTileOuts * static_cast<int>(sizeof(T)) : 0;
    const int weight_bytes = kPresent<LnWeight> ? columns * static_cast<int>(sizeof(LnWeight)) : 0;
    const int ln_bias_bytes = kPresent<LnBias> ? columns * static_cast<int>(sizeof(LnBias)) : 0;
    if (lane == 0) memory.arrived.expect(given.rows * row_bytes + bias_bytes + weight_bytes + ln_bias_bytes);
    warp_barrier();
    if (lane < given.rows)
      bulk_copy(memory.x[lane], given.x + lane * given.x_stride + begin, row_bytes, memory.arrived, again);
    if (kPresent<LnWeight> && lane == 0) {
      const auto* from = static_cast<const LnWeight*>(given.ln_weight) + begin;
      bulk_copy(memory.ln_weight, from, weight_bytes, memory.arrived, again);
    }
    if (kPresent<LnBias> && lane == 1) {
      const auto* from = static_cast<const LnBias*>(given.ln_bias) + begin;
      bulk_copy(memory.ln_bias, from, ln_bias_bytes, memory.arrived, again);
    }
    if (bias_bytes > 0 && lane == 2)
      bulk_copy(memory.bias, given.bias + first * kTileOuts, bias_bytes, memory.arrived, once);
    warp_barrier();
  };

  const int stages = tiles * Division::kParts;
  fill_stage();
  fetch_rows();
  for (int i = 1; i < kStages && i < stages; ++i) fill_stage();
  __syncthreads();
  if constexpr (Division::kCluster > 1) cluster_start();
  for (int i = kStages; i < stages; ++i) {
    memory.empty[stage].wait((i / kStages - 1) % 2);
    fill_stage();
  }
}

// The statistics of the rows whose turn it is in this CTA. Warps add up what warps of norm_forward.cu do, kItems of
// them each.
template <class Norm, class Shape, class Division, class T, class Memory>
struct Statistics {
  static constexpr int kVectors = Shape::kVectors, kSlots = Shape::kSlots, kCluster = Division::kCluster;
  static constexpr int kItems = (Memory::kOwnRows * kSlots + kConsumers - 1) / kConsumers;
  const OneLaunchArrays<T>& given;
  Memory& memory;
  int rank;
  Vector<T, 8> vectors[kItems][kVectors];

  DEVICE static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  DEVICE static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  DEVICE static int own_row_of(int item) { return (warp() + item * kConsumers) / kSlots; }
  DEVICE static int slot_of(int item) { return (warp() + item * kConsumers) % kSlots; }
  DEVICE int row_of(int own_row) const { return rank + own_row * kCluster; }
  // A lane that the row does not have does what another does.
  DEVICE static int column_of(int item, int p) {
    return (p * Shape::kThreads + slot_of(item) * 32 + lane() % Shape::kLanes) * 8;
  }

  // From memory: in shared memory a CTA has but a slice of each row. To ask the others for theirs took 0.6 us by
  // clusters of 2, 1.4 by 4, and to tell them in order that it has come 3.
  DEVICE void load() {
    if constexpr (kCluster > 1) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int row = row_of(own_row_of(item));
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          const int column = column_of(item, p);
          load_words<Cache::kStreamed>(given.x + row * given.x_stride + column, vectors[item][p].words,
                                       row < given.rows && column < Shape::kCols);
        }
      }
    }
  }

  DEVICE void find(bool stores, float eps) {
    float part[Norm::kValues];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int own_row = own_row_of(item), slot = slot_of(item), row = row_of(own_row);
      if (row >= given.rows) continue;
      float sums[Norm::kLaneSums] = {}, pivot = 0, values[8];
      if constexpr (kCluster == 1) {
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          const int column = column_of(item, p);
          vectors[item][p] = {};
          if (column < Shape::kCols) load_shared_words(&memory.x[row][column], vectors[item][p].words);
        }
      }
      if constexpr (Norm::kHasMean) {
        unpack(vectors[item][0], values);
        pivot = Norm::template pivot<Shape>(slot, values);
      }
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        unpack(vectors[item][p], values);
        Norm::add(sums, values, column_of(item, p) < Shape::kCols ? 8 : 0, pivot);
      }
      Norm::template gathered<Shape::kLanes>(part, sums, pivot);
      if (lane() == 0) {
#pragma unroll
        for (int k = 0; k < Norm::kValues; ++k) memory.slots[own_row](k, slot) = part[k];
      }
    }
    consumers_meet();
    for (int own_row = warp(); row_of(own_row) < given.rows; own_row += kConsumers) {
      const int row = row_of(own_row);
      const auto& slots = memory.slots[own_row];
      if constexpr (kSlots > 1) {
        using Exchange = typename Memory::Exchange;
        Norm::template merge<Exchange, Shape::kCols>(part, slots, [](int slot) { return Shape::slot_columns(slot); });
      } else {
#pragma unroll
        for (int k = 0; k < Norm::kValues; ++k) part[k] = slots(k, 0);
      }
      const auto statistics = Norm::template finish<Shape::kCols>(part, eps);
      if (stores && lane() == 0) {
        if constexpr (Norm::kHasMean) {
          if (given.mean != nullptr) given.mean[row] = statistics.mean();
        }
        if (given.rstd != nullptr) given.rstd[row] = statistics.rstd;
      }
      float numbers[4] = {};
      copy_numbers<sizeof(statistics) / 4>(numbers, reinterpret_cast<const float*>(&statistics));
      if constexpr (kCluster > 1) {
        if (lane() < kCluster) memory.statistics_known.send(memory.statistics[row], lane(), numbers);
      } else {
        if (lane() == 0) copy_numbers<4>(memory.statistics[row], numbers);
      }
    }
    if constexpr (kCluster > 1) {
      memory.statistics_known.wait_in_order_of_cluster(0);
    } else {
      consumers_meet();
    }
  }
};

template <class T>
DEVICE void read_columns(const T* place, float (&values)[8]) {
  Vector<T, 8> vector;
  load_shared_words(place, vector.words);
  unpack(vector, values);
}

// Two numbers for each of 8 columns of y and of the rows of a lane, as multiply_tiles leaves them, to y.
template <class T>
DEVICE void store_sums(const OneLaunchArrays<T>& given, const float (&sums)[4], int row_tile, int out, const T* bias) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = lane % 4 * 2;
  const float low = bias ? T::decode_low(bias[column].bits) : 0, high = bias ? T::decode_low(bias[column + 1].bits) : 0;
#pragma unroll
  for (int half_tile = 0; half_tile < 2; ++half_tile) {
    const int row = row_tile * 16 + half_tile * 8 + lane / 4;
    const uint32 words[1] = {T::encode_word(sums[2 * half_tile] + low, sums[2 * half_tile + 1] + high)};
    if (row < given.rows)
      store_words<Cache::kKept>(given.y + static_cast<int64>(row) * given.outs + out + column, words);
  }
}

// Adds up what `kCount` warps or CTAs have brought, in their order.
template <int kCount, class Sums>
DEVICE void add_partial(float (&total)[4], const Sums (&partial)[kCount], int row_tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) total[k] = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32 words[4];
    load_shared_words(partial[i][row_tile][lane], words);
#pragma unroll
    for (int k = 0; k < 4; ++k) total[k] += word_to_float(words[k]);
  }
}

template <class Norm, class Shape, class Division, class LnWeight, class LnBias, class T, class Memory, class Operation>
DEVICE void consume(const OneLaunchArrays<T>& given, Memory& memory, Operation operation, int rank, int cluster,
                    int first, int tiles, float eps) {
  constexpr int kCols = Shape::kCols, kCluster = Division::kCluster, kPairs = Division::kPairs;
  constexpr int kParts = Division::kParts, kHalfTiles = Division::kHalfTiles, kRowTiles = Division::kRowTiles;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int lane_row = lane / 4, lane_column = lane % 4 * 8;
  const int owned = (tiles - rank + kCluster - 1) / kCluster;  // tiles rank, rank + kCluster, ...
  Statistics<Norm, Shape, Division, T, Memory> rows{given, memory, rank};
  rows.load();
  if (warp == 0) {
    if (lane == 0) {
      memory.statistics_known.init(1);
      memory.statistics_known.expect(given.rows * 16);
      memory.x_is_read.init(kCluster);
    }
    if constexpr (kCluster > 1) {
      for (int slot = lane; slot < owned; slot += 32) {
        memory.summed[slot].init(1);
        memory.summed[slot].expect(kCluster * kRowTiles * 32 * 16);
      }
    }
    Barrier::publish();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_start();
  if constexpr (kCluster == 1) memory.arrived.wait(0);
  rows.find(cluster == 0, eps);
  if constexpr (kCluster > 1) memory.arrived.wait(0);

  // Of a stage a warp has kPairs times 64 columns, of these a lane two vectors: columns 8 * part of the first 32 and of
  // the others. A product takes columns in any order, if z and weight have the same.
  const auto column_of = [&](int p, int pair, int which) {
    return p * Division::kStageColumns + (warp * kPairs + pair) * kPair + which * 32 + lane_column;
  };
  // Whole pairs that the stage does not have are of no warp; columns that the row does not have count as zeros.
  const auto pair_there = [&](int pair) {
    return Division::kStageColumns % (kPair * kConsumers) == 0 ||
           (warp * kPairs + pair) * kPair < Division::kStageColumns;
  };
  const auto column_there = [&](int column) {
    return Division::kSlice * kCluster == kCols || rank * Division::kSlice + column < kCols;
  };
  Vector<T, 8> z[kHalfTiles][kParts][kPairs][2];
#pragma unroll
  for (int half_tile = 0; half_tile < kHalfTiles; ++half_tile) {
    const int row = half_tile * 8 + lane_row;
    typename Norm::template Row<float> statistics{};
    if (row < given.rows)
      copy_numbers<sizeof(statistics) / 4>(reinterpret_cast<float*>(&statistics), memory.statistics[row]);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const int column = column_of(p, pair, which);
          auto& vector = z[half_tile][p][pair][which];
          vector = {};
          if (row >= given.rows || !pair_there(pair) || !column_there(column)) continue;
          float values[8], beside[1][8], columns[2][8];
          load_shared_words(&memory.x[row][column], vector.words);
          unpack(vector, values);
          statistics.normalise(values);
          int count = 0;
          if constexpr (kPresent<LnWeight>) read_columns(&memory.ln_weight[column], columns[count++]);
          if constexpr (kPresent<LnBias>) read_columns(&memory.ln_bias[column], columns[count++]);
#pragma unroll
          for (int i = 0; i < 8; ++i) values[i] = operation.epilogue(values[i], beside, columns, i);
          vector = pack_values<T>(values);
          if (given.z != nullptr && cluster == 0) {
            T* to = given.z + static_cast<int64>(row) * kCols + rank * Division::kSlice + column;
            store_words<Cache::kStreamed>(to, vector.words);
          }
        }
      }
    }
  }

  consumers_meet();  // x makes room for partial sums
  if (kCluster > 1 && warp == 0 && lane < kCluster) memory.x_is_read.arrive_at(lane);

  int stage = 0, phase = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    float sums[kRowTiles][2][4] = {};
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      memory.full[stage].wait(phase);
      const T* weight = memory.ring[stage][lane_row];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        if (!pair_there(pair)) continue;
        // Lanes of odd rows read their second vector first: rows lie a multiple of 128 bytes apart.
        const bool odd = lane_row % 2;
        Vector<T, 8> one, other;
        load_shared_words(weight + column_of(0, pair, odd), one.words);
        load_shared_words(weight + column_of(0, pair, !odd), other.words);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const bool there = column_there(column_of(p, pair, which));
          uint32 b[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) b[k] = there ? odd == which ? one.words[k] : other.words[k] : 0;
#pragma unroll
          for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
            const auto& a = z[2 * row_tile][p][pair][which].words;
            if constexpr (kHalfTiles > 1) {
              const auto& below = z[2 * row_tile + 1][p][pair][which].words;
              multiply_tiles<T>(sums[row_tile][0], a[0], below[0], a[1], below[1], b[0], b[1]);
              multiply_tiles<T>(sums[row_tile][1], a[2], below[2], a[3], below[3], b[2], b[3]);
            } else {
              // Of eight rows the other columns stand where eight more would: zeros would take as many registers. Of
              // the first product the upper eight rows count, of the second the lower.
              multiply_tiles<T>(sums[row_tile][0], a[0], a[2], a[1], a[3], b[0], b[1]);
              multiply_tiles<T>(sums[row_tile][1], a[0], a[2], a[1], a[3], b[2], b[3]);
            }
          }
        }
      }
      warp_barrier();
      if (lane == 0) memory.empty[stage].arrive();
      stage = stage == Division::kStages - 1 ? 0 : stage + 1;
      phase ^= stage == 0;
    }
    auto& partial = memory.partial.by_warp[tile % 2];
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      uint32 words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float other = kHalfTiles > 1 ? sums[row_tile][1][k] : sums[row_tile][1][(k + 2) % 4];
        words[k] = float_to_word(sums[row_tile][0][k] + other);
      }
      store_shared_words(partial[warp][row_tile][lane], words);
    }
    consumers_meet();
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      if ((tile * kRowTiles + row_tile) % kConsumers != warp) continue;
      float total[4];
      add_partial(total, partial, row_tile);
      if constexpr (kCluster == 1) {
        store_sums(given, total, row_tile, (first + tile) * kTileOuts,
                   given.bias ? memory.bias + tile * kTileOuts : nullptr);
      } else {
        const int slot = tile / kCluster;
        memory.x_is_read.wait(0);
        memory.summed[slot].send(memory.partial.by_cta[slot][rank][row_tile][lane], tile % kCluster, total);
      }
    }
  }
  if constexpr (kCluster > 1) {
    for (int i = warp; i < owned * kRowTiles; i += kConsumers) {
      const int slot = i / kRowTiles, row_tile = i % kRowTiles, tile = slot * kCluster + rank;
      memory.summed[slot].wait_in_order_of_cluster(0);
      float total[4];
      add_partial(total, memory.partial.by_cta[slot], row_tile);
      store_sums(given, total, row_tile, (first + tile) * kTileOuts,
                 given.bias ? memory.bias + tile * kTileOuts : nullptr);
    }
  }
}

// The grid has as many clusters as run at once, or fewer, none without a tile.
template <class Norm, class Shape, class Division, class LnWeight, class LnBias, int kBytes, class T, class Operation>
DEVICE void one_launch(OneLaunchArrays<T> given, Operation operation, float eps) {
  using Memory = OneLaunchMemory<Norm, T, Shape, Division, LnWeight, LnBias>;
  static_assert(sizeof(Memory) == kBytes, "the host asks for this memory");
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared());
  const int rank = Division::kCluster > 1 ? cluster_rank() : 0;
  const int cluster = static_cast<int>(blockIdx.x) / Division::kCluster;
  const int clusters = static_cast<int>(gridDim.x) / Division::kCluster;
  const int all = given.outs / kTileOuts;
  const int first = static_cast<int>(static_cast<int64>(all) * cluster / clusters);
  const int tiles = static_cast<int>(static_cast<int64>(all) * (cluster + 1) / clusters) - first;
  if (threadIdx.x >= 32 * kConsumers) {
    produce<Division, Shape::kCols, LnWeight, LnBias>(given, memory, rank, first, tiles);
  } else {
    consume<Norm, Shape, Division, LnWeight, LnBias>(given, memory, operation, rank, cluster, first, tiles, eps);
  }
}

}  // namespace cunorm
