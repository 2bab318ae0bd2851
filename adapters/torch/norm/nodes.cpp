// Run calls whose launches are known (nodes.py), and their nodes in autograd's graph, without Python in the backward
// pass.
//
// Python describes the passes once: what they allocate, and for each launch where its arguments come from. A call
// hands over tensors alone. It returns None if it cannot serve them, and Python serves them itself. The first backward
// pass for gradients of a layout asks Python, which describes the pass, or computes it if it cannot be described.
#include <torch/csrc/Dtype.h>

#include "nodes_autograd.h"

namespace {

std::vector<int64_t> integers(PyObject* sequence) {
  std::vector<int64_t> numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); ++i) {
    numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sequence, i)));
  }
  return numbers;
}

// (shape, strides, dtype)
Memory memory(PyObject* fields) {
  const auto dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(fields, 2))->scalar_type;
  return {integers(PyTuple_GET_ITEM(fields, 0)), integers(PyTuple_GET_ITEM(fields, 1)), dtype};
}

// (results, bytes of workspace, bytes from mean to rstd, context, launches); a launch: (function, grid x, y, z,
// threads, shared, early, places of arguments, values of arguments)
Work work(PyObject* fields) {
  Work result;
  PyObject *results = PyTuple_GET_ITEM(fields, 0), *launches = PyTuple_GET_ITEM(fields, 4);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); ++i) {
    result.results.push_back(memory(PyTuple_GET_ITEM(results, i)));
  }
  result.workspace = PyLong_AsLongLong(PyTuple_GET_ITEM(fields, 1));
  result.rstd_offset = PyLong_AsLongLong(PyTuple_GET_ITEM(fields, 2));
  result.context = PyLong_AsVoidPtr(PyTuple_GET_ITEM(fields, 3));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); ++i) {
    PyObject* launch = PyTuple_GET_ITEM(launches, i);
    const auto number = [&](Py_ssize_t place) { return PyLong_AsLongLong(PyTuple_GET_ITEM(launch, place)); };
    const auto whole = [&](Py_ssize_t place) { return static_cast<unsigned>(number(place)); };
    result.launches.push_back(
        {reinterpret_cast<void*>(number(0)), {whole(1), whole(2), whole(3)}, whole(4), whole(5), number(6) != 0, {}});
    const auto places = integers(PyTuple_GET_ITEM(launch, 7)), values = integers(PyTuple_GET_ITEM(launch, 8));
    for (size_t k = 0; k < places.size(); ++k) result.launches.back().arguments.push_back({places[k], values[k]});
  }
  return result;
}

// Takes the addresses of the functions that Driver has.
PyObject* set_driver(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  void** const fields = reinterpret_cast<void**>(&driver);
  for (int i = 0; i < 5; ++i) fields[i] = PyLong_AsVoidPtr(arguments[i]);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

c10::SafePyObject reference_to(PyObject* object) { return {Py_NewRef(object), getPyInterpreter()}; }

// (inputs, work, memory of the statistics, saved, learn) -> what `call` takes
PyObject* make_pass(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  std::vector<size_t> saved;
  for (int64_t place : integers(arguments[3])) saved.push_back(static_cast<size_t>(place));
  std::unique_ptr<Pass> pass(new Pass{PyLong_AsSize_t(arguments[0]),
                                      work(arguments[1]),
                                      memory(arguments[2]),
                                      std::move(saved),
                                      reference_to(arguments[4]),
                                      {},
                                      {}});
  if (PyErr_Occurred()) return nullptr;
  return handle(owned(std::move(pass)));
  END_HANDLE_TH_ERRORS
}

// (pass, gradients of the results or None, statistics and the other saved tensors, mask, work, places)
PyObject* add_backward(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto& pass = pass_in<Pass>(unpacked(arguments[0]));
  auto backward = std::make_shared<Backward>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[1]); ++i) {
    PyObject* const gradient = PyTuple_GET_ITEM(arguments[1], i);
    const bool missing = gradient == Py_None;
    backward->gradients.push_back(missing ? std::nullopt : std::optional<Layout>(THPVariable_Unpack(gradient)));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[2]); ++i) {
    backward->saved.emplace_back(THPVariable_Unpack(PyTuple_GET_ITEM(arguments[2], i)));
  }
  backward->mask = PyLong_AsUnsignedLongLong(arguments[3]);
  backward->work = work(arguments[4]);
  backward->places = integers(arguments[5]);
  if (PyErr_Occurred()) return nullptr;
  const std::lock_guard guard(pass.mutex);
  pass.backwards.push_front(std::move(backward));
  if (pass.backwards.size() > BACKWARDS) pass.backwards.pop_back();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (pass of the norm, has_bias, keep_normalized, inputs of the norm, dy of (rows, out), work, learn) -> what
// `call_linear` takes
PyObject* make_linear_pass(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  std::vector<Layout> inputs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[3]); ++i) {
    inputs.emplace_back(THPVariable_Unpack(PyTuple_GET_ITEM(arguments[3], i)));
  }
  const bool has_bias = arguments[1] == Py_True, keep_normalized = arguments[2] == Py_True;
  std::unique_ptr<LinearPass> pass(new LinearPass{unpacked(arguments[0]), has_bias, keep_normalized, std::move(inputs),
                                                  Layout(THPVariable_Unpack(arguments[4])), work(arguments[5]),
                                                  reference_to(arguments[6])});
  if (PyErr_Occurred()) return nullptr;
  return handle(owned(std::move(pass)));
  END_HANDLE_TH_ERRORS
}

// (pass, *inputs, some of them None) -> tuple of results; None if an address is no multiple of 16
template <class Node, class Results>
PyObject* call_by(PyObject* const* arguments, Py_ssize_t count, const Results& without_gradients) {
  HANDLE_TH_ERRORS
  const c10::Storage which = unpacked(arguments[0]);
  c10::SmallVector<Tensor, 8> inputs;
  bool differentiable = false;
  int64_t addresses = 0;
  for (Py_ssize_t i = 1; i < count; ++i) {
    if (arguments[i] == Py_None) continue;
    inputs.push_back(THPVariable_Unpack(arguments[i]));
    differentiable |= inputs.back().requires_grad();
    addresses |= address(inputs.back());
  }
  if (addresses % 16) Py_RETURN_NONE;
  variable_list results;
  {
    const pybind11::gil_scoped_release others_may_run;  // a launch waits where the GPU's queue is full
    if (differentiable && c10::GradMode::is_enabled()) {
      results = Node::apply(at::TensorList(inputs), which);
    } else {
      const at::AutoDispatchBelowADInplaceOrView guard;
      results = without_gradients(which, inputs);
    }
  }
  return wrapped(results);
  END_HANDLE_TH_ERRORS
}

PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call_by<Norm>(arguments, count, [](const c10::Storage& which, at::TensorList inputs) {
    return forward(pass_in<Pass>(which), inputs, false);
  });
}

// -> (y, z)
PyObject* call_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call_by<NormLinear>(arguments, count, [](const c10::Storage& which, at::TensorList inputs) {
    variable_list results = linear_forward(pass_in<LinearPass>(which), inputs, false);
    std::swap(results[0], results[1]);
    return results;
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
