// Mean and variance of a row, by Welford's method in its parallel form (Chan, Golub, LeVeque 1983): parts that know
// (count, mean, squared deviations from that mean) are merged exactly.
//
// A part's mean, rounded to float, is only a pivot: what the rounding lost is carried along as the sum of deviations
// from it. Without that, a row with |mean| / std = 1e4 is wrong by 1e4 * 6e-8 in every normalised value.
#pragma once
#include "pack.cuh"
#include "row.cuh"

namespace cunorm {

// sum = Σ(x - pivot), squares = Σ(x - pivot)²
template <class Compute>
struct Moments {
  Compute pivot;
  Compute sum;
  Compute squares;
};

// mean = pivot + residual; x - mean is not to be computed from their rounded sum.
template <class Compute>
struct RowMoments {
  Compute pivot;
  Compute residual;
  Compute rstd;
};

// The same sums about another pivot.
template <class Compute>
DEVICE Moments<Compute> about(Moments<Compute> part, Compute count, Compute pivot) {
  const Compute shift = part.pivot - pivot;
  const Compute sum = multiply_add(count, shift, part.sum);
  return {pivot, sum, multiply_add(shift, part.sum + sum, part.squares)};
}

template <class Compute>
DEVICE RowMoments<Compute> finish(Moments<Compute> row, Compute count, Compute eps) {
  const Compute residual = row.sum / count;
  const Compute variance = multiply_add(-residual, residual, row.squares / count);
  // Written so that NaN stays NaN; rounding can leave a constant row slightly below zero.
  return {row.pivot, residual, reciprocal_sqrt((variance < 0 ? 0 : variance) + eps)};
}

// values - mean, times rstd.
template <class Compute, int kPack>
DEVICE void normalise(Compute (&values)[kPack], const RowMoments<Compute>& row) {
  const Compute shift = -row.residual * row.rstd;
#pragma unroll
  for (int i = 0; i < kPack; ++i) values[i] = multiply_add(values[i] - row.pivot, row.rstd, shift);
}

// A long sum with what its roundings lost (Knuth's TwoSum).
template <class Compute>
struct CompensatedSum {
  Compute sum = 0;
  Compute lost = 0;

  DEVICE void add(Compute value) {
    const Compute next = sum + value;
    const Compute rounded = next - sum;
    lost += (sum - (next - rounded)) + (value - rounded);
    sum = next;
  }
  DEVICE Compute total() const { return sum + lost; }
};

// Welford's update, a pack at a time, for rows too long to hold.
template <class Compute>
struct RunningMoments {
  Compute count = 0;
  CompensatedSum<Compute> mean;
  CompensatedSum<Compute> squares;

  DEVICE void merge(Compute other_count, Moments<Compute> other) {
    const Compute other_residual = other.sum / other_count;
    const Compute other_squares = multiply_add(-other.sum, other_residual, other.squares);
    if (count == 0) {
      *this = {other_count, {other.pivot, other_residual}, {other_squares, 0}};
      return;
    }
    const Compute total = count + other_count;
    const Compute delta = (other.pivot - mean.sum) + (other_residual - mean.lost);
    squares.add(multiply_add(delta * delta, count * other_count / total, other_squares));
    mean.add(delta * (other_count / total));
    count = total;
  }

  DEVICE Moments<Compute> moments() const {
    const Compute sum = count * mean.lost;
    return {mean.sum, sum, multiply_add(sum, mean.lost, squares.total())};
  }
};

// Moments about `pivot` of the values that kLanes lanes hold. for_each_pack(use) calls use(values, valid) for every
// pack of this thread; values past `valid` do not count.
template <int kLanes, int kPack, class Compute, class ForEachPack>
DEVICE Moments<Compute> moments_about(Compute pivot, ForEachPack for_each_pack) {
  Compute deviations = 0;
  Compute squares = 0;
  for_each_pack([&](const Compute(&values)[kPack], int valid) {
    Compute deviation[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      deviation[i] = i < valid ? values[i] - pivot : 0;
      deviations += deviation[i];
    }
    squares += dot(deviation, deviation);
  });
  return {pivot, group_sum<kLanes>(deviations), group_sum<kLanes>(squares)};
}

// Merges what the warps of a row published: (pivot, sum, squares) in slots [3][kSlots], count(slot) columns each.
template <class Exchange, class Compute, class Count>
DEVICE Moments<Compute> merge_slots(const typename Exchange::Slots& slots, Compute total_count, Count count) {
  const Compute pivot =
      Exchange::sum([&](int slot) { return static_cast<Compute>(count(slot)) * slots[0][slot]; }) / total_count;
  const auto part = [&](int slot) {
    return about(Moments<Compute>{slots[0][slot], slots[1][slot], slots[2][slot]}, static_cast<Compute>(count(slot)),
                 pivot);
  };
  const Compute sum = Exchange::sum([&](int slot) { return part(slot).sum; });
  const Compute squares = Exchange::sum([&](int slot) { return part(slot).squares; });
  return {pivot, sum, squares};
}

}  // namespace cunorm
