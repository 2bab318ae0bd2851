// How a row is divided among threads, and how the threads of a row add up: lane -> warp -> CTA -> cluster.
#pragma once
#include "rows/vector.cuh"

namespace cunorm {

// Which vector of a row that waits in shared memory: of the thread of this number, behind so many runs.
struct VectorSlot {
  unsigned thread;
  int run;
};

// A row of kCols columns is held by kThreads threads in each of kCluster CTAs, kVectors vectors of kVectorSize columns
// a thread.
//   kThreads < 32    several rows share a warp         (power of two)
//   kThreads == 32   a warp holds a row
//   kThreads > 32    a CTA holds a row, or a part of it if kCluster > 1   (multiple of 32)
// Neighbouring threads hold neighbouring vectors, over the whole cluster: which columns meet in which warp, and the
// order in which a row is added up, depend on kThreads * kCluster and kVectors alone. So the same threads may be one
// CTA or several, as the number of rows asks for, and a row keeps its bits.
template <int kCols_, int kVectorSize_, int kThreads_, int kVectors_, int kCluster_>
struct RowShape {
  static constexpr int kCols = kCols_;
  static constexpr int kVectorSize = kVectorSize_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kLanes = kThreads < 32 ? kThreads : 32;
  static constexpr int kWarps = kThreads < 32 ? 1 : kThreads / 32;
  // One slot for each warp that holds a part of the row, over the whole cluster.
  static constexpr int kSlots = kWarps * kCluster;
  static constexpr bool kWholeVectors = kCols % kVectorSize == 0;
  static_assert(kThreads % 32 == 0 || (kThreads < 32 && (kThreads & (kThreads - 1)) == 0));
  static_assert(kCluster == 1 || kThreads >= 32);

  static constexpr int kCapacity = kVectorSize * kThreads * kVectors;  // columns that the threads of a CTA can hold
  static constexpr int kStep = kVectorSize * kThreads * kCluster;      // from a vector of a thread to its next one
  static_assert(kCols <= kCapacity * kCluster);

  // Which of the row's threads in this CTA it is.
  DEVICE static int thread() { return static_cast<int>(threadIdx.x % kThreads); }

  // This thread's vector number p among those that wait in shared memory. It begins at this column of what the CTA
  // holds,
  DEVICE static VectorSlot vector_slot(int p) { return {threadIdx.x % kThreads, p * (kThreads / kLanes)}; }
  DEVICE static int local_column(int p) { return (p * kThreads + thread()) * kVectorSize; }
  // and at this column of the row.
  DEVICE static int64 column(int rank, int p) { return wide_index(first_column(rank)) + static_cast<int64>(p) * kStep; }
  // The same. Beside the sums of the backward pass wide indices in clusters spilled 4 bytes, 131072 columns.
  DEVICE static int64 column_beside_sums(int rank, int p) {
    return kCluster > 1 ? p * kStep + first_column(rank) : column(rank, p);
  }

  DEVICE static int first_column(int rank) { return (rank * kThreads + thread()) * kVectorSize; }

  // Where the compiler knows that a vector lies in the row, in every thread, it needs no check.
  DEVICE static constexpr bool whole(int p) { return (p + 1) * kStep <= kCols; }

  // How many columns of this thread's vector number p lie in the row. kChecked: as if the compiler did not know it.
  template <bool kChecked = false>
  DEVICE static int valid(int rank, int p) {
    if (!kChecked && whole(p)) return kVectorSize;
    const int left = kCols - (first_column(rank) + p * kStep);
    if constexpr (kWholeVectors) return left > 0 ? kVectorSize : 0;
    return left < 0 ? 0 : left < kVectorSize ? left : kVectorSize;
  }

