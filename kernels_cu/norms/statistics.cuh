// The statistics of a row. One struct for each norm holds everything that kernels do not know of the norm they compute:
//
//   kHasMean           rows have a mean, which the forward pass stores and the backward pass reads
//   kLaneSums          sums that a thread adds its vectors to, one after the other:
//   pivot<Shape>(slot, first)                 of the first vector of every lane of a warp, what deviations are from
//   add(sums, values, valid, pivot)           a vector
//   kValues            numbers that say what a warp gathered of a row
//   gathered<kLanes>(part, sums, pivot)                    those of the columns that this warp holds, in every lane
//   merge<Exchange, kCols>(part, slots, columns)           those of the row, of what its warps published
//   finish<kCols, kByCall>(part, eps)                      a Row
//   Row                rstd, mean() if there is one; normalise(values); LayerNorm's: of_lane(lane), of another lane
//   Running            for rows too long to hold: add(values, valid), publish(part) of kRunningValues numbers, merge
//   SavedRow           of(mean, rstd, row) in the backward pass: xhat(value), and projection(means)
//   kGradientSums      sums over a row that dx needs; add_gradient(sums, g, xhat) adds a column to them,
//                      gradient_of_vector(sums, g, xhat) makes them of a vector: as a tree, or streamed rows spill
#pragma once
#include "rows/vector.cuh"
#include "rows/row.cuh"

namespace cunorm {

// Multiplied instead of divided by: a division by what is no power of two is a call, between a row's last sum and its
// first store.
template <class Compute, int64 kCount>
DEVICE constexpr Compute one_part_in() {
  return static_cast<Compute>(1) / static_cast<Compute>(kCount);
}

// sum / kCount, correctly rounded either way (Markstein 1990). By a product and two multiply-adds; or divided, by a
// call that keeps ptxas from moving all loads of weight and bias in front of it: LayerNorm of 5696 columns 68.7 us
// and 76.5, and 8 to 140 bytes spilled of 12296 columns of float16 beside a float32 weight and bias.
template <int64 kCount, bool kByCall, class Compute>
DEVICE Compute quotient(Compute sum) {
  if constexpr (kByCall) return sum / static_cast<Compute>(kCount);
  const Compute product = sum * one_part_in<Compute, kCount>();
  const Compute left = multiply_add(-product, static_cast<Compute>(kCount), sum);
  return left - left == 0 ? multiply_add(left, one_part_in<Compute, kCount>(), product) : product;
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
  // Of what may overflow: what an infinite sum lost is NaN.
  DEVICE Compute total_or_infinite() const { return lost == lost ? sum + lost : sum; }
};

// What the sums over a row take from g: dx = rstd * (g - (c2 + xhat * c1)), with c1 = mean(g * xhat) and c2 = mean(g).
// As a line in s it is one multiply-add, and xhat is not made again: LayerNorm of 2112 columns 110 us and 105.
template <class Compute>
struct Projection {
  Compute slope;
  Compute shift;

  DEVICE Compute at(Compute s) const { return multiply_add(s, slope, shift); }
};

// LayerNorm: mean and variance, by Welford's method in its parallel form (Chan, Golub, LeVeque 1983): parts that know
// (count, mean, squared deviations from that mean) are merged exactly.
//
// A part's mean, rounded to float, is only a pivot: what the rounding lost is carried along as the sum of deviations
// from it. Without that, a row with |mean| / std = 1e4 is wrong by 1e4 * 6e-8 in every normalised value.
//
// A mean is weighted, never summed up and divided: equal values up to the largest of a format have that value as their
// mean, to the bit. One step of float32 beside it squared is infinite from 2e26 on.
struct LayerNorm {
  static constexpr bool kHasMean = true;
  static constexpr int kLaneSums = 2;       // of Moments, without the pivot
  static constexpr int kValues = 3;         // of Moments
  static constexpr int kRunningValues = 4;  // and how many columns they are of
  static constexpr int kGradientSums = 2;   // Σ g * xhat, Σ g

  // sum = Σ(x - pivot), squares = Σ(x - pivot)²
  template <class Compute>
  struct Moments {
    Compute pivot;
    Compute sum;
    Compute squares;

    // The same sums about another pivot.
    DEVICE Moments about(Compute other, Compute count) const {
      const Compute shift = pivot - other;
      const Compute moved = multiply_add(count, shift, sum);
      return {other, moved, multiply_add(shift, sum + moved, squares)};
    }
  };

  // mean = pivot + residual; x - mean is not to be computed from their rounded sum.
  template <class Compute>
  struct Row {
    Compute pivot;
    Compute residual;
    Compute rstd;

    DEVICE Compute mean() const { return pivot + residual; }
    DEVICE Row of_lane(int lane) const { return {shuffle(pivot, lane), shuffle(residual, lane), shuffle(rstd, lane)}; }
    template <int kVectorSize>
    DEVICE void normalise(Compute (&values)[kVectorSize]) const {
      const Compute shift = -residual * rstd;
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] = multiply_add(values[i] - pivot, rstd, shift);
    }
  };

