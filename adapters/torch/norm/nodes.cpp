// Calls whose launches are known (nodes.py), and their node in autograd's graph, without Python in the backward pass.
//
// Python describes the passes once: what they allocate, and for each launch where its arguments come from. A call
// hands over tensors alone; it answers None where it cannot serve them, and Python serves them itself. So does the
// first backward pass for gradients of a layout, which then describes the next.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// The driver's and torch's functions, by their addresses: neither CUDA's headers nor its libraries are needed.
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

// What a described pass may be given: another key is another kind of tensor.
struct Layout {
  Memory memory;
  c10::DispatchKeySet keys;
  explicit Layout(const Tensor& like)
      : memory{like.sizes().vec(), like.strides().vec(), like.scalar_type()}, keys(like.key_set()) {}
  bool fits(const Tensor& tensor) const {
    return tensor.key_set() == keys && tensor.scalar_type() == memory.dtype && tensor.sizes() == memory.shape &&
           tensor.strides() == memory.strides && address(tensor) % 16 == 0;
  }
};

struct Argument {
  int64_t place;  // among the pointers of a pass; -1: a constant
  int64_t value;  // the constant, or bytes past the pointer
};

struct Launch {
  void* function;
  unsigned grid[3], threads, shared;
  bool early;  // before the launch in front of it ends
  std::vector<Argument> arguments;
};

// The launches of a pass. Pointers: of what it reads, of mean and rstd, of what it writes, of the workspace.
struct Work {
  std::vector<Memory> results;
  int64_t workspace, rstd_offset;  // bytes
  void* context;                   // that the kernels are loaded in
  std::vector<Launch> launches;
};

struct Backward {
  std::vector<std::optional<Layout>> gradients;  // given, of each result
  std::vector<Layout> saved;                     // statistics, and what the pass reads besides; hooks may change it
  uint64_t mask;                                 // the inputs whose gradients are wanted
  Work work;
  std::vector<int64_t> places;  // of each input's gradient among what is written; -1: none; -2 - i: the i-th given one
  Backward* next;
};

// What calls with inputs of certain layouts have in common. Never freed: nodes.py makes so many and no more.
struct Pass {
  size_t inputs;
  Work forward;
  Memory statistics;
  std::vector<size_t> saved;  // places among inputs and results
  PyObject* learn;            // (given gradients, statistics, saved, mask) -> gradients of the inputs
  std::atomic<Backward*> backwards{nullptr};
};

// The same of a norm with the product that reads it. Inputs: x, weight, bias if there is one, and the norm's others.
struct LinearPass {
  const Pass* norm;
  bool has_bias, keep_normalized;
  std::vector<Layout> norm_inputs;
  Layout dy;  // (rows, out)
  Work sums;  // of dy over its rows
  PyObject* learn;
};

using Pointers = c10::SmallVector<int64_t, 24>;

Tensor allocate(const Memory& memory, c10::Device device) {
  return at::empty_strided(memory.shape, memory.strides, at::TensorOptions().dtype(memory.dtype).device(device));
}

// A thread that never called CUDA's runtime has no context.
void use(void* context) {
  void* current = nullptr;
  if (driver.current_context(&current) || current != context) driver.set_context(context);
}

// `statistics` has mean and rstd, or is undefined. `pointers` are those of what is read.
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
    for (const Argument& one : launch.arguments) {
      words.push_back(one.place < 0 ? one.value : pointers[one.place] + one.value);
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

// Results, and the statistics last if they are wanted.
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

// A launch would bypass what listens.
bool nothing_listens() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

const Backward* known(const Pass& pass, const variable_list& gradients, const variable_list& saved, uint64_t mask) {
  for (const Backward* one = pass.backwards.load(std::memory_order_acquire); one; one = one->next) {
    bool fits = one->mask == mask;
    for (size_t i = 0; fits && i < gradients.size(); ++i) {
      const auto& layout = one->gradients[i];
      fits = gradients[i].defined() == layout.has_value() && (!layout || layout->fits(gradients[i]));
    }
    for (size_t i = 0; fits && i < saved.size(); ++i) fits = one->saved[i].fits(saved[i]);
    if (fits) return one;
  }
  return nullptr;
}

variable_list run_backward(const Backward& backward, const variable_list& gradients, const variable_list& saved) {
  const Tensor& statistics = saved[0];
  const c10::DeviceGuard guard(statistics.device());
  Pointers pointers;
  for (const Tensor& one : gradients) pointers.push_back(one.defined() ? address(one) : 0);
  for (size_t i = 1; i < saved.size(); ++i) pointers.push_back(address(saved[i]));
  const auto written = run(backward.work, pointers, statistics, statistics.device());
  variable_list found;
  for (int64_t place : backward.places) {
    found.push_back(place == -1 ? Tensor() : place < 0 ? gradients[-2 - place] : written[place]);
  }
  return found;
}

PyObject* wrapped(const variable_list& tensors, size_t from = 0) {
  THPObjectPtr found(PyTuple_New(static_cast<Py_ssize_t>(tensors.size() - from)));
  if (!found) throw python_error();
  for (size_t i = from; i < tensors.size(); ++i) {
    PyTuple_SET_ITEM(found.get(), i - from, THPVariable_Wrap(tensors[i]));  // None where it is undefined
  }
  return found.release();
}

// By Python, which may describe what it did (`add_backward`).
variable_list learn(PyObject* by, const variable_list& gradients, const variable_list& saved, uint64_t mask) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr given(wrapped(gradients)), statistics(THPVariable_Wrap(saved[0])), tensors(wrapped(saved, 1));
  THPObjectPtr bits(PyLong_FromUnsignedLongLong(mask));
  THPObjectPtr found(
      PyObject_CallFunctionObjArgs(by, given.get(), statistics.get(), tensors.get(), bits.get(), nullptr));
  if (!found) {
    python_error error;
    error.persist();
    throw error;
  }
  variable_list unpacked;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(found.get()); ++i) {
    PyObject* one = PySequence_Fast_GET_ITEM(found.get(), i);
    unpacked.push_back(one == Py_None ? Tensor() : THPVariable_Unpack(one));
  }
  return unpacked;
}