  // How many columns the lanes of this slot's warp hold in their vector number p, and in all.
  DEVICE static int slot_columns(int slot, int p) {
    constexpr int kMost = kLanes * kVectorSize;
    if (whole(p)) return kMost;
    const int left = kCols - (p * kStep + slot * kMost);
    return left < 0 ? 0 : left < kMost ? left : kMost;
  }
  DEVICE static int slot_columns(int slot) {
    int columns = 0;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) columns += slot_columns(slot, p);
    return columns;
  }

  // How many columns the pivot of this slot is the mean of, the first ones of the first vectors of its lanes: a power
  // of two, so that the mean of equal values is exact. And whether the i-th column of this thread's first vector is
  // one.
  DEVICE static int pivot_columns(int slot) {
    if (kStep <= kCols) return kLanes * kVectorSize;
    return power_of_two_up_to(slot_columns(slot, 0));
  }
  DEVICE static bool has_pivot(int columns, int i) {
    if (kStep <= kCols) return true;
    return static_cast<int>(threadIdx.x % kLanes) * kVectorSize + (kWholeVectors ? 0 : i) < columns;
  }
};

// Which of the kRows rows of a CTA is this thread's. Of a single row it is 0, which the compiler does not know of
// threadIdx.x. Told so it needs fewer registers where 512 threads hold four vectors each, 0 bytes spilled instead of
// 36; elsewhere it takes more, and backward of 8192 columns took 5% longer; of rows at odd addresses 12 to 48 were
// spilled.
template <class Shape, int kRows, bool kAligned>
DEVICE int row_group_of_thread() {
  if (kAligned && kRows == 1 && Shape::kVectors == 4 && Shape::kThreads == 512) return 0;
  return static_cast<int>(threadIdx.x) / Shape::kThreads;
}

DEVICE constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