  template <class Compute>
  struct SavedRow {
    Compute mean;
    Compute rstd;

    DEVICE static SavedRow of(const Compute* mean, const Compute* rstd, int64 row) { return {mean[row], rstd[row]}; }
    DEVICE Compute xhat(Compute value) const { return (value - mean) * rstd; }
    DEVICE Projection<Compute> projection(const Compute (&means)[kGradientSums]) const {
      const Compute slope = means[0] * rstd;
      return {slope, multiply_add(-mean, slope, means[1])};
    }
  };

  // The pivot is the mean of the first columns of the warp. It need not be nearer: being a mean over at least one part
  // in 2 * kVectors of the warp's values, it costs the variance at most such a factor in rounding.
  template <class Shape, class Compute, int kVectorSize>
  DEVICE static Compute pivot(int slot, const Compute (&first)[kVectorSize]) {
    Compute weights[kVectorSize];
    const int columns = Shape::pivot_columns(slot);
    const Compute weight = static_cast<Compute>(1) / static_cast<Compute>(columns > 0 ? columns : 1);
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) weights[i] = Shape::has_pivot(columns, i) ? weight : 0;
    return group_sum<Shape::kLanes>(dot(first, weights));
  }
  // Σ(x - pivot), Σ(x - pivot)²; values past `valid` do not count.
  template <class Compute, int kVectorSize>
  DEVICE static void add(Compute (&sums)[kLaneSums], const Compute (&values)[kVectorSize], int valid, Compute pivot) {
    Compute deviation[kVectorSize];
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) deviation[i] = i < valid ? values[i] - pivot : 0;
    sums[0] += sum(deviation);
    sums[1] += dot(deviation, deviation);
  }
  template <int kLanes, class Compute>
  DEVICE static void gathered(Compute (&part)[kValues], const Compute (&sums)[kLaneSums], Compute pivot) {
    part[0] = pivot;
    part[1] = group_sum<kLanes>(sums[0]);
    part[2] = group_sum<kLanes>(sums[1]);
  }

  template <class Exchange, int64 kCols, class Compute, class Columns>
  DEVICE static void merge(Compute (&part)[kValues], const typename Exchange::Slots& slots, Columns columns) {
    const auto count = [&](int slot) { return static_cast<Compute>(columns(slot)); };
    const Compute base = slots(0, 0);
    const Compute beyond =
        Exchange::sum([&](int slot) { return count(slot) * one_part_in<Compute, kCols>() * (slots(0, slot) - base); });
    const Compute pivot = base + beyond;
    const auto moved = [&](int slot) {
      return Moments<Compute>{slots(0, slot), slots(1, slot), slots(2, slot)}.about(pivot, count(slot));
    };
    part[0] = pivot;
    part[1] = Exchange::sum([&](int slot) { return moved(slot).sum; });
    part[2] = Exchange::sum([&](int slot) { return moved(slot).squares; });
  }

  template <int64 kCols, bool kByCall = true, class Compute>
  DEVICE static Row<Compute> finish(const Compute (&part)[kValues], Compute eps) {
    const Compute residual = quotient<kCols, kByCall>(part[1]);
    // Less than all squares, unless both overflow: then the variance is infinite and rstd is 0, as with torch.
    const Compute of_residual = part[1] * residual < part[2] ? -residual : 0;
    const Compute variance = multiply_add(part[1], of_residual, part[2]) * one_part_in<Compute, kCols>();
    // Written so that NaN stays NaN; rounding can leave a constant row slightly below zero.
    return {part[0], residual, reciprocal_sqrt((variance < 0 ? 0 : variance) + eps)};
  }

  // Welford's update, a vector at a time.
  template <class Compute>
  struct Running {
    Compute count = 0;
    CompensatedSum<Compute> mean;
    CompensatedSum<Compute> squares;

    template <int kVectorSize>
    DEVICE void add(const Compute (&values)[kVectorSize], int valid) {
      const auto columns = static_cast<Compute>(valid);
      Compute beyond = 0;
#pragma unroll
      for (int i = 1; i < kVectorSize; ++i) beyond += i < valid ? values[i] - values[0] : 0;
      const Compute pivot = values[0] + beyond / columns;
      Compute sums[kLaneSums] = {};
      LayerNorm::add(sums, values, valid, pivot);
      const Compute residual = sums[0] / columns;
      const Compute deviations = multiply_add(-sums[0], residual, sums[1]);
      if (count == 0) {
        *this = {columns, {pivot, residual}, {deviations, 0}};
        return;
      }
      const Compute total = count + columns;
      const Compute share = columns / total;
      const Compute delta = (pivot - mean.sum) + (residual - mean.lost);
      squares.add(multiply_add(delta * delta, count * share, deviations));
      mean.add(delta * share);
      count = total;
    }

    // The lanes of a warp, all about one pivot.
    DEVICE void publish(Compute (&part)[kRunningValues]) const {
      const Compute total = group_sum<32>(count);
      const Compute base = group_sum<32>(threadIdx.x % 32 == 0 ? mean.sum : 0);
      // A warp without columns: its lanes have no mean.
      const Compute share = count / (total > 0 ? total : 1);
      const Compute pivot = base + group_sum<32>(share * (mean.sum - base));
      const Compute sum = count * mean.lost;
      const Moments<Compute> lane{mean.sum, sum, multiply_add(sum, mean.lost, squares.total_or_infinite())};
      const auto moved = lane.about(pivot, count);
      part[0] = pivot;
      part[1] = group_sum<32>(moved.sum);
      part[2] = group_sum<32>(moved.squares);
      part[3] = total;
    }

    template <class Exchange, int64 kCols>
    DEVICE static void merge(Compute (&part)[kValues], const typename Exchange::Slots& slots) {
      LayerNorm::merge<Exchange, kCols>(part, slots, [&](int slot) { return slots(3, slot); });
    }
  };

  template <class Compute>
  DEVICE static void add_gradient(Compute (&sums)[kGradientSums], Compute g, Compute xhat) {
    sums[0] = multiply_add(g, xhat, sums[0]);
    sums[1] += g;
  }
  template <class Compute, int kVectorSize>
  DEVICE static void gradient_of_vector(Compute (&sums)[kGradientSums], const Compute (&g)[kVectorSize],
                                        const Compute (&xhat)[kVectorSize]) {
    sums[0] = dot(g, xhat);
    sums[1] = g[0];
#pragma unroll
    for (int i = 1; i < kVectorSize; ++i) sums[1] += g[i];
  }
};