template <class Context>
uint64_t wanted(const Context& context, size_t inputs) {
  uint64_t mask = 0;
  for (size_t i = 0; i < inputs; ++i) mask |= static_cast<uint64_t>(context->needs_input_grad(i)) << i;
  return mask;
}

bool any(const variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& one) { return one.defined(); });
}

variable_list gradients_of(const Pass& pass, const variable_list& gradients, const variable_list& saved,
                           uint64_t mask) {
  const bool plain = !c10::GradMode::is_enabled() && nothing_listens();
  const Backward* backward = plain ? known(pass, gradients, saved, mask) : nullptr;
  return backward ? run_backward(*backward, gradients, saved) : learn(pass.learn, gradients, saved, mask);
}

struct Norm : torch::autograd::Function<Norm> {
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs, int64_t which) {
    const Pass& pass = *reinterpret_cast<const Pass*>(which);
    variable_list results = ::forward(pass, inputs, true);
    variable_list saved = {results.back()};
    results.pop_back();
    for (size_t place : pass.saved) {
      saved.push_back(place < inputs.size() ? inputs[place] : results[place - inputs.size()]);
    }
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["pass"] = which;
    return results;
  }

  static variable_list backward(torch::autograd::AutogradContext* context, variable_list gradients) {
    const Pass& pass = *reinterpret_cast<const Pass*>(context->saved_data["pass"].toInt());
    const variable_list saved = context->get_saved_variables();
    variable_list found(pass.inputs);
    if (any(gradients)) found = gradients_of(pass, gradients, saved, wanted(context, pass.inputs));
    found.emplace_back();  // of `which`
    return found;
  }
};

// z = norm(x), y = z weightᵀ + bias -> z, the statistics if they are wanted, y
variable_list linear_forward(const LinearPass& pass, at::TensorList inputs, bool wants_statistics) {
  c10::SmallVector<Tensor, 3> of_norm = {inputs[0]};
  for (size_t i = 2 + pass.has_bias; i < inputs.size(); ++i) of_norm.push_back(inputs[i]);
  variable_list results = forward(*pass.norm, of_norm, wants_statistics);
  results.push_back(at::linear(results[0], inputs[1], pass.has_bias ? inputs[2] : Tensor()));
  return results;
}

// A graph has two streams, which Python sets up.
bool is_capturing(c10::Device device) {
  void* stream = nullptr;
  int status = 0;
  driver.current_stream(device.index(), &stream);
  return driver.is_capturing(stream, &status) || status;
}

