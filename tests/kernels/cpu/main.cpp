// One launch: the job comes on standard input, the arrays as the kernel leaves them go to standard output. All numbers
// are 64-bit words:
//   grid x, y, z, threads, CTAs of a cluster, order (as in scheduler.cpp), bytes of dynamic shared memory,
//   number of arrays, number of arguments,
//   of each array its bytes and its address modulo 128,
//   of each argument its bytes, the number of its array or -1, and its value or its offset in the array,
//   then the arrays.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "machine.hpp"

namespace {

template <class T>
std::vector<T> read(std::size_t count) {
  std::vector<T> result(count);
  if (std::fread(result.data(), sizeof(T), count, stdin) != count) {
    std::fprintf(stderr, "cunorm: the job is cut off\n");
    std::exit(2);
  }
  return result;
}

// An array begins where the caller's does modulo this: RUN_GAP (spec.py), for kernels look at no more of an address.
// AddressSanitizer does not see an access between the begin of a block and that of its array, so that there it is the
// size of a vector access.
#ifdef CUNORM_ADDRESS
constexpr std::size_t kAlignment = 16;
#else
constexpr std::size_t kAlignment = 128;
#endif

struct Array {
  std::uint64_t bytes, misplacement;
};
struct Argument {
  std::uint64_t bytes;
  std::int64_t array;
  std::uint64_t value;
};
struct Header {
  std::uint64_t grid_x, grid_y, grid_z, threads, cluster, order, dynamic_shared, arrays, arguments;
};

}  // namespace

int main() {
  const auto header = read<Header>(1)[0];
  const auto arrays = read<Array>(header.arrays);
  const auto parameters = read<Argument>(header.arguments);
  // Blocks of their exact size, so that AddressSanitizer sees a byte too far.
  std::vector<char*> memory;
  for (const Array& array : arrays) {
    void* block = nullptr;
    const std::size_t before = array.misplacement % kAlignment;
    if (posix_memalign(&block, kAlignment, before + array.bytes) != 0) return 2;
    memory.push_back(static_cast<char*>(block) + before);
    if (std::fread(memory.back(), 1, array.bytes, stdin) != array.bytes) return 2;
  }
  bool fits = parameters.size() == cpu::kernel.parameters;
  for (std::size_t i = 0; fits && i < parameters.size(); ++i) {
    const Argument& each = parameters[i];
    fits = each.bytes == cpu::kernel.sizes[i];
    cpu::arguments.push_back(each.array < 0 ? each.value
                                            : reinterpret_cast<std::uint64_t>(memory[each.array]) + each.value);
  }
  if (!fits) {
    std::fprintf(stderr, "cunorm: the arguments of the launch are not those of the kernel\n");
    return 2;
  }
  cpu::launch = {{static_cast<unsigned>(header.grid_x), static_cast<unsigned>(header.grid_y),
                  static_cast<unsigned>(header.grid_z)},
                 header.threads,
                 header.cluster,
                 header.order,
                 header.dynamic_shared};
  cpu::run_grid();
  for (std::size_t i = 0; i < arrays.size(); ++i) std::fwrite(memory[i], 1, arrays[i].bytes, stdout);
  std::fflush(stdout);
  _exit(0);
}
