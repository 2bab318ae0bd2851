// The nodes of passes in autograd's graph: of a norm or fused operation, and of a norm with the product that reads it.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <optional>

#include "nodes_passes.h"

namespace {  // of nodes.cpp, the only file that includes it

PyObject* wrapped(const variable_list& tensors, size_t from = 0) {
  THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>(tensors.size() - from)));
  if (!tuple) throw python_error();
  for (size_t i = from; i < tensors.size(); ++i) {
    PyTuple_SET_ITEM(tuple.get(), i - from, THPVariable_Wrap(tensors[i]));  // None where it is undefined
  }
  return tuple.release();
}

constexpr const char* PASS = "cunorm pass";

// Returns a pass as Python holds it.
PyObject* handle(const c10::Storage& pass) {
  const auto free = [](PyObject* capsule) { delete static_cast<c10::Storage*>(PyCapsule_GetPointer(capsule, PASS)); };
  PyObject* const capsule = PyCapsule_New(new c10::Storage(pass), PASS, free);
  if (!capsule) throw python_error();
  return capsule;
}

const c10::Storage& unpacked(PyObject* capsule) {
  const void* const storage = PyCapsule_GetPointer(capsule, PASS);
  if (!storage) throw python_error();
  return *static_cast<const c10::Storage*>(storage);
}

// Calls Python, which returns the gradients, or nothing if it has described the backward pass by `add_backward`.
std::optional<variable_list> learn(const c10::SafePyObject& by, const c10::Storage* pass,
                                   const variable_list& gradients, const variable_list& saved, uint64_t mask) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr arguments(PyTuple_New(pass ? 5 : 4));
  if (!arguments) throw python_error();
  Py_ssize_t count = 0;
  const auto add = [&](PyObject* argument) { PyTuple_SET_ITEM(arguments.get(), count++, argument); };
  if (pass) add(handle(*pass));
  add(wrapped(gradients));
  add(THPVariable_Wrap(saved[0]));
  add(wrapped(saved, 1));
  add(PyLong_FromUnsignedLongLong(mask));
  THPObjectPtr computed(PyObject_CallObject(by.ptr(getPyInterpreter()), arguments.get()));
  if (!computed) {
    python_error error;
    error.persist();
    throw error;
  }
  if (computed.get() == Py_None) return std::nullopt;
  variable_list unpacked;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(computed.get()); ++i) {
    PyObject* gradient = PySequence_Fast_GET_ITEM(computed.get(), i);
    unpacked.push_back(gradient == Py_None ? Tensor() : THPVariable_Unpack(gradient));
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
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) { return tensor.defined(); });
}

variable_list gradients_of(const c10::Storage& which, const variable_list& gradients, const variable_list& saved,
                           uint64_t mask) {
  const auto& pass = pass_in<Pass>(which);
  const bool plain = !c10::GradMode::is_enabled() && nothing_listens();
  auto backward = plain ? known(pass, gradients, saved, mask) : nullptr;
  if (!backward) {
    if (const auto computed = learn(pass.learn, &which, gradients, saved, mask)) return *computed;
    backward = known(pass, gradients, saved, mask);
    if (!backward) throw std::runtime_error("cunorm: a backward pass was described, but not for these gradients.");
  }
  return run_backward(*backward, gradients, saved);
}

struct Norm : torch::autograd::Function<Norm> {
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs,
                               const c10::Storage& which) {
    const auto& pass = pass_in<Pass>(which);
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
    const c10::Storage which = context->saved_data["pass"].toStorage();
    const auto& pass = pass_in<Pass>(which);
    const variable_list saved = context->get_saved_variables();
    variable_list input_gradients(pass.inputs);
    if (any(gradients)) input_gradients = gradients_of(which, gradients, saved, wanted(context, pass.inputs));
    input_gradients.emplace_back();  // of `which`
    return input_gradients;
  }
};

// Returns z = norm(x), the statistics if they are wanted, and y = z weightᵀ + bias.
variable_list linear_forward(const LinearPass& pass, at::TensorList inputs, bool wants_statistics) {
  c10::SmallVector<Tensor, 3> norm_inputs = {inputs[0]};
  for (size_t i = 2 + pass.has_bias; i < inputs.size(); ++i) norm_inputs.push_back(inputs[i]);
  variable_list results = forward(pass_in<Pass>(pass.norm), norm_inputs, wants_statistics);
  results.push_back(at::linear(results[0], inputs[1], pass.has_bias ? inputs[2] : Tensor()));
  return results;
}

// In a CUDA graph the backward pass has two streams, which Python sets up.
bool is_capturing(c10::Device device) {
  void* stream = nullptr;
  int status = 0;
  driver.current_stream(device.index(), &stream);
  return driver.is_capturing(stream, &status) || status;
}

// Returns the gradients of the inputs from dy, whose layout is known. `saved` has the statistics, the inputs except
// bias, and z if it is kept.
variable_list linear_gradients(const LinearPass& pass, const Tensor& dy, const variable_list& saved, uint64_t mask) {
  const Tensor &statistics = saved[0], &x = saved[1], &weight = saved[2];
  const c10::DeviceGuard guard(dy.device());
  const auto& norm = pass_in<Pass>(pass.norm);
  use(norm.forward.context);  // the products may come first
  const size_t others = pass.norm_inputs.size() - 1, bias = pass.has_bias;
  variable_list input_gradients(2 + bias + others);
  if (mask & 2) {
    Tensor z;
    if (pass.keep_normalized) {
      z = saved.back();
    } else {
      Pointers pointers = {address(x)};
      for (size_t i = 0; i < others; ++i) pointers.push_back(address(saved[3 + i]));
      z = run(norm.forward, pointers, Tensor(), dy.device())[0];
    }
    z = z.view({dy.size(0), -1});
    // It is laid out as weight is, because autograd would copy another layout.
    input_gradients[1] = weight.stride(1) == 1 ? at::mm(dy.t(), z) : at::mm(z.t(), dy).t();
  }
  if (bias && (mask & 4)) {
    Pointers pointers = {address(dy)};
    input_gradients[2] = run(pass.sums, pointers, Tensor(), dy.device())[0];
  }
  const uint64_t norm_mask = (mask & 1) | (mask >> (2 + bias) << 1);
  if (norm_mask) {
    variable_list norm_saved = {statistics, x};
    for (size_t place : norm.saved) {
      if (place) norm_saved.push_back(saved[2 + place]);
    }
    const variable_list dz = {at::mm(dy, weight).view(x.sizes())};
    const variable_list norm_gradients = gradients_of(pass.norm, dz, norm_saved, norm_mask);
    input_gradients[0] = norm_gradients[0];
    std::copy(norm_gradients.begin() + 1, norm_gradients.end(), input_gradients.begin() + 2 + bias);
  }
  return input_gradients;
}

struct NormLinear : torch::autograd::Function<NormLinear> {
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs,
                               const c10::Storage& which) {
    const auto& pass = pass_in<LinearPass>(which);
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
    const c10::Storage which = context->saved_data["pass"].toStorage();
    const auto& pass = pass_in<LinearPass>(which);
    // The products have the dtypes that those of the forward pass had.
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = context->get_saved_variables();
    const size_t inputs = 1 + pass.has_bias + pass.norm_inputs.size();
    const uint64_t mask = wanted(context, inputs);
    variable_list input_gradients(inputs);
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
      input_gradients =
          plain ? linear_gradients(pass, dy, saved, mask) : *learn(pass.learn, nullptr, gradients, saved, mask);
    }
    input_gradients.emplace_back();  // of `which`
    return input_gradients;
  }
};

}  // namespace