// Gradients of y alone, by what is known of its layout. `saved`: statistics, the inputs but for bias, z if it was kept.
variable_list linear_gradients(const LinearPass& pass, const Tensor& dy, const variable_list& saved, uint64_t mask) {
  const Tensor &statistics = saved[0], &x = saved[1], &weight = saved[2];
  const c10::DeviceGuard guard(dy.device());
  use(pass.norm->forward.context);  // for the products, which may come first
  const size_t others = pass.norm_inputs.size() - 1, bias = pass.has_bias;
  variable_list found(2 + bias + others);
  if (mask & 2) {
    Tensor z;
    if (pass.keep_normalized) {
      z = saved.back();
    } else {
      Pointers pointers = {address(x)};
      for (size_t i = 0; i < others; ++i) pointers.push_back(address(saved[3 + i]));
      z = run(pass.norm->forward, pointers, Tensor(), dy.device())[0];
    }
    z = z.view({dy.size(0), -1});
    // Laid out as weight is: autograd would copy another layout.
    found[1] = weight.stride(1) == 1 ? at::mm(dy.t(), z) : at::mm(z.t(), dy).t();
  }
  if (bias && (mask & 4)) {
    Pointers pointers = {address(dy)};
    found[2] = run(pass.sums, pointers, Tensor(), dy.device())[0];
  }
  const uint64_t norm_mask = (mask & 1) | (mask >> (2 + bias) << 1);
  if (norm_mask) {
    variable_list of_norm = {statistics, x};
    for (size_t place : pass.norm->saved) {
      if (place) of_norm.push_back(saved[2 + place]);
    }
    const variable_list dz = {at::mm(dy, weight).view(x.sizes())};
    const variable_list of_inputs = gradients_of(*pass.norm, dz, of_norm, norm_mask);
    found[0] = of_inputs[0];
    std::copy(of_inputs.begin() + 1, of_inputs.end(), found.begin() + 2 + bias);
  }
  return found;
}

struct NormLinear : torch::autograd::Function<NormLinear> {
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs, int64_t which) {
    const auto& pass = *reinterpret_cast<const LinearPass*>(which);
    const variable_list computed = linear_forward(pass, inputs, true);
    variable_list saved = {computed[1]};
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (i != 2 || !pass.has_bias) saved.push_back(inputs[i]);
    }
    if (pass.keep_normalized) saved.push_back(computed[0]);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["pass"] = which;
    return {computed[2], computed[0]};
  }

  static variable_list backward(torch::autograd::AutogradContext* context, variable_list gradients) {
    const auto& pass = *reinterpret_cast<const LinearPass*>(context->saved_data["pass"].toInt());
    // The products have the dtypes that those of the forward pass had.
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = context->get_saved_variables();
    const size_t inputs = 1 + pass.has_bias + pass.norm_inputs.size();
    const uint64_t mask = wanted(context, inputs);
    variable_list found(inputs);
    if (any(gradients)) {
      bool plain = !c10::GradMode::is_enabled() && nothing_listens() && gradients[0].defined() &&
                   !gradients[1].defined() && !is_capturing(saved[0].device());
      for (size_t i = 0; plain && i < pass.norm_inputs.size(); ++i) {
        plain = pass.norm_inputs[i].fits(saved[i ? 2 + i : 1]);
      }
      Tensor dy;
      if (plain) {
        // An expanded gradient would be copied by every product.
        dy = gradients[0].reshape({pass.dy.memory.shape[0], -1}).contiguous();
        plain = pass.dy.fits(dy);
      }
      found = plain ? linear_gradients(pass, dy, saved, mask) : learn(pass.learn, gradients, saved, mask);
    }
    found.emplace_back();  // of `which`
    return found;
  }
};

// What Python describes.

std::vector<int64_t> integers(PyObject* sequence) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); ++i) {
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sequence, i)));
  }
  return found;
}

// (shape, strides, dtype)
Memory memory(PyObject* one) {
  const auto dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(one, 2))->scalar_type;
  return {integers(PyTuple_GET_ITEM(one, 0)), integers(PyTuple_GET_ITEM(one, 1)), dtype};
}

// (results, bytes of workspace, bytes from mean to rstd, context, launches); a launch: (function, grid x, y, z,
// threads, shared, early, places of arguments, values of arguments)
Work work(PyObject* one) {
  Work found;
  PyObject *results = PyTuple_GET_ITEM(one, 0), *launches = PyTuple_GET_ITEM(one, 4);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); ++i) {
    found.results.push_back(memory(PyTuple_GET_ITEM(results, i)));
  }
  found.workspace = PyLong_AsLongLong(PyTuple_GET_ITEM(one, 1));
  found.rstd_offset = PyLong_AsLongLong(PyTuple_GET_ITEM(one, 2));
  found.context = PyLong_AsVoidPtr(PyTuple_GET_ITEM(one, 3));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); ++i) {
    PyObject* launch = PyTuple_GET_ITEM(launches, i);
    const auto number = [&](Py_ssize_t place) { return PyLong_AsLongLong(PyTuple_GET_ITEM(launch, place)); };
    const auto whole = [&](Py_ssize_t place) { return static_cast<unsigned>(number(place)); };
    found.launches.push_back(
        {reinterpret_cast<void*>(number(0)), {whole(1), whole(2), whole(3)}, whole(4), whole(5), number(6) != 0, {}});
    const auto places = integers(PyTuple_GET_ITEM(launch, 7)), values = integers(PyTuple_GET_ITEM(launch, 8));
    for (size_t k = 0; k < places.size(); ++k) found.launches.back().arguments.push_back({places[k], values[k]});
  }
  return found;
}

