// Passes whose launches are known: what they allocate, where the arguments of their launches come from, and how they
// run.
#pragma once

#include <c10/core/SafePyObject.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/python_headers.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {  // of nodes.cpp, the only file that includes it

using at::Tensor;
using torch::autograd::variable_list;

// The driver's and torch's functions are called by their addresses, so that no header or library of CUDA is needed.
struct LaunchAttribute {
  int id, pad;
  unsigned value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
struct Driver {
  int (*launch)(const LaunchConfig*, void* function, void** arguments, void** extra);  // cuLaunchKernelEx
  int (*current_context)(void** context);                                              // cuCtxGetCurrent
  int (*set_context)(void* context);                                                   // cuCtxSetCurrent
  int (*current_stream)(int32_t device, void** stream);  // aoti_torch_get_current_cuda_stream
  int (*is_capturing)(void* stream, int* status);        // cuStreamIsCapturing
} driver;

int64_t address(const Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.const_data_ptr()); }

struct Memory {
  std::vector<int64_t> shape, strides;
  at::ScalarType dtype;
};

// The layout of a tensor that a described pass takes; other keys mean another kind of tensor.
struct Layout {
  Memory memory;
  c10::DispatchKeySet keys;
  c10::Device device;
  explicit Layout(const Tensor& like)
      : memory{like.sizes().vec(), like.strides().vec(), like.scalar_type()},
        keys(like.key_set()),
        device(like.device()) {}
  bool fits(const Tensor& tensor) const {
    return tensor.key_set() == keys && tensor.device() == device && tensor.scalar_type() == memory.dtype &&
           tensor.sizes() == memory.shape && tensor.strides() == memory.strides && address(tensor) % 16 == 0;
  }
};

struct Argument {
  int64_t place;  // the place among the pointers of a pass; -1 for a constant
  int64_t value;  // the constant, or the bytes to add to the pointer
};

struct Launch {
  void* function;
  unsigned grid[3], threads, shared;
  bool early;  // it begins before the previous launch ends
  std::vector<Argument> arguments;
};

// The launches of a pass. Its pointers are those of what it reads, mean, rstd, what it writes, and the workspace.
struct Work {
  std::vector<Memory> results;
  int64_t workspace, rstd_offset;  // bytes
  void* context;                   // the one that the kernels are loaded in
  std::vector<Launch> launches;
};

struct Backward {
  std::vector<std::optional<Layout>> gradients;  // of each result, if it has a gradient
  std::vector<Layout> saved;                     // of the statistics and the other saved tensors; hooks may change them
  uint64_t mask;                                 // the inputs whose gradients are wanted
  Work work;
  // For each input the place of its gradient among the results; -1: none; -2 - i: the gradient of the i-th result.
  std::vector<int64_t> places;
};

constexpr size_t BACKWARDS = 64;  // how many a pass keeps, the newest ones

// What calls with inputs of certain layouts have in common.
struct Pass {
  size_t inputs;
  Work forward;
  Memory statistics;
  std::vector<size_t> saved;  // places among inputs and results
  c10::SafePyObject learn;    // (pass, gradients, statistics, saved, mask) -> gradients of the inputs, or None
  mutable std::mutex mutex;   // guards `backwards`
  mutable std::deque<std::shared_ptr<const Backward>> backwards;
};

// A pass is shared by the calls that nodes.py keeps and by nodes of autograd, which may outlive the calls. A Storage
// holds it because a node can hold a Storage, and compiled autograd can tell one from another.
template <class T>
c10::Storage owned(std::unique_ptr<T> pass) {
  T* const data = pass.release();
  const auto free = [](void* pointer) { delete static_cast<T*>(pointer); };
  return {c10::Storage::use_byte_size_t(), sizeof(T), c10::DataPtr(data, data, free, c10::kCPU), nullptr, false};
}

template <class T>
const T& pass_in(const c10::Storage& storage) {
  return *static_cast<const T*>(storage.data());
}

// What calls of a norm with the product that reads it have in common. The inputs are x, weight, bias if there is one,
// and the other inputs of the norm.
struct LinearPass {
  c10::Storage norm;
  bool has_bias, keep_normalized;
  std::vector<Layout> norm_inputs;
  Layout dy;                // (rows, out)
  Work sums;                // of dy over its rows
  c10::SafePyObject learn;  // (gradients, statistics, saved, mask) -> gradients of the inputs
};

using Pointers = c10::SmallVector<int64_t, 24>;

