// The nodes of passes in autograd's graph: a norm or fused operation, and a norm with the product that reads it.
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
  THPObjectPtr found(PyTuple_New(static_cast<Py_ssize_t>(tensors.size() - from)));
  if (!found) throw python_error();
  for (size_t i = from; i < tensors.size(); ++i) {
    PyTuple_SET_ITEM(found.get(), i - from, THPVariable_Wrap(tensors[i]));  // None where it is undefined
  }
  return found.release();
}

constexpr const char* PASS = "cunorm pass";

// A pass as Python holds it.
PyObject* handle(const c10::Storage& pass) {
  const auto free = [](PyObject* one) { delete static_cast<c10::Storage*>(PyCapsule_GetPointer(one, PASS)); };
  PyObject* const found = PyCapsule_New(new c10::Storage(pass), PASS, free);
  if (!found) throw python_error();
  return found;
}

const c10::Storage& unpacked(PyObject* handle) {
  const void* const found = PyCapsule_GetPointer(handle, PASS);
  if (!found) throw python_error();
  return *static_cast<const c10::Storage*>(found);
}

// By Python: the gradients; nothing where it has described to `pass`, if there is one, how they are computed
// (`add_backward`).
std::optional<variable_list> learn(const c10::SafePyObject& by, const c10::Storage* pass,
                                   const variable_list& gradients, const variable_list& saved, uint64_t mask) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr arguments(PyTuple_New(pass ? 5 : 4));
  if (!arguments) throw python_error();
  Py_ssize_t count = 0;
  const auto add = [&](PyObject* one) { PyTuple_SET_ITEM(arguments.get(), count++, one); };
  if (pass) add(handle(*pass));
  add(wrapped(gradients));
  add(THPVariable_Wrap(saved[0]));
  add(wrapped(saved, 1));
  add(PyLong_FromUnsignedLongLong(mask));
  THPObjectPtr found(PyObject_CallObject(by.ptr(getPyInterpreter()), arguments.get()));
  if (!found) {
    python_error error;
    error.persist();
    throw error;
  }
  if (found.get() == Py_None) return std::nullopt;
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
    variable_list found(pass.inputs);
    if (any(gradients)) found = gradients_of(which, gradients, saved, wanted(context, pass.inputs));
    found.emplace_back();  // of `which`
    return found;
  }
};

// z = norm(x), y = z weightᵀ + bias -> z, the statistics if they are wanted, y
variable_list linear_forward(const LinearPass& pass, at::TensorList inputs, bool wants_statistics) {
  c10::SmallVector<Tensor, 3> of_norm = {inputs[0]};
  for (size_t i = 2 + pass.has_bias; i < inputs.size(); ++i) of_norm.push_back(inputs[i]);
  variable_list results = forward(pass_in<Pass>(pass.norm), of_norm, wants_statistics);
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
  const auto& norm = pass_in<Pass>(pass.norm);
  use(norm.forward.context);  // for the products, which may come first
  const size_t others = pass.norm_inputs.size() - 1, bias = pass.has_bias;
  variable_list found(2 + bias + others);
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
    for (size_t place : norm.saved) {
      if (place) of_norm.push_back(saved[2 + place]);
    }
    const variable_list dz = {at::mm(dy, weight).view(x.sizes())};
    const variable_list of_inputs = gradients_of(pass.norm, dz, of_norm, norm_mask);
    found[0] = of_inputs[0];
    std::copy(of_inputs.begin() + 1, of_inputs.end(), found.begin() + 2 + bias);
  }
  return found;
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
      found = plain ? linear_gradients(pass, dy, saved, mask) : *learn(pass.learn, nullptr, gradients, saved, mask);
    }
    found.emplace_back();  // of `which`
    return found;
  }
};

}  // namespace
