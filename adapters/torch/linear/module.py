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
from ...linear import checks as linear_checks
from ...operation import name_of
from ..norm import checks
from ..norm.functional import autocast_dtype, autocasts
from ..norm.modules import parameter_of
from ..private import default_device, in_backward_pass, parameters_of, uncompiled
from .call import NOTHING_GIVEN, Given, known, run, run_checked
from .float8 import Float8, WeightCache
from .parallel import ALONE, TensorParallel, size_of_given
from .parameters import check_mode, check_overlaps, check_sizes, joined, lay_side_by_side, local_features, parts_of
from .recipes import Recipe, recipe_of
from .step import GATHERED, LOCAL, NOTHING
from .weight_gradients import WeightGradients
from .wide import WIDE

INIT_STD = 0.023  # of TransformerEngine's default init_method


class LayerNormLinear(WeightGradients):
    """y = z weightᵀ + bias, z = (x - mean(x)) / sqrt(var(x) + eps) * layer_norm_weight + layer_norm_bias.

    The constructor is that of transformer_engine.pytorch.LayerNormLinear. Inside `cunorm.torch.autocast` or after
    `set_recipe` the products are in FP8.

    Parameters
    ----------
    in_features, out_features : int
    eps : float
        Added to the variance, inside the root.
    sequence_parallel : bool
        With several ranks x has the rows of this rank alone, (rows of all / ranks, ..., in_features), and y has those
        of all ranks, in rank order. The gradients of layer_norm_weight and layer_norm_bias are then those of the rows
        of this rank, and the trainer must add them up over the ranks: their attribute `sequence_parallel` is True.
    fuse_wgrad_accumulation : bool
        The product itself adds the gradient of weight to `weight.main_grad`, which may be float32 with 16-bit weights,
        and `weight.grad` stays None. `forward(is_first_microbatch=True)` overwrites main_grad instead.
    tp_group : torch.distributed.ProcessGroup, optional
        The ranks over which weight and bias are split. Copies of the module share it, and pickles leave it out.
    tp_size : int
        The number of these ranks. Without a tp_group `set_tensor_parallel_group(group)` must be called before the first
        call; with a tp_group, 1 stands for its size.
    get_rng_state_tracker : callable, optional
        weight is initialised inside `get_rng_state_tracker().fork()`. Without it ranks with the same seed begin with
        the same numbers.
    init_method : callable, optional
        It initialises weight, or every part of it. The default is N(0, 0.023).
    bias : bool
        Whether there is a bias.
    normalization : "LayerNorm" or "RMSNorm"
        The latter is z = x / sqrt(mean(x²) + eps) * layer_norm_weight.
    return_bias : bool
        Return bias instead of adding it, so that the caller can add it later.
    params_dtype : torch.dtype, optional
        The dtype of the parameters; the default is torch's default dtype.
    parallel_mode : None or "column"
        With "column" each rank has out_features / tp_size rows of weight, and as many features of y. With None it has
        all of them, and nothing is communicated.
    return_layernorm_output : bool
        Return z too. Its gradient is added to that of the product before the backward pass of the norm.
    return_layernorm_output_gathered : bool
        Return z of all rows instead. Its gradient is summed over the ranks: if all ranks compute the same from it, they
        must divide its gradient by the number of ranks. Without sequence parallelism z is the same on all ranks.
    parameters_split : sequence of str or dict of str to int, optional
        weight and bias are separate parameters `{name}_weight` and `{name}_bias`, of equal parts or of so many rows.
        They are views of one tensor and read as one. They are copied together in every call if they do not lie side by
        side in memory, as after `load_state_dict(assign=True)`, and under torch.compile.
    zero_centered_gamma : bool
        Multiply by 1 + layer_norm_weight.
    device
        The device of the parameters. The default is that of `with torch.device(...)` or `torch.set_default_device`,
        else the GPU, as with TransformerEngine's module, or the CPU if there is no GPU. On "meta" parameters have no
        memory. `reset_parameters` gives it to them, as TransformerEngine's does; that of torch.nn's modules, and of
        LayerNorm and RMSNorm here, leaves them on "meta".
    ub_overlap_ag : bool
        In the forward pass rows of z come from the other ranks while those of this rank are multiplied.
    ub_bulk_dgrad, ub_bulk_wgrad : bool
        In the backward pass z is gathered during the product of its gradient, and the gradient of z is summed over the
        ranks during the product of weight's gradient.
    ub_overlap_rs_dgrad : bool
        In the backward pass the gradient of z is computed rank by rank, and each part is sent at once. This switches
        the other two off.
    ub_overlap_rs, symmetric_ar_type
        These have no effect, as they belong to a row-parallel layer. The latter must be None, "multimem_all_reduce",
        "two_shot" or "one_shot".
    delay_wgrad_compute : bool
        The backward pass leaves the gradients of weight and bias to `backward_dw()`, which with sequence parallelism
        all ranks must call in the same order.
    ub_name, name : str, optional
        Labels.
    keep_normalized : bool
        Keep z for the backward pass instead of computing it once more from x. This takes as much memory as x, and saves
        the time of one forward pass of the norm. With sequence parallelism z of all rows is kept, and not gathered
        again. In FP8 nothing more is kept. TransformerEngine's module does not have this argument.
    sm_margin : int or dict
        The norm's kernels leave this many multiprocessors to other work, such as communication; a dict has any of the
        keys `forward`, `backward` and `inference`, as in `LayerNorm`. If the backward pass computes z once more, the
        margin of the backward pass holds. TransformerEngine's module takes the margins from the environment variables
        NVTE_FWD_LAYERNORM_SM_MARGIN, NVTE_BWD_LAYERNORM_SM_MARGIN and NVTE_INF_LAYERNORM_SM_MARGIN, which are not read
        here.

    Attributes
    ----------
    layer_norm_weight, layer_norm_bias : Parameter, shape (in_features,)
        They begin as 1 (0 with zero_centered_gamma) and 0. `layer_norm_bias` is None for an RMSNorm.
    out_features : int
        The number of features of this rank, as in all shapes here.
    weight : Parameter, shape (out_features, in_features)
    bias : Parameter, shape (out_features,)
        It begins as 0. With `bias=False` it is an empty tensor that is no parameter.
    fp8_recipe : RowwiseScaling, Float8CurrentScaling or None
        The recipe that `set_recipe` has set.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        If an argument, or an input of `forward`, does not fit; the types are TransformerEngine's unless those are
        assertions. Every rank raises ValueError if the rows or dtypes of ranks differ, or if gradients are enabled on
        some ranks alone. The ranks compare these in a module's first calls without and with gradients enabled, and with
        TORCH_DISTRIBUTED_DEBUG=DETAIL in every call. One rank raises ValueError if tp_group has another size than a
        tp_size other than 1.
    NotImplementedError
        If parallel_mode is "row", as a norm cannot be split along its row, or an option is not supported yet.

    Notes
    -----
    TransformerEngine's module differs in this: its float32 product is always TF32, this one's is if torch
    is set so; it keeps z; it casts x to autocast's dtype before the norm; its `backward_dw` overwrites `weight.grad`,
    this one's adds to it; it takes parameters_split neither with fuse_wgrad_accumulation nor with backward_dw. Its
    `_extra_state` in a checkpoint is not read here; it loads our checkpoints with strict=False.
    fuse_wgrad_accumulation, delay_wgrad_compute and, in FP8, is_first_microbatch and fp8_output break a graph of
    torch.compile. Compiled code casts weight to FP8 in every call.

    Ranks may require different gradients. They tell each other in the first call with gradients enabled. In a backward
    pass each rank takes part in what any of them needs, and drops what it does not need itself. So its y requires a
    gradient, and its backward pass must run. Later a rank may need less. A rank that needs more than any rank did
    before asks the others, which must then need more in the same call. `set_tensor_parallel_group` on all ranks begins
    anew. Under torch.compile and with DTensors the ranks must require the same gradients.

    In FP8 in_features and out_features must be multiples of 16; the number of rows may be any. The bytes of a weight
    that requires no gradient are kept from call to call, and so are those of any weight in calls without gradients
    after `eval()`, while the parameter is the same tensor in the same memory with the same version. In training mode
    and after a call that is differentiated by weight they are not kept, because a fused optimizer changes no version.
    `weight.data.copy_()` changes none either, and needs `drop_fp8_weights()` after it; `train()`, `eval()`,
    `load_state_dict()` and moving the module call that too. A CUDA graph reads kept bytes with
    is_first_microbatch=False while the module exists, and else casts weight in every replay. The bytes are not in the
    state_dict, in copies or in pickles.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import LayerNormLinear
    >>> LayerNormLinear(8, 24, parameters_split=("query", "key", "value"), device="cpu")(torch.ones(2, 8)).shape
    torch.Size([2, 24])
    """

    fp8_recipe: Recipe | None = None
    sm_margin: int | Mapping[str, int] = 0  # for modules that were pickled before there was one
    _fp8_outside: Recipe | bool | None = False  # the recipe of the last call outside a backward pass; False for no call

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
        self.op = linear_checks.op("LayerNormLinear", normalization, None)
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
        checks.sm_margins("LayerNormLinear", sm_margin)
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
        """Initialise all parameters; those without memory get it on the GPU, or on the CPU if there is no GPU."""
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
        """Return y, or (y, bias), (y, z) or (y, bias, z), as `return_bias` and `return_layernorm_output` say.

        Parameters
        ----------
        inp : Tensor, shape (..., in_features)
            It has the dtype of the parameters; under autocast it may be float16, bfloat16 or float32.
        is_first_microbatch : bool, optional
            With fuse_wgrad_accumulation, True overwrites main_grad, and False and None add to it. In FP8 None casts
            weight (except as the Notes say), True also keeps the bytes, and False takes the bytes that were kept, even
            if weight has changed.
        fp8_output : bool
            Return y as (bytes in torch.float8_e4m3fn, a float32 scale for each row), in FP8 and without gradients.
        fp8_grad : bool
            This must be False: gradients in 8 bits are for TransformerEngine's own attention.

        Returns
        -------
        y : Tensor, shape (..., out_features)
        bias : Tensor, shape (out_features,), in the dtype of y; empty with `bias=False`
        z : Tensor, shape of inp, in the dtype of y
        """
        if fp8_grad:
            raise ValueError(
                "LayerNormLinear: fp8_grad must be False; got True. Gradients in 8 bits are not here: leave it out."
            )
        compiling = torch.compiler.is_compiling()
        recipe = recipe_of(self.fp8_recipe)
        # A checkpoint runs a call again in the backward pass, where it follows the recipe that it followed before.
        is_rerun = not compiling and self._fp8_outside is not recipe and in_backward_pass()
        if is_rerun and self._fp8_outside is not False:
            recipe = self._fp8_outside
        if fp8_output and recipe is None:
            raise ValueError(
                "LayerNormLinear: fp8_output=True needs FP8; got a call without a recipe. Call it in "
                "cunorm.torch.autocast(), or after set_recipe()."
            )
        if compiling:
            breaks_graph = self.fuse_wgrad_accumulation or self.delay_wgrad_compute or fp8_output
            breaks_graph = breaks_graph or (recipe and (self._over_ranks or is_first_microbatch is not None))
            run_module = self._run_uncompiled if breaks_graph else self._run
            return run_module(inp, is_first_microbatch, recipe, fp8_output)
        if isinstance(inp, torch.fx.Proxy) and (path := inp.tracer.path_of_module(self)):
            # A leaf of torch.fx.symbolic_trace, as torch.nn's modules are: its recipe is known when it runs.
            options = {"is_first_microbatch": is_first_microbatch, "fp8_output": fp8_output}
            return inp.tracer.create_proxy("call_module", path, (inp,), options)
        results = self._run(inp, is_first_microbatch, recipe, fp8_output)
        if not is_rerun and self._fp8_outside is not recipe:
            self._fp8_outside = recipe
        return results

    def _run(self, inp: Tensor, is_first_microbatch: bool | None, recipe: Recipe | None, fp8_output: bool) -> Any:
        parallel = self._parallel if self._over_ranks else ALONE
        norm_parameters = parameter_of(self, "layer_norm_weight"), parameter_of(self, "layer_norm_bias")
        weights, biases = self._weights, self._biases
        if parallel.local is not None:
            weights, biases, norm_parameters = parallel.local(weights, biases, norm_parameters)
        bias = joined(biases) if biases else None
        inputs = (inp, joined(weights), None if self.return_bias else bias, *norm_parameters)
        returned = NOTHING
        if self.return_layernorm_output:
            gathered = self.return_layernorm_output_gathered and self._over_ranks and self.sequence_parallel
            returned = GATHERED if gathered else LOCAL
        layer = (  # a Layer of call.py; a plain tuple takes the host less time
            type(self).__name__,
            name_of(self.op, self.zero_centered_gamma),
            self.eps,
            self.keep_normalized,
            checks.sm_margins(type(self).__name__, self.sm_margin),
            returned,
            WIDE if recipe is None else Float8(recipe.scheme),
            parallel.ranks(),
        )
        sink, given = self._sink(is_first_microbatch), NOTHING_GIVEN
        if recipe is not None or sink is not None or self._over_ranks:
            cached_weights = None if recipe is None else partial(self._fp8_weights.of, weights, is_first_microbatch)
            given = Given(parallel, cached_weights, fp8_output, sink)
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
        """Set the ranks over which the module runs, on all of them before any of them calls the module.

        Raises
        ------
        ValueError
            If the group has another size than tp_size, or this process is not in it.
        RuntimeError
            If torch.distributed has no process group yet.
        """
        self._parallel.set_group(tp_group)

    _run_uncompiled = uncompiled(_run)

    def drop_fp8_weights(self) -> None:
        """Forget the FP8 bytes of weight that are kept, as is needed after `weight.data.copy_()`."""
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
        """Lay parts side by side, and set the attributes that tell Megatron how parameters are sharded."""
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
        self._settle_parameters()  # they may be new, and lie apart
        self.drop_fp8_weights()
        return self

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_fp8_weights"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self._fp8_weights = WeightCache(self.training)
        self._settle_parameters()  # those of a copy are new too

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict.pop(prefix + "_extra_state", None)  # TransformerEngine's scales have no use here
        self.drop_fp8_weights()
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}"
        )


def _own_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