Tensor allocate(const Memory& memory, c10::Device device) {
  return at::empty_strided(memory.shape, memory.strides, at::TensorOptions().dtype(memory.dtype).device(device));
}

// Makes a context current: a thread that has never called CUDA's runtime has none.
void use(void* context) {
  void* current = nullptr;
  if (driver.current_context(&current) || current != context) driver.set_context(context);
}

// Launches a pass and returns its results. `statistics` has mean and rstd, or is undefined. `pointers` are those of
// what is read.
std::vector<Tensor> run(const Work& work, Pointers& pointers, const Tensor& statistics, c10::Device device) {
  const int64_t mean = statistics.defined() ? address(statistics) : 0;
  pointers.push_back(mean);
  pointers.push_back(mean ? mean + work.rstd_offset : 0);
  std::vector<Tensor> results;
  results.reserve(work.results.size());
  for (const Memory& memory : work.results) {
    results.push_back(allocate(memory, device));
    pointers.push_back(address(results.back()));
  }
  Tensor workspace;
  if (work.workspace) {
    workspace = at::empty({work.workspace}, at::TensorOptions().dtype(at::kByte).device(device));
    pointers.push_back(address(workspace));
  }
  void* stream = nullptr;
  use(work.context);
  driver.current_stream(device.index(), &stream);
  for (const Launch& launch : work.launches) {
    c10::SmallVector<int64_t, 32> words;
    c10::SmallVector<void*, 32> addresses;
    for (const Argument& argument : launch.arguments) {
      words.push_back(argument.place < 0 ? argument.value : pointers[argument.place] + argument.value);
    }
    for (int64_t& word : words) addresses.push_back(&word);
    LaunchAttribute early = {6, 0, {1}};  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    const LaunchConfig config = {{launch.grid[0], launch.grid[1], launch.grid[2]},
                                 {launch.threads, 1, 1},
                                 launch.shared,
                                 stream,
                                 &early,
                                 launch.early ? 1u : 0u};
    const int error = driver.launch(&config, launch.function, addresses.data(), nullptr);
    // TORCH_CHECK, which notes its callers' frames, ended in a segmentation fault in a backward pass of torch 2.11.
    if (error)
      throw std::runtime_error("cunorm: cuLaunchKernelEx failed with CUDA error " + std::to_string(error) + ".");
  }
  return results;
}

// Returns the results, and the statistics last if they are wanted.
variable_list forward(const Pass& pass, at::TensorList inputs, bool wants_statistics) {
  const c10::Device device = inputs[0].device();
  const c10::DeviceGuard guard(device);
  Pointers pointers;
  for (const Tensor& input : inputs) pointers.push_back(address(input));
  const Tensor statistics = wants_statistics ? allocate(pass.statistics, device) : Tensor();
  variable_list results = run(pass.forward, pointers, statistics, device);
  if (wants_statistics) results.push_back(statistics);
  return results;
}

// Whether no mode is in force that a launch would bypass.
bool nothing_listens() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

std::shared_ptr<const Backward> known(const Pass& pass, const variable_list& gradients, const variable_list& saved,
                                      uint64_t mask) {
  const std::lock_guard guard(pass.mutex);
  for (const auto& backward : pass.backwards) {
    bool fits = backward->mask == mask;
    for (size_t i = 0; fits && i < gradients.size(); ++i) {
      const auto& layout = backward->gradients[i];
      fits = gradients[i].defined() == layout.has_value() && (!layout || layout->fits(gradients[i]));
    }
    for (size_t i = 0; fits && i < saved.size(); ++i) fits = backward->saved[i].fits(saved[i]);
    if (fits) return backward;
  }
  return nullptr;
}

variable_list run_backward(const Backward& backward, const variable_list& gradients, const variable_list& saved) {
  const Tensor& statistics = saved[0];
  const c10::DeviceGuard guard(statistics.device());
  Pointers pointers;
  for (const Tensor& gradient : gradients) pointers.push_back(gradient.defined() ? address(gradient) : 0);
  for (size_t i = 1; i < saved.size(); ++i) pointers.push_back(address(saved[i]));
  const auto written = run(backward.work, pointers, statistics, statistics.device());
  variable_list input_gradients;
  for (int64_t place : backward.places) {
    input_gradients.push_back(place == -1 ? Tensor() : place < 0 ? gradients[-2 - place] : written[place]);
  }
  return input_gradients;
}

}  // namespace
