"""`LayerNormLinear`: the module of that name in TransformerEngine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.fx
import torch.overrides
from torch import Tensor, nn

from ...call import checks as core
from ...linear import problem as linear_problem
from ...operation import name_of
from ..norm.functional import autocast_dtype, autocasts
from ..norm.modules import parameter_of
from ..private import default_device, in_backward_pass, parameters_of, uncompiled
from .call import NOTHING_GIVEN, Given, known, run, run_checked
from .float8 import Float8, WeightCache
from .functional import margins_of
from .parallel import ALONE, TensorParallel, size_of_given
from .parameters import check_mode, check_overlaps, check_sizes, joined, lay_side_by_side, local_features, parts_of
from .recipes import Recipe, recipe_of
from .step import GATHERED, LOCAL, NOTHING
from .weight_gradients import WeightGradients
from .wide import WIDE

INIT_STD = 0.023  # of TransformerEngine's default init_method


class LayerNormLinear(WeightGradients):
    """y = z weightᵀ + bias, z = (x - mean(x)) / sqrt(var(x) + eps) * layer_norm_weight + layer_norm_bias.

    The constructor is that of transformer_engine.pytorch.LayerNormLinear. In FP8 inside `cunorm.torch.autocast` or
    after `set_recipe`.

    Parameters
    ----------
    in_features, out_features : int
    eps : float
        Added to the variance, inside the root.
    sequence_parallel : bool
        With several ranks x has the rows of this rank alone, (rows of all / ranks, ..., in_features), and y those of
        all, in rank order. The gradients of layer_norm_weight and layer_norm_bias are then of the rows of this rank,
        for the trainer to add up over the ranks: their attribute `sequence_parallel` is True.
    fuse_wgrad_accumulation : bool
        The gradient of weight is added to `weight.main_grad` (float32 with 16-bit weights, say) by the product itself,
        and `weight.grad` stays None. `forward(is_first_microbatch=True)` overwrites main_grad instead.
    tp_group : torch.distributed.ProcessGroup, optional
        The ranks over which weight and bias are split. Copies of the module share it, pickles leave it out.
    tp_size : int
        How many. Without a tp_group `set_tensor_parallel_group(group)` must come before the first call; with one, 1
        stands for its size.
    get_rng_state_tracker : callable, optional
        weight is initialised inside `get_rng_state_tracker().fork()`. Without it ranks with one seed begin with the
        same numbers.
    init_method : callable, optional
        Initialises weight, or every part of it. Default: N(0, 0.023).
    bias : bool
    normalization : "LayerNorm" or "RMSNorm"
        The latter is z = x / sqrt(mean(x²) + eps) * layer_norm_weight.
    return_bias : bool
        bias is not added but returned, for whoever adds it later.
    params_dtype : torch.dtype, optional
        Default: torch's default dtype.
    parallel_mode : None or "column"
        "column": each rank has out_features / tp_size rows of weight, and as many features of y. None: whole weights
        and no communication.
    return_layernorm_output : bool
        z is returned too, and its gradient joins that of the product before the backward pass of the norm.
    return_layernorm_output_gathered : bool
        z of all rows instead. Its gradient is summed over the ranks: what all ranks compute alike from it must hand
        over its gradient divided by the number of ranks. Without sequence parallelism the same z.
    parameters_split : sequence of str or dict of str to int, optional
        weight and bias are separate parameters `{name}_weight` and `{name}_bias`, of equal parts or of so many rows.
        They are parts of one tensor and read as one, unless they were laid apart (as by `load_state_dict(assign=True)`)
        or torch.compile sees them: then they are copied together at every call.
    zero_centered_gamma : bool
        Multiply by 1 + layer_norm_weight.
    device
        Of the parameters. By default that of `with torch.device(...)` or `torch.set_default_device`; where there is
        none the GPU, as with TransformerEngine's module, and without a GPU the CPU.
        "meta" is for parameters without memory. `reset_parameters` gives it to them, as TransformerEngine's does; that
        of torch.nn's modules, and of LayerNorm and RMSNorm here, leaves them on "meta".
    ub_overlap_ag : bool
        Forward: rows of z come from the other ranks while those of this one are multiplied.
    ub_bulk_dgrad, ub_bulk_wgrad : bool
        Backward: z comes under the product of its gradient, which is summed over the ranks under that of weight's.
    ub_overlap_rs_dgrad : bool
        Backward: the gradient of z is multiplied rank by rank, and each part sent. Switches the other two off.
    ub_overlap_rs, symmetric_ar_type
        No effect: they are of a row-parallel layer. The latter must be None, "multimem_all_reduce", "two_shot" or
        "one_shot".
    delay_wgrad_compute : bool
        The backward pass leaves the gradients of weight and bias to `backward_dw()`, which with sequence parallelism
        all ranks must call in the same order.
    ub_name, name : str, optional
        Labels.
    keep_normalized : bool
        Keep z for the backward pass instead of computing it once more from x: as much memory as x takes, for the time
        of one forward pass of the norm. With sequence parallelism z of all rows, which is then not gathered again. In
        FP8 nothing more is kept. Not an argument of TransformerEngine's.
    sm_margin : int or dict
        Multiprocessors that the norm's kernels leave to other work, such as communication; a dict has any of the keys
        `forward`, `backward` and `inference`, as in `LayerNorm`. What the backward pass computes once more belongs to
        it. TransformerEngine's module takes them from the environment, NVTE_FWD_LAYERNORM_SM_MARGIN,
        NVTE_BWD_LAYERNORM_SM_MARGIN and NVTE_INF_LAYERNORM_SM_MARGIN, which are not read here.

    Attributes
    ----------
    layer_norm_weight, layer_norm_bias : Parameter, shape (in_features,)
        1 (0 if zero-centred) and 0 at first. `layer_norm_bias` is None for an RMSNorm.
    out_features : int
        Of this rank, as of the shapes here.
    weight : Parameter, shape (out_features, in_features)
    bias : Parameter, shape (out_features,)
        0 at first. An empty tensor that is no parameter with `bias=False`.
    fp8_recipe : RowwiseScaling, Float8CurrentScaling or None
        What `set_recipe` has set.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument, or of `forward` an input, that does not fit; of TransformerEngine's types where those are not
        assertions. ValueError on every rank if their rows or dtypes differ, or if gradients are enabled on some of them
        alone, which a module's first calls without and with gradients enabled look for, and with
        TORCH_DISTRIBUTED_DEBUG=DETAIL every call. ValueError on one rank if tp_group has another size than a tp_size
        other than 1.
    NotImplementedError
        parallel_mode="row" (a norm cannot be split along its row), and what is not here yet.

    Notes
    -----
    Where TransformerEngine's differs: its float32 product is TF32 always, this one's where torch is set so; it keeps z;
    it casts x to autocast's dtype before the norm; its `backward_dw` overwrites `weight.grad`, this one's adds to it;
    it takes parameters_split together with neither fuse_wgrad_accumulation nor backward_dw. Its `_extra_state` in a
    checkpoint is passed over unread; it loads ours with strict=False. Accumulating into main_grad, delaying and, in
    FP8, is_first_microbatch and fp8_output break a graph of torch.compile; else compiled code finds the bytes of weight
    at every call.

    Ranks may differ in what requires a gradient. They tell each other in the first call with gradients enabled; in a
    backward pass each takes part in what any of them needs, and drops what it does not need itself. So its y requires a
    gradient, and its backward pass must run. Later a rank may need less; one that needs more than any did before asks
    the others, which must need more in the same call. `set_tensor_parallel_group` on all ranks begins anew. Under
    torch.compile and with DTensors they must not differ.

    In FP8 in_features and out_features must be multiples of 16, rows may be any number. The bytes of a weight that
    requires no gradient are kept from call to call, and so are those of any weight in calls without gradients after
    `eval()`, as long as the parameter is the same tensor in the same memory with the same version. In training mode
    and after a call that is differentiated by weight they are not: a fused optimizer changes no version. Nor does
    `weight.data.copy_()`, which needs `drop_fp8_weights()` after it; `train()`, `eval()`, `load_state_dict()` and
    moving the module call that too. A CUDA graph reads kept bytes with is_first_microbatch=False, for as long as the
    module is there, and else finds them again in every replay. Nothing of it is in the state_dict, in copies or in
    pickles.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import LayerNormLinear
    >>> LayerNormLinear(8, 24, parameters_split=("query", "key", "value"), device="cpu")(torch.ones(2, 8)).shape
    torch.Size([2, 24])
    """

    fp8_recipe: Recipe | None = None
    sm_margin: int | Mapping[str, int] = 0  # of modules that were pickled before there was one
    _fp8_outside: Recipe | bool | None = False  # of the last call outside a backward pass; False: there was none

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        keep_normalized: bool = False,
        sm_margin: int | Mapping[str, int] = 0,
    ):
        super().__init__(fuse_wgrad_accumulation, delay_wgrad_compute)
        check_sizes(in_features=in_features, out_features=out_features)
        core.check_eps("LayerNormLinear", eps)
        self.op = linear_problem.op("LayerNormLinear", normalization, None)
        check_mode(parallel_mode)
        check_sizes(tp_size=tp_size)
        check_overlaps(symmetric_ar_type, delay_wgrad_compute, ub_bulk_wgrad)
        if tp_group is not None:
            tp_size = size_of_given(tp_group, tp_size)
        self.in_features = in_features
        self.out_features = local_features(out_features, parallel_mode, tp_size)
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.use_bias = bias
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.parallel_mode = parallel_mode
        self._parallel = TensorParallel(
            parallel_mode,
            tp_size,
            sequence_parallel,
            delay_wgrad_compute,
            {
                "overlap_gather": ub_overlap_ag,
                "bulk_gather": ub_bulk_dgrad and not ub_overlap_rs_dgrad,
                "bulk_sum": ub_bulk_wgrad and not ub_overlap_rs_dgrad,
                "overlap_sum": ub_overlap_rs_dgrad,
            },
        )
        if tp_group is not None:
            self._parallel.set_group(tp_group)
        self.tp_size = tp_size
        self.sequence_parallel = self._parallel.sequence
        self._over_ranks = self._parallel.exchanges
        self.get_rng_state_tracker = get_rng_state_tracker
        self.init_method = init_method
        self.ub_name = ub_name
        self.name = name
        self.keep_normalized = keep_normalized
        margins_of("LayerNormLinear", sm_margin)
        self.sm_margin = dict(sm_margin) if isinstance(sm_margin, Mapping) else int(sm_margin)

        self._fp8_weights = WeightCache(self.training)
        self._parts = parts_of(parameters_split, out_features, out_features // self.out_features)
        self._make_parameters((default_device() or _own_device()) if device is None else device, params_dtype)
        if not self.layer_norm_weight.is_meta:
            self.reset_parameters()

    def _make_parameters(self, device: Any, dtype: torch.dtype | None) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        self.layer_norm_weight = nn.Parameter(empty(self.in_features))
        layer_norm = self.normalization == "LayerNorm"
        self.register_parameter("layer_norm_bias", nn.Parameter(empty(self.in_features)) if layer_norm else None)
        sizes = [part.rows for part in self._parts]
        for part, weight in zip(self._parts, empty(self.out_features, self.in_features).split(sizes), strict=True):
            self.register_parameter(part.weight, nn.Parameter(weight))
        for part, bias in zip(self._parts, empty(self.out_features).split(sizes), strict=True):
            if self.use_bias:
                self.register_parameter(part.bias, nn.Parameter(bias))
            else:
                self.register_buffer(part.bias, empty(0), persistent=False)
        self._settle_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters; those without memory get it on the GPU, or without one on the CPU."""
        if self.layer_norm_weight.is_meta:
            self._make_parameters(_own_device(), self.layer_norm_weight.dtype)
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        fork = nullcontext if self.get_rng_state_tracker is None else self.get_rng_state_tracker().fork
        init = self.init_method or partial(nn.init.normal_, mean=0.0, std=INIT_STD)
        with torch.no_grad(), fork():
            for weight in self._weights:
                init(weight)
        for bias in self._biases:
            nn.init.zeros_(bias)
        self._settle_parameters()

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """Return y, or (y, bias), (y, z), (y, bias, z) as `return_bias` and `return_layernorm_output` ask for.

        Parameters
        ----------
        inp : Tensor, shape (..., in_features)
            Of the dtype of the parameters; under autocast float16, bfloat16 or float32.
        is_first_microbatch : bool, optional
            With fuse_wgrad_accumulation, True overwrites main_grad, and False and None add to it. In FP8 None finds the
            bytes of weight anew (but for what the Notes say), True keeps them besides, and False takes those
            that are kept, whatever weight has become.
        fp8_output : bool
            y as (bytes in torch.float8_e4m3fn, a float32 scale for each row). In FP8 and without gradients alone.
        fp8_grad : bool
            Not here: a gradient in 8 bits is for TransformerEngine's own attention.

        Returns
        -------
        y : Tensor, shape (..., out_features)
        bias : Tensor, shape (out_features,), of the dtype of y; empty with `bias=False`
        z : Tensor, shape of inp, of the dtype of y
        """
        if fp8_grad:
            raise ValueError(
                "LayerNormLinear: fp8_grad must be False; got True. Gradients in 8 bits are not here: leave it out."
            )
        compiling = torch.compiler.is_compiling()
        recipe = recipe_of(self.fp8_recipe)
        # In a backward pass, where a checkpoint runs it again, a call follows what it followed before.
        again = not compiling and self._fp8_outside is not recipe and in_backward_pass()
        if again and self._fp8_outside is not False:
            recipe = self._fp8_outside
        if fp8_output and recipe is None:
            raise ValueError(
                "LayerNormLinear: fp8_output=True needs FP8; got a call without a recipe. Call it in "
                "cunorm.torch.autocast(), or after set_recipe()."
            )
        if compiling:
            broken = self.fuse_wgrad_accumulation or self.delay_wgrad_compute or fp8_output
            broken = broken or (recipe and (self._over_ranks or is_first_microbatch is not None))
            run_it = self._run_uncompiled if broken else self._run
            return run_it(inp, is_first_microbatch, recipe, fp8_output)
        if isinstance(inp, torch.fx.Proxy) and (path := inp.tracer.path_of_module(self)):
            # A leaf of torch.fx.symbolic_trace, as torch.nn's modules: what a call follows is known when it runs.
            options = {"is_first_microbatch": is_first_microbatch, "fp8_output": fp8_output}
            return inp.tracer.create_proxy("call_module", path, (inp,), options)
        results = self._run(inp, is_first_microbatch, recipe, fp8_output)
        if not again and self._fp8_outside is not recipe:
            self._fp8_outside = recipe
        return results

    def _run(self, inp: Tensor, is_first_microbatch: bool | None, recipe: Recipe | None, fp8_output: bool) -> Any:
        parallel = self._parallel if self._over_ranks else ALONE
        of_norm = parameter_of(self, "layer_norm_weight"), parameter_of(self, "layer_norm_bias")
        weights, biases, of_norm = parallel.local(self._weights, self._biases, of_norm)
        bias = joined(biases) if biases else None
        inputs = (inp, joined(weights), None if self.return_bias else bias, *of_norm)
        returned = NOTHING
        if self.return_layernorm_output:
            gathered = self.return_layernorm_output_gathered and self._over_ranks and self.sequence_parallel
            returned = GATHERED if gathered else LOCAL
        layer = (  # a Layer of call.py, which as a plain tuple takes the host less
            type(self).__name__,
            name_of(self.op, self.zero_centered_gamma),
            self.eps,
            self.keep_normalized,
            margins_of(type(self).__name__, self.sm_margin),
            returned,
            WIDE if recipe is None else Float8(recipe.scheme),
            parallel.ranks(),
        )
        sink, given = self._sink(is_first_microbatch), NOTHING_GIVEN
        if recipe is not None or sink is not None or self._over_ranks:
            kept = None if recipe is None else partial(self._fp8_weights.of, weights, is_first_microbatch)
            given = Given(parallel, kept, fp8_output, sink)
        call = known(layer, inputs)
        if call is None:
            self._check_dtypes(inp)
            y, z, _ = run_checked(layer, inputs, given)
        else:
            y, z, _ = run(call, inputs, given)
        if not self.return_bias:
            return (y, z) if self.return_layernorm_output else y
        dtype = autocast_dtype(inp) or inp.dtype
        bias = inp.new_empty(0, dtype=dtype) if bias is None else bias.to(dtype)
        return (y, bias, z) if self.return_layernorm_output else (y, bias)

    @property
    def tp_group(self) -> Any:
        return self._parallel.group

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks over which it runs, again whenever they are new, on all of them before any calls the module.

        Raises
        ------
        ValueError
            A group of another size than tp_size, or one that this process is not in.
        RuntimeError
            torch.distributed has no process group yet.
        """
        self._parallel.set_group(tp_group)

    _run_uncompiled = uncompiled(_run)

    def drop_fp8_weights(self) -> None:
        """Forget the bytes of weight that are kept, as is needed after `weight.data.copy_()`."""
        self._fp8_weights.clear()

    def train(self, mode: bool = True) -> LayerNormLinear:
        self.drop_fp8_weights()
        self._fp8_weights.trains = mode
        return super().train(mode)

    def _check_dtypes(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise TypeError(f"LayerNormLinear: inp must be a torch.Tensor; got {type(inp).__name__}.")
        if autocasts(inp.device.type):
            return
        for name, parameter in parameters_of(self).items():
            if parameter is not None and parameter.dtype is not inp.dtype:
                raise TypeError(
                    f"LayerNormLinear: outside autocast inp and the parameters must have one dtype; got inp of "
                    f"{inp.dtype} and {name} of {parameter.dtype}. Convert one of them, or use torch.autocast."
                )

    # Parameters.

    def _settle_parameters(self) -> None:
        """Lay parts side by side and set the attributes by which Megatron knows what is sharded how."""
        lay_side_by_side(self._weights)
        if self.use_bias:
            lay_side_by_side(self._biases)
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel
        sharded = [*self._weights, *(self._biases if self.parallel_mode == "column" else [])]
        for parameter in sharded:
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 0
            parameter.partition_stride = 1
        if self.delay_wgrad_compute:
            for parameter in (*self._weights, *self._biases):
                parameter.skip_backward_post_hook = True

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._settle_parameters()  # they may be new ones, and lie apart
        self.drop_fp8_weights()
        return self

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_fp8_weights"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self._fp8_weights = WeightCache(self.training)
        self._settle_parameters()  # those of a copy are

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict.pop(prefix + "_extra_state", None)  # TransformerEngine's: scales, perhaps pickled, of no use here
        self.drop_fp8_weights()
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}"
        )


def _own_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