// The addresses of the functions that Driver has.
PyObject* set_driver(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  void** const fields = reinterpret_cast<void**>(&driver);
  for (int i = 0; i < 5; ++i) fields[i] = PyLong_AsVoidPtr(given[i]);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (inputs, work, memory of the statistics, saved, learn) -> what `call` takes
PyObject* make_pass(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto pass = std::make_unique<Pass>();
  pass->inputs = PyLong_AsSize_t(given[0]);
  pass->forward = work(given[1]);
  pass->statistics = memory(given[2]);
  for (int64_t place : integers(given[3])) pass->saved.push_back(static_cast<size_t>(place));
  pass->learn = Py_NewRef(given[4]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromVoidPtr(pass.release());
  END_HANDLE_TH_ERRORS
}

// (pass, gradients given or None, statistics and what was saved, mask, work, places)
PyObject* add_backward(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto& pass = *static_cast<Pass*>(PyLong_AsVoidPtr(given[0]));
  auto backward = std::make_unique<Backward>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[1]); ++i) {
    PyObject* const one = PyTuple_GET_ITEM(given[1], i);
    backward->gradients.push_back(one == Py_None ? std::nullopt : std::optional<Layout>(THPVariable_Unpack(one)));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[2]); ++i) {
    backward->saved.emplace_back(THPVariable_Unpack(PyTuple_GET_ITEM(given[2], i)));
  }
  backward->mask = PyLong_AsUnsignedLongLong(given[3]);
  backward->work = work(given[4]);
  backward->places = integers(given[5]);
  backward->next = pass.backwards.load();
  if (PyErr_Occurred()) return nullptr;
  pass.backwards.store(backward.release(), std::memory_order_release);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (pass of the norm, whether there is a bias, whether z is kept, the norm's inputs, dy of (rows, out), work, learn) ->
// what `call_linear` takes
PyObject* make_linear_pass(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  std::vector<Layout> inputs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[3]); ++i) {
    inputs.emplace_back(THPVariable_Unpack(PyTuple_GET_ITEM(given[3], i)));
  }
  const auto norm = static_cast<const Pass*>(PyLong_AsVoidPtr(given[0]));
  auto pass = std::make_unique<LinearPass>(LinearPass{norm, given[1] == Py_True, given[2] == Py_True, std::move(inputs),
                                                      Layout(THPVariable_Unpack(given[4])), work(given[5]),
                                                      Py_NewRef(given[6])});
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromVoidPtr(pass.release());
  END_HANDLE_TH_ERRORS
}

// (pass, *inputs, some of them None) -> tuple of results; None where an address is no multiple of 16
template <class Node, class Results>
PyObject* call_by(PyObject* const* given, Py_ssize_t count, const Results& without_gradients) {
  HANDLE_TH_ERRORS
  const int64_t which = PyLong_AsLongLong(given[0]);
  c10::SmallVector<Tensor, 8> inputs;
  bool differentiable = false;
  int64_t addresses = 0;
  for (Py_ssize_t i = 1; i < count; ++i) {
    if (given[i] == Py_None) continue;
    inputs.push_back(THPVariable_Unpack(given[i]));
    differentiable |= inputs.back().requires_grad();
    addresses |= address(inputs.back());
  }
  if (addresses % 16) Py_RETURN_NONE;
  variable_list results;
  if (differentiable && c10::GradMode::is_enabled()) {
    results = Node::apply(at::TensorList(inputs), which);
  } else {
    const at::AutoDispatchBelowADInplaceOrView guard;
    results = without_gradients(which, inputs);
  }
  return wrapped(results);
  END_HANDLE_TH_ERRORS
}

PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return call_by<Norm>(given, count, [](int64_t which, at::TensorList inputs) {
    return forward(*reinterpret_cast<const Pass*>(which), inputs, false);
  });
}

// -> (y, z)
PyObject* call_linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return call_by<NormLinear>(given, count, [](int64_t which, at::TensorList inputs) {
    variable_list found = linear_forward(*reinterpret_cast<const LinearPass*>(which), inputs, false);
    std::swap(found[0], found[1]);
    return found;
  });
}

PyMethodDef methods[] = {
    {"set_driver", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(set_driver)), METH_FASTCALL, nullptr},
    {"make_pass", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(make_pass)), METH_FASTCALL, nullptr},
    {"make_linear_pass", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(make_linear_pass)), METH_FASTCALL,
     nullptr},
    {"add_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(add_backward)), METH_FASTCALL, nullptr},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr},
    {"call_linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_linear)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "cunorm_nodes", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_cunorm_nodes() { return PyModule_Create(&module); }