// Sum over groups of kLanes neighbouring lanes (a power of two), the same bits in every lane.
template <int kLanes, class Compute>
DEVICE Compute group_sum(Compute value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// Of kCount numbers of each lane, a power of two: of number i it is in the i-th kCount-th part of the lanes, the same
// bits as group_sum has. A step halves the numbers and the lanes: four numbers of 32 lanes take 18 instructions,
// not 40.
template <int kLanes, class Compute, int kCount>
DEVICE Compute group_sum(Compute (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return group_sum<kLanes>(values[0]);
  } else {
    const bool upper = threadIdx.x & kLanes / 2;
    Compute halves[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const Compute low = values[i], high = values[i + kCount / 2];
      const Compute kept = upper ? high : low, given = upper ? low : high;
      halves[i] = kept + shuffle_xor(given, kLanes / 2);
    }
    return group_sum<kLanes / 2>(halves);
  }
}

// A barrier among the threads of this CTA that hold one row.
template <class Shape, int kRows>
DEVICE void row_barrier() {
  if constexpr (Shape::kThreads <= 32) {
    warp_barrier();
  } else if constexpr (kRows == 1) {
    // A barrier chosen at run time makes the compiler claim all 16 of a CTA, and an SM has 64: at most four CTAs.
    __syncthreads();
  } else {
    static_assert(kRows <= 15, "a CTA has 15 named barriers");
    barrier(1 + threadIdx.x / Shape::kThreads, Shape::kThreads);
  }
}

// The row of the first thread of this warp: several rows share a warp if kThreads < 32.
template <class Shape>
DEVICE int64 first_of_warp(int64 row) {
  return row - static_cast<int>(threadIdx.x) % 32 / Shape::kThreads;
}

// Shared memory through which the warps of one row (one of kRows in the CTA) tell each other kValues numbers, row after
// row. Two sets of slots, used in turn: a set is written again only after all who read it have brought values for the
// other one.
template <class Shape, int kRows, int kValues, class Compute>
struct RowExchange {
  static constexpr int kSlots = Shape::kSlots;
  static constexpr int kGroup = power_of_two_from(kSlots < 32 ? kSlots : 32);
  // Within a CTA number beside number, which threads read side by side. In a cluster slot beside slot, whose numbers go
  // in one message: LayerNorm of 262144 columns by clusters of 16, 256 messages a CTA, 94 us, three times as many 112.
  static constexpr int kWidth = Shape::kCluster > 1 ? power_of_two_from(kValues) : kValues;
  struct alignas(Shape::kCluster > 1 ? kWidth * sizeof(Compute) < 16 ? kWidth * sizeof(Compute) : 16 : sizeof(Compute))
      Slots {
    Compute values[kWidth * kSlots];
    DEVICE static int index(int k, int slot) { return Shape::kCluster > 1 ? slot * kWidth + k : k * kSlots + slot; }
    DEVICE Compute& operator()(int k, int slot) { return values[index(k, slot)]; }
    DEVICE Compute operator()(int k, int slot) const { return values[index(k, slot)]; }
  };
  Slots slots[2];
  Mailbox mailboxes[2];
  static_assert(sizeof(Mailbox) == kMailboxBytes);

  // All threads of the CTA call this once, before any publish.
  DEVICE void start() {
    if constexpr (Shape::kCluster > 1) {
      if (threadIdx.x == 0) {
        for (int set = 0; set < 2; ++set) mailboxes[set].init();
      }
      warp_barrier();  // cluster_start is for warps whose threads are together
      cluster_start();
    }
  }

  // The row number `iteration` of these threads. Every thread of a warp brings the same values.
  DEVICE void publish(int iteration, int rank, const Compute (&values)[kValues]) {
    const int set = iteration % 2;
    const int warp = Shape::thread() / 32;
    const int lane = threadIdx.x % 32;
    if constexpr (Shape::kCluster == 1) {
      if (lane == 0) {
#pragma unroll
        for (int k = 0; k < kValues; ++k) slots[set](k, warp) = values[k];
      }
    } else {
      if (threadIdx.x == 0) mailboxes[set].expect(sizeof(Slots));
      if (lane < Shape::kCluster) {
        Compute message[kWidth] = {};
#pragma unroll
        for (int k = 0; k < kValues; ++k) message[k] = values[k];
        mailboxes[set].send(&slots[set](0, rank * Shape::kWarps + warp), lane, message);
      }
    }
  }

  // Of numbers that every thread has a part of: their sums over the lanes of a warp.
  DEVICE void publish_sums(int iteration, int rank, Compute (&sums)[kValues]) {
    static_assert(kValues <= 2);
    const Compute total = group_sum<32>(sums);  // of two, the second is in the upper half of the lanes
    if constexpr (kValues == 1) {
      const Compute values[1] = {total};
      publish(iteration, rank, values);
    } else if constexpr (Shape::kCluster == 1) {
      const int lane = threadIdx.x % 32;
      if (lane % 16 == 0) slots[iteration % 2](lane / 16, Shape::thread() / 32) = total;
    } else {
      const Compute values[2] = {total, shuffle_xor(total, 16)};  // the lower half sends
      publish(iteration, rank, values);
    }
  }

  // What all warps of the row published for the row number `iteration`.
  DEVICE const Slots& collect(int iteration) {
    if constexpr (Shape::kCluster == 1) {
      row_barrier<Shape, kRows>();
    } else {
      mailboxes[iteration % 2].wait(iteration / 2 % 2);
    }
    return slots[iteration % 2];
  }

  // The same where the threads of a row in this CTA have met at a barrier since.
  DEVICE const Slots& collected(int iteration) {
    if constexpr (Shape::kCluster > 1) mailboxes[iteration % 2].wait(iteration / 2 % 2);
    return slots[iteration % 2];
  }

  // The sum over slots of term(slot), the same bits in every thread of the row.
  template <class Term>
  DEVICE static Compute sum(Term term) {
    const int lane = static_cast<int>(threadIdx.x % kGroup);
    Compute total = 0;
#pragma unroll
    for (int slot = 0; slot < kSlots; slot += kGroup) {
      if (kSlots % kGroup == 0 || slot + lane < kSlots) total += term(slot + lane);
    }
    return group_sum<kGroup>(total);
  }
};

}  // namespace cunorm
