"""Build training programs: resolve the arguments of `build_training` against the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.numbers import flag, share, whole
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.bound_inputs import as_json
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.exporters.separate_merged import RestoreMerged
from onnx_convgrad.frontend.files import AnyModel, cloned, copied
from onnx_convgrad.frontend.load import load, load_source
from onnx_convgrad.frontend.metadata import labels_of, outputs_beside, preprocessing_of, states_of
from onnx_convgrad.frontend.parts import chosen_parts, split_parts
from onnx_convgrad.frontend.roles import NoteRoles
from onnx_convgrad.frontend.selection import resolve_wrt
from onnx_convgrad.pipeline.built import target_of
from onnx_convgrad.pipeline.modes import batch_normalizations
from onnx_convgrad.pipeline.options import MemoryLike, Names, Options, TargetLike, Wrt
from onnx_convgrad.programs.graphs import Builder
from onnx_convgrad.programs.optim.layers import layers_of
from onnx_convgrad.programs.optim.named import OptimizerLike, as_optimizer
from onnx_convgrad.programs.plan import ProgramPlan, frozen_nodes, grouped, output_names, parameter_names
from onnx_convgrad.programs.precision import MixedPrecision, PrecisionLike
from onnx_convgrad.programs.privacy import Privacy
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.programs.terms import LossLike, resolve
from onnx_convgrad.surgery.adapters.layers import adapter_names
from onnx_convgrad.surgery.quantization import prepare


@typed_errors
@judged
def build_training(
    model: AnyModel,
    *,
    loss: LossLike,
    optimizer: OptimizerLike,
    wrt: Wrt = "parameters",
    freeze: Names = (),
    outputs: Names | None = None,
    freeze_statistics: bool | Names = False,
    unbiased_variance: bool = True,
    seed: int = 0,
    ema: float | None = None,
    precision: PrecisionLike = "float32",
    quantization: str | None = None,
    privacy: Privacy | None = None,
    sync_batchnorm: bool = False,
    grad_norm: bool | str = False,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> TrainingProgram:
    """Turn an inference model into a training program.

    Args:
        model: As for `onnx_convgrad.augment`.
        loss: Name of a loss, or of a scalar output of the model. Losses are the keys of `programs.terms.LOSSES`, such as
            `"mse"` or `"cross_entropy"`. Or a member of `onnx_convgrad.losses`, a function `(emitter, output, target) ->
            value`, an onnxscript function `(prediction, target) -> loss`; or several, as `{output: loss or (weight, loss)}`,
            whose weights are numbers or schedules.
        optimizer: Name of the optimizer: `"sgd"`, `"adam"`, `"adamw"`, `"rmsprop"`, `"adagrad"`, `"lion"`, `"lamb"` or
            `"muon"`. It has its default options then; a member of `onnx_convgrad.optim` has those given to it.
        wrt: Values to differentiate with respect to: `"parameters"`, or names and globs, which are trained. `"parameters"`
            of a model with adapters (`add_adapters`) are the adapters alone, and all running statistics are kept. A mapping
            from these to output channels, `{"layer3.*": slice(0, 16), "fc.*": slice(None)}`, trains these channels alone:
            gradients and the state of the optimizer have the size of the part, whose name is `<name>[0:16]`. The exported
            model has whole weights.
        freeze: Names and globs of parameters that are not trained.
        outputs: Names and globs of the model's outputs that the graphs have too; all by default.
        freeze_statistics: Keep BatchNormalization in inference mode, with the statistics that it has. All nodes (`True`), or
            those matched by names and globs of nodes, statistics or parameters.
        unbiased_variance: Running variances average variances with the denominator n - 1, as in PyTorch, instead of n.
        seed: Seed of the Dropout masks.
        ema: Exponential moving average of the parameters: average = ema * average + (1 - ema) * parameter. It follows each
            update; the first copies the parameter. The evaluation and the exported model use the average, with the latest
            running statistics. Equal to `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(ema)`, updated
            after each step.
        precision: Type of the computation: `"float32"`, or `"float16"` or `"bfloat16"` for mixed precision. `"float32"`
            means the types of the model; with mixed precision (bfloat16 for CUDA), parameters are float32. Or an
            `onnx_convgrad.MixedPrecision`, with options of the loss scale.
        quantization: Quantization-aware training of a model with quantizers (QuantizeLinear, QLinearConv, QLinearMatMul):
            integer weights become float32 master weights behind their quantizers, and gradients pass quantizers straight
            through. `"qat"` keeps all scales (Jacob et al. 2018); `"lsq"` trains them too, with their gradients divided by
            the root of the number of values times the greatest level (Esser et al. 2020). `"int8"` has no master weights:
            weights of 8 bits stay integers, to which each update is rounded at random (Lin et al. 2022), biases are float32.
            The exported file, at opset 21, stores integers again. `None` trains the float parameters alone.
        privacy: Train with differential privacy, an `onnx_convgrad.Privacy`: gradients are clipped per sample, without being
            kept, and get noise. `Trainer.fit` then draws each batch at random (Poisson sampling) and reports epsilon.
        sync_batchnorm: Let BatchNormalization use the samples of all processes. The ranks (`Trainer(..., distributed=...)`)
            exchange their statistics in every layer, so that they compute what one process does.
        grad_norm: Also compute the norm of all gradients together, before `clip_norm`. It is that of
            `torch.nn.utils.clip_grad_norm_`: of the union of batches and ranks, without the loss scale, with the noise of
            private training. The results of a step and the rows of the history have it as `"grad_norm"`. It takes one more
            reading of the gradients; an optimizer with `clip_norm` computes it anyway, and its programs always have it.
            `"layers"` also has the norm of each layer, without further readings: `"grad_norm.conv1"` of `conv1.weight` and
            `conv1.bias`.
        target: The execution provider that runs the graphs, as for `augment`: a name, or an `onnx_convgrad.Target`, which
            also chooses lowerings.
        memory: How the memory of a step is saved, as for `augment`: a budget, or an `onnx_convgrad.Memory`. Other graphs of
            the program that cannot keep the budget take as little as possible, with a warning.

    Inputs that `onnx_convgrad.load` has bound to constants are missing in the graphs of the program; `inference`, and the
    exported model, have them as before.

    Raises:
        ArgumentError: An unknown name or option.
        ModelError: The model cannot be read or converted to opset 21.
        DifferentiationError: Some nodes cannot be differentiated; all are listed.
        LoweringError: No lowering applies to a convolution, or the forced one does not.

    An onnxscript function as a loss (in a file, since onnxscript reads its source)::

        @onnxscript.script()
        def half_mse(prediction, target):
            error = op.Sub(prediction, target)
            return op.Mul(op.ReduceMean(op.Mul(error, error), keepdims=0), op.CastLike(0.5, error))

        program = onnx_convgrad.build_training("model.onnx", loss=half_mse, optimizer=onnx_convgrad.optim.Adam())
    """
    settings = Options.given(target=target, memory=memory, training=True)
    precision = MixedPrecision.of(precision)
    if precision.dtype == "bfloat16" and settings.target.name != "cuda":
        raise ArgumentError(
            "precision='bfloat16' needs target='cuda': other providers have no bfloat16 products.",
            hint="Use 'float16', which runs everywhere.",
        )
    optimizer = as_optimizer(optimizer)
    loaded = load(model)
    adapters = adapter_names(loaded.source) if wrt == "parameters" else []
    added: list[str] = []
    if quantization is not None:
        source = load_source(loaded.source).canonical
        added = prepare(source, quantization)
        loaded = load_source(source, loaded.input_shapes, loaded.input_values, limits=loaded.limits)
    source, base = copied(loaded.source), cloned(loaded.canonical)
    RestoreMerged()(source)
    if isinstance(wrt, Mapping):
        wrt, parts = chosen_parts(base.graph, wrt)
        split_parts(source.graph, parts)
        split_parts(base.graph, parts)
        NoteRoles()(base)
    wanted = adapters or wrt
    integers = added if quantization == "int8" else []
    if integers:
        _check_integers(wrt, precision.dtype, ema)
    elif added:
        wanted = [*(v.name or "" for v in resolve_wrt(base.graph, wanted, stored=True)), *added]
    parameters = parameter_names(base.graph, wanted, freeze, integers)
    optimizer = grouped(optimizer, base.graph, parameters).fitted(layers_of(base.graph, parameters))
    all_outputs, states = output_names(base.graph, None), states_of(base)
    chosen = output_names(base.graph, outputs)
    plan = ProgramPlan(
        model=replace(loaded, source=source, canonical=base),
        target=target_of(settings),
        options=settings,
        terms=resolve(base.graph, loss, outputs_beside(states, chosen or all_outputs)),
        optimizer=optimizer,
        parameters=parameters,
        outputs=tuple(name for name in all_outputs if name in {*chosen, *states.values()}),
        frozen=frozen_nodes(base.graph, freeze_statistics or bool(adapters)),
        unbiased=unbiased_variance,
        seed=whole(seed, "seed", 0),
        precision=precision,
        quantization=quantization,
        privacy=privacy,
        grad_norm=grad_norm if grad_norm == "layers" else flag(grad_norm, "grad_norm"),
    )
    if privacy is not None:
        _check_private(plan)
    builder = Builder(plan, _recorded(plan, ema, synchronized=flag(sync_batchnorm, "sync_batchnorm")))
    moved = [term.schedule for term in plan.terms if term.schedule is not None]
    program = TrainingProgram(builder.manifest, builder.build, optimizer.schedule, moved)
    if settings.memory.budget is not None:
        program.model("step")  # a budget that is too small is refused now
    return program


def _recorded(plan: ProgramPlan, ema: float | None, *, synchronized: bool) -> dict[str, Any]:
    """The options that the manifest keeps, as JSON values."""
    bound = plan.model.input_values or {}
    options: dict[str, Any] = {
        "target": plan.options.target.name,
        "unbiased_variance": plan.unbiased,
        "seed": plan.seed,
        "precision": plan.precision.dtype,
    }
    if bound:
        options["input_values"] = {name: as_json(value) for name, value in bound.items()}
    if states_of(plan.base):
        options["states"] = states_of(plan.base)
    if plan.quantization is not None:
        options["quantization"] = plan.quantization
    if plan.privacy is not None:
        options["privacy"] = asdict(plan.privacy)
    if synchronized and plan.statistics():
        options["sync_batchnorm"] = True
    if ema is not None:
        share(ema, "ema", one=False)
        options["ema"] = float(ema)
    if plan.precision.scaled:
        kept = {"init_scale", "growth_factor", "backoff_factor", "growth_interval"}
        options["loss_scale"] = {name: value for name, value in asdict(plan.precision).items() if name in kept}
    labels, preprocessing = labels_of(plan.model.source), preprocessing_of(plan.model.source)
    options |= {} if labels is None else {"labels": list(labels)}
    return options | ({} if preprocessing is None else {"preprocessing": asdict(preprocessing)})


def _check_integers(wrt: Wrt, precision: str, ema: float | None) -> None:
    """Raise `ArgumentError` for what updates of integer weights cannot be combined with."""
    if wrt != "parameters" or precision != "float32" or ema is not None:
        raise ArgumentError(
            "quantization='int8' updates all 8-bit weights, in float32, without averages.",
            hint="Leave wrt, precision and ema at their defaults and choose with freeze, or use quantization='qat'.",
        )


def _check_private(plan: ProgramPlan) -> None:
    """Raise `ArgumentError` if a plan cannot be trained with privacy."""
    if not isinstance(plan.privacy, Privacy):
        raise ArgumentError(
            f"privacy takes an onnx_convgrad.Privacy, not {plan.privacy!r}.", hint="For example Privacy(noise=1.0)."
        )
    if any(term.loss is None for term in plan.terms):
        raise ArgumentError(
            "Private training needs the loss of each sample, and a loss that is an output of the model is one number.",
            hint="Give a loss by name, or a function of an output and its labels.",
        )
    mixing = [repr(n.name) for n in batch_normalizations(plan.base.graph) if n.name not in plan.frozen]
    if mixing:
        raise ArgumentError(
            f"Private training is impossible with statistics of the batch, which mix samples: {first_few(mixing)}.",
            hint="Exchange it with onnx_convgrad.transforms.replace_batchnorm(model) (--replace-batchnorm), or keep its "
            "statistics with freeze_statistics=True (--freeze-statistics).",
        )
    if plan.precision.dtype != "float32" or plan.quantization is not None:
        raise ArgumentError(
            "Private training needs precision='float32' and no quantization, so that norms are exact.",
            hint="Leave precision and quantization at their defaults.",
        )