// RMSNorm: the mean of squares. They overflow float beyond |x| = 1.8e19, where rstd is 0, as with torch.
struct RmsNorm {
  static constexpr bool kHasMean = false;
  static constexpr int kLaneSums = 1;  // Σ x²
  static constexpr int kValues = 1;    // the same
  static constexpr int kRunningValues = 1;
  static constexpr int kGradientSums = 1;  // Σ g * xhat

  template <class Compute>
  struct Row {
    Compute rstd;

    template <int kVectorSize>
    DEVICE void normalise(Compute (&values)[kVectorSize]) const {
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] *= rstd;
    }
  };

  template <class Compute>
  struct SavedRow {
    Compute rstd;

    DEVICE static SavedRow of(const Compute*, const Compute* rstd, int64 row) { return {rstd[row]}; }
    DEVICE Compute xhat(Compute value) const { return value * rstd; }
    DEVICE Projection<Compute> projection(const Compute (&means)[kGradientSums]) const { return {means[0] * rstd, 0}; }
  };

  template <class Compute, int kVectorSize>
  DEVICE static void add(Compute (&sums)[kLaneSums], const Compute (&values)[kVectorSize], int, Compute) {
    sums[0] += dot(values, values);
  }
  template <int kLanes, class Compute>
  DEVICE static void gathered(Compute (&part)[kValues], const Compute (&sums)[kLaneSums], Compute) {
    part[0] = group_sum<kLanes>(sums[0]);
  }

  template <class Exchange, int64 kCols, class Compute, class Columns>
  DEVICE static void merge(Compute (&part)[kValues], const typename Exchange::Slots& slots, Columns) {
    part[0] = Exchange::sum([&](int slot) { return slots(0, slot); });
  }

  template <int64 kCols, bool kByCall = true, class Compute>
  DEVICE static Row<Compute> finish(const Compute (&part)[kValues], Compute eps) {
    return {reciprocal_sqrt(quotient<kCols, kByCall>(part[0]) + eps)};
  }

  template <class Compute>
  struct Running {
    CompensatedSum<Compute> squares;

    template <int kVectorSize>
    DEVICE void add(const Compute (&values)[kVectorSize], int) {
      squares.add(dot(values, values));
    }
    DEVICE void publish(Compute (&part)[kRunningValues]) const { part[0] = group_sum<32>(squares.total_or_infinite()); }
    template <class Exchange, int64 kCols>
    DEVICE static void merge(Compute (&part)[kValues], const typename Exchange::Slots& slots) {
      part[0] = Exchange::sum([&](int slot) { return slots(0, slot); });
    }
  };

  template <class Compute>
  DEVICE static void add_gradient(Compute (&sums)[kGradientSums], Compute g, Compute xhat) {
    sums[0] = multiply_add(g, xhat, sums[0]);
  }
  template <class Compute, int kVectorSize>
  DEVICE static void gradient_of_vector(Compute (&sums)[kGradientSums], const Compute (&g)[kVectorSize],
                                        const Compute (&xhat)[kVectorSize]) {
    sums[0] = dot(g, xhat);
  }
};

}  // namespace cunorm
