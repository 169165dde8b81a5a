"""The trainer: runs a training program in a stock ONNX Runtime, with its values on the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.numbers import flag, positive, whole
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.data.batches import DataLike, Loader, as_batches, split_off
from onnx_convgrad.data.checks import check_batch
from onnx_convgrad.data.inputs import STATE_ROWS, Batch, BatchLike, ProgramInputs
from onnx_convgrad.data.poisson import PoissonLoader
from onnx_convgrad.data.sample_weights import ClassWeight
from onnx_convgrad.data.shards import is_empty
from onnx_convgrad.distributed.connect import Distributed, connect
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.metadata import Preprocessing, outputs_beside
from onnx_convgrad.metrics.batch_weights import samples
from onnx_convgrad.metrics.named import MetricLike, resolve_metrics
from onnx_convgrad.metrics.progress import Progress
from onnx_convgrad.programs.inference import export
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.optim.schedules import Schedule
from onnx_convgrad.programs.privacy import EXPECTED, private_options
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.surgery.adapters.files import write_adapters
from onnx_convgrad.training.callbacks import Callback
from onnx_convgrad.training.checkpoint import restore, save
from onnx_convgrad.training.display import display_named
from onnx_convgrad.training.divergence import SkippedSteps
from onnx_convgrad.training.engine import Results
from onnx_convgrad.training.engines import engine_of
from onnx_convgrad.training.export_check import check_export, few_samples
from onnx_convgrad.training.fit import TrainingRun, check_callbacks, evaluate, tell_of_data, tell_of_epochs
from onnx_convgrad.training.learning_rates import (
    LearningRates,
    find_learning_rate,
    rate_at,
    schedule_of,
    term_weights,
)
from onnx_convgrad.training.prediction import predict
from onnx_convgrad.training.stream_states import StreamStates, carrying
from onnx_convgrad.training.summary import Summary, summarize
from onnx_convgrad.training.values import (
    adapter_values,
    arrays_to_load,
    model_values,
    tell_fresh,
    tell_limited,
    trained_values,
)


@typed_errors
class Trainer:
    """Trains a program in ONNX Runtime sessions. Parameters and state stay on the device of the first provider.

    Args:
        program: The program, or the folder that it was saved to.
        providers: Execution providers, the preferred one first: `"cpu"`, `"cuda"`, `"cuda:1"`, ... Or as in
            `onnxruntime.InferenceSession`; the CPU by default.
        seed: Decides the order of the data in `fit` and, unless it is 0, the masks of Dropout, together with the
            program's own seed.
        schedule: Learning rate, or number of finished updates -> learning rate; by default that of the optimizer.
        options: Session options: `SessionOptions`, or a mapping with some of its attributes, such as `{"threads": 2}`.
        distributed: Train on several processes: `"mpi"` for those that mpiexec has started, `"torch"` for those of torchrun,
            `"auto"` for either, or a communicator (`onnx_convgrad.distributed.Communicator`). Every process makes the same
            calls. `fit` and `evaluate` take the same data on all, and each computes its shard of every batch; `step` takes
            each one's own samples. Rank 0 writes files.
        shard_optimizer: Divide the optimizer's state among the processes. It is ZeRO, stage 1: each holds and updates a
            part, and `state` and `save` collect it. The results are the same.

    Attributes:
        engine: Sessions and values.
        inputs: Converts batches to the inputs of the program.
        progress: Numbers of updates and epochs, position in the epoch, history.
        sample: A few samples of the first batch, to check exported files with.
        labels: Names of the classes by number: those of the model's file, or of the folder of images that `fit` was given.
        preprocessing: The way from images to inputs, from the same source. `export` writes both into the metadata.
        privacy: Options of private training, or `None`.
        expected: Samples that an update of private training is expected to have, as `fit` sets it while it runs.
        restored: Whether a checkpoint was restored and no run has begun since.
        ranks: The processes of `distributed`: `rank`, `size`, and `leader`, which is true on rank 0.

    Raises:
        ArgumentError: A loaded program has a schedule of a custom class: pass `schedule`. Or the ranks have different
            programs, seeds or versions.
        ExecutionError: The runtime, a provider or the engine of `distributed` is missing.
        ModelError: The folder holds no program.
    """

    def __init__(
        self,
        program: TrainingProgram | str | os.PathLike[str],
        providers: Providers | None = None,
        seed: int = 0,
        *,
        schedule: Schedule | Callable[[int], float] | float | None = None,
        options: SessionOptionsLike | None = None,
        distributed: Distributed = None,
        shard_optimizer: bool = False,
    ) -> None:
        if not isinstance(program, (TrainingProgram, str, os.PathLike)):
            raise ArgumentError(
                f"A Trainer takes a training program or the folder of one, not {type(program).__name__}.",
                hint="Build a program from a model with onnx_convgrad.build_training.",
            )
        self.program = program if isinstance(program, TrainingProgram) else TrainingProgram.load(program)
        self.manifest = self.program.manifest
        self.schedule = schedule_of(self.program, schedule)
        seed = whole(seed, "seed", 0)
        self.progress, self.ranks = Progress(), Ranks(connect(distributed))
        self.engine = engine_of(
            self.program, self.schedule, seed, providers, options, self.ranks, shard_optimizer=shard_optimizer
        )
        self.inputs = ProgramInputs(self.manifest)
        self.labels = self.manifest.labels
        self.skipped = SkippedSteps(self.engine)
        self.sample: Batch | None = None
        self.privacy = private_options(self.manifest)
        self.expected: float | None = None
        self.restored = False
        self._run: TrainingRun | None = None
        self._weigh_terms()

    @property
    def seed(self) -> int:
        """The seed that was given, or that of the checkpoint that was restored."""
        return self.engine.seed

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The way from images to inputs, if it is known; arrays of pixels (uint8) are scaled by it."""
        return self.inputs.preprocessing

    @preprocessing.setter
    def preprocessing(self, preprocessing: Preprocessing | None) -> None:
        self.inputs.preprocessing = preprocessing

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, batch: BatchLike, *more: BatchLike, outputs: Sequence[str] | None = None) -> Results:
        """Update once, from one batch or from the union of several.

        The gradients of several batches are computed one batch at a time and averaged, each weighted by its share in the
        loss of the union; running statistics and random state are updated by each batch. Of several ranks, each gives its
        own batches, the same number of them; one without samples is `{}`. Running statistics are averaged over the ranks.

        Args:
            batch: Mapping from input to array, or a sequence: the data, then the labels. Arrays are cast to the types of
                the inputs unless integers would change.
            more: Further batches.
            outputs: Outputs of the model to return; by default all outputs of the program.

        Returns:
            `"loss"`, the terms of a loss that has several, the outputs, concatenated over the batches, and `"grad_norm"` if
            the program has it (`build_training(grad_norm=True)`, or an optimizer with `clip_norm`). Of several ranks: the
            losses of all, and the outputs of this one's samples.

        Raises:
            ArgumentError: Arrays are missing, do not fit, or have no input although they would change the loss.
            DivergenceError: With precision="float16", the last steps changed no parameter, because every gradient overflows.
        """
        names, rate = self._result_names(outputs), self.learning_rate
        self._weigh_terms()
        batches = list(map(self._checked, (batch, *more)))
        states = StreamStates(self.manifest, self.progress.states)
        batches = list(map(states.fed, self._one_if_states(batches)))
        if self.sample is None and batches[0]:
            self.sample = few_samples(self.inputs, batches[0])
        if self.privacy is not None:
            self._write_expected(batches)
        results = self.engine.step(batches, rate, (*states.with_states(names), *self.manifest.grad_norms().values()))
        results = states.taken(results, names)
        self.progress.steps += 1
        self.skipped.count()
        return self._renamed(results)

    def gradients(self, batch: BatchLike, *more: BatchLike) -> dict[str, np.ndarray]:
        """The gradients by name of the parameter with which `step` would update from the same batches; nothing changes.

        They are those of the loss of the union, in training mode, without loss scale, before any clipping. Of several
        ranks, all call this, and get the gradients of the batches of all.

        Args:
            batch: As for `step`.
            more: Further batches.

        Raises:
            ArgumentError: The arrays do not fit, as for `step`, or training is private: these would have no noise.
        """
        if self.privacy is not None:
            raise ArgumentError(
                "A program for private training does not give its gradients: they would lack the noise.",
                hint="Build one without privacy to look at gradients.",
            )
        self._weigh_terms()
        states = StreamStates(self.manifest, self.progress.states)
        return self.engine.gradients(list(map(states.fed, self._one_if_states(map(self._checked, (batch, *more))))))

    def _one_if_states(self, batches: Iterable[Batch]) -> list[Batch]:
        """The batches; several are refused unless they have their states, since each would begin where the last one ends."""
        several = list(batches)
        lacking = [name for name in self.manifest.states for batch in several if name not in batch]
        if len(several) > 1 and lacking:
            raise ArgumentError(
                f"An update has {len(several)} batches, and the model has the state {lacking[0]!r}: the second batch would "
                "continue the streams of the first.",
                hint="Give one batch for each update (accumulate=1), of more streams; or give each batch its states.",
            )
        return several

    def reset_states(self) -> None:
        """Let all streams begin anew: the states of the next batch are zeros. `fit` does so at the start of each epoch."""
        self.progress.states.clear()

    def _write_expected(self, batches: Sequence[Batch]) -> None:
        """Let the next private update divide the sum of gradients by the samples that `fit` expects, or those given."""
        expected = self.expected
        if expected is None:
            (expected,) = self.ranks.sums([float(sum(samples(self.manifest, batch) for batch in batches if batch))])
        self.engine.write({self.manifest.slot(EXPECTED): np.asarray(max(expected, 1.0), np.float32)})

    def evaluate_batch(self, batch: BatchLike, *, outputs: Sequence[str] | None = None) -> Results:
        """Compute loss and outputs in inference mode; nothing changes. Arguments, result and errors as for `step`.

        With the averages of the parameters if the program keeps them (`ema`). States that the batch has no array for are
        zeros; results have those behind it, which the next batch can be given.
        """
        self._weigh_terms()
        checked = {name: array for name, array in self._checked(batch).items() if name != STATE_ROWS}
        fed = StreamStates(self.manifest).fed(checked)
        return self._renamed(self.engine.evaluate(fed, self._result_names(outputs)))

    def _weigh_terms(self) -> None:
        """Set the weights of the terms that follow schedules to those of the next step."""
        self.engine.counts.weights.update(term_weights(self.program, self.progress))

    def _checked(self, batch: BatchLike) -> Batch:
        """The inputs of a batch; labels out of range and numbers that are not finite are refused."""
        if (self.ranks.several or self.privacy is not None) and is_empty(batch):
            return {}
        return check_batch(self.inputs(batch), self.manifest)

    def predict(
        self, data: DataLike, *, batch_size: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Compute the outputs of the model over data, in inference mode.

        Args:
            data: As for `fit`. Labels are not needed; those that the data have are left out.
            batch_size: Samples at a time; by default those that the model takes, or 32.
            outputs: Outputs of the model to return; by default all but states.

        Returns:
            The outputs by name, concatenated over all samples; of `data.Sequences` in the order of the parts.

        Raises:
            ArgumentError: The data do not fit the inputs, or an output is unknown.
        """
        known = [v.name or "" for v in self.program.model("inference").graph.outputs]
        own = outputs_beside(self.manifest.states, known)
        names = list(dict.fromkeys(own if outputs is None else as_names(outputs, "outputs")))
        check_names(names, known, "output")
        return predict(self._described(), data, carrying(self.manifest, self.engine.predict, names), batch_size)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step.

        A number that is set replaces the schedule from the next step on, also in runs that are resumed from checkpoints;
        `None` returns to the schedule, at the step that it would have reached. Rates of groups keep their ratios.
        """
        return rate_at(self.schedule, self.progress, self.progress.steps)

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None:
        if rate is not None:
            positive(rate, "learning_rate")
        self.progress.learning_rate = None if rate is None else float(rate)

    # -- many steps ----------------------------------------------------------------------------------------------------

    def fit(
        self,
        data: DataLike,
        *,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        validation: DataLike | float | None = None,
        metrics: Iterable[MetricLike] | MetricLike = (),
        callbacks: Sequence[Callback] = (),
        accumulate: int = 1,
        sample_weight: ArrayLike | None = None,
        class_weight: ClassWeight | None = None,
        group_by_length: bool = False,
        progress: str = "auto",
    ) -> list[dict[str, Any]]:
        """Train until `epochs` epochs are finished, those of a restored checkpoint included.

        A restored run continues with the next batch of its epoch, so the same call starts and resumes a run.

        Args:
            data: Arrays by name, a file or folder, or an iterable of batches: see `onnx_convgrad.data.as_batches`.
            epochs: Number of epochs in total, those of a restored checkpoint included.
            steps_per_epoch: Updates after which an epoch ends, if the data do not end before. An iterator, which may be
                endless, goes on in the next epoch; other data begin again, in a new order.
            batch_size: Samples at a time. For data that are not batches already.
            shuffle: Give each epoch a new order of samples. It is drawn from the trainer's seed; without effect on batches.
            validation: Data on which the model is evaluated after each epoch. Or a share of the data, such as 0.2, which is
                held out for it: at random by the trainer's seed, about the same share of each class.
            metrics: Names of metrics: `"accuracy"`, `"top5"`, `"precision"`, `"recall"`, `"f1"`, `"iou"`, `"auroc"`,
                `"confusion"`, `"perplexity"`; `"mae"`, `"mse"` and `"r2"` of numbers; of texts `"exact"`, `"cer"`
                (errors per character) and `"wer"` (errors per word, with the package jiwer); of detectors `"map"` and
                `"map50"` (with the package pycocotools). Or members of `onnx_convgrad.metrics`, or functions
                `(results, batch) -> number`.
            callbacks: Members of `onnx_convgrad.callbacks` or subclasses of `Callback`, called in this order.
            accumulate: Number of batches per update.
            sample_weight: The weight of each sample `[samples]` in a loss that was made with `sample_weight=True`; a mean
                is then sum(w l) / N. An array of this name in the data or in batches does the same. Data to evaluate on have
                their own, or none; a share that is held out has its part of this one.
            class_weight: Weights of the samples to train on by their class, also for such a loss: `"balanced"`, with which
                all classes count equally, or `{class: weight}`. Both weights are multiplied.
            group_by_length: Put sequences of about one length into a batch, so that less is padded.
            progress: Display on stderr: `"bar"`, `"text"` (a line for each epoch), `"none"`, or `"auto"`: the bar on a
                terminal, else text.

        Returns:
            The history, a list of JSON values, which a notebook shows as a table: for each epoch a row with `epoch`, `step`,
            `loss`, the metrics, the same of the validation with the prefix `val_`, `learning_rate`, `seconds` and
            `samples_per_second`; also `grad_norm`, the mean over the updates, if the program computes it, and in private
            training `epsilon`, spent since the first one.

        Raises:
            ArgumentError: An argument does not fit the program.
            DivergenceError: The loss or a parameter is not finite. Nothing of that step is saved, and the message names
                the newest checkpoint. Exceptions of callbacks, data and metrics of your own arrive as they are.
        """
        accumulate, epochs = whole(accumulate, "accumulate"), whole(epochs, "epochs", 0)
        steps = None if steps_per_epoch is None else whole(steps_per_epoch, "steps_per_epoch")
        check_callbacks(callbacks)
        share = isinstance(validation, (int, float))
        data, validation = self._split(data, validation)
        source = as_batches(
            data,
            self._described(),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            augment=True,
            sample_weight=sample_weight,
            class_weight=class_weight,
            group_by_length=group_by_length,
        )
        if isinstance(source, Loader):
            self.labels = source.dataset.classes or self.labels
            self.preprocessing = source.inputs.preprocessing
            if self.ranks.leader:
                tell_of_data(source)
        private = None if self.privacy is None else PoissonLoader.of(source, accumulate)
        held_out = None
        if validation is not None:
            own = sample_weight if share else None
            held_out = as_batches(
                validation, self._described(), batch_size=batch_size, shuffle=False, sample_weight=own
            )
        resolved = resolve_metrics(metrics, self._described())
        if not self.restored:
            tell_of_epochs(self.progress, epochs)
        alone = accumulate == 1 and not self.ranks.several
        self.engine.prepare(*(("step",) if alone else ("accumulate", "update")))
        display = display_named(progress if self.ranks.leader else "none")
        self.expected = None if private is None else len(private.dataset) * private.rate
        self._run = TrainingRun(self, epochs, private or source, callbacks, resolved, display, accumulate, steps)
        try:
            with self._run as run:
                self.restored = False
                run.train(held_out)
        finally:
            self.expected = self._run = None
        return self.progress.history

    def summary(
        self,
        data: DataLike | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        validation: DataLike | float | None = None,
        accumulate: int = 1,
    ) -> Summary:
        """Say what `fit` would do with these arguments; `print` it. Arguments as for `fit`.

        It has the classes and the ranges of values of the data and what is odd about them, the layers that are trained and
        frozen, the loss and the output that it reads, the optimizer, the schedule and the number of steps. Iterables of
        batches are not read.

        Raises:
            ArgumentError: The data cannot be read, or do not fit the program.
        """
        m = self._described()
        if data is not None:
            data, validation = self._split(data, validation)
        elif isinstance(validation, (int, float)):
            raise ArgumentError("There are no data to hold a share out of.", hint="Give data, or leave validation out.")
        source = None if data is None else as_batches(data, m, batch_size=batch_size, seed=self.seed)
        if isinstance(source, Loader):
            m = m.described(source.dataset.classes or m.labels, source.inputs.preprocessing)
        held = None if validation is None else as_batches(validation, m, batch_size=batch_size, shuffle=False)
        return summarize(self, source, held, epochs, whole(accumulate, "accumulate"))

    def evaluate(
        self,
        data: DataLike,
        metrics: Iterable[MetricLike] | MetricLike = (),
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool | None = None,
        prefetch: int | None = None,
        names: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Compute loss and metrics over data in inference mode, averaged as over one large batch.

        `metrics` are as for `fit`, other arguments as for `onnx_convgrad.data.as_batches`.

        Raises:
            ArgumentError: The data or the metrics do not fit the program, or there are no data.
        """
        source = as_batches(data, self._described(), batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
                            prefetch=prefetch, names=names)  # fmt: skip
        return evaluate(self, source, resolve_metrics(metrics, self._described()))

    def find_learning_rate(
        self,
        data: DataLike,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        steps: int = 100,
        batch_size: int | None = None,
        accumulate: int = 1,
    ) -> LearningRates:
        """Train with rates that grow exponentially, and suggest one from where the loss falls; then put everything back.

        Smith, "Cyclical Learning Rates" (2017), with the options of fastai's `lr_find`: the loss is averaged with a weight
        of 0.98, the search ends when the average is four times its minimum, and the suggestion is that of the rule
        "valley". Parameters and state, also random state, are those of before; data that can be read only once are spent.
        Other arguments as for `fit`.

        Args:
            lowest: The first rate.
            highest: The last rate.
            steps: Number of updates, at least 10.

        Raises:
            ArgumentError: An argument does not fit, or the first loss is not finite.
        """
        source = as_batches(data, self.manifest, batch_size=batch_size, seed=self.seed)
        return find_learning_rate(self, source, lowest, highest, steps, whole(accumulate, "accumulate"))

    def stop(self) -> None:
        """Let `fit` end after the current step; may be called from a callback, a thread or a signal handler."""
        if self._run is not None:
            self._run.stop()

    # -- values --------------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, by name."""
        return self.engine.read(p.name for p in self.manifest.parameters)

    def state(self) -> dict[str, np.ndarray]:
        """Copies of the other values that training updates: optimizer state, running statistics, random state."""
        return self.engine.read(s.name for s in self.manifest.state)

    def load(self, values: Mapping[str, ArrayLike] | Trainer) -> None:
        """Replace some parameters, state and frozen weights by arrays of the same shape, or by the weights of a trainer.

        Frozen weights, such as those of the other half of a GAN, or of a teacher, have neither gradients nor optimizer
        state. When the first of them is replaced, the sessions are created anew; `save` and `export` then write them, too.
        Before the first step, averages (`ema`) that are not given are those of their parameters.

        Args:
            values: Name -> array. Or another trainer: its parameters and running statistics of which this one has the
                names, trained or frozen here, are written over this one's, with their averages if both keep some (`ema`);
                on the CPU without arrays in between. What it holds frozen, and its optimizer's state, are not taken.

        Raises:
            ArgumentError: A name is unknown, an array has another shape, or the other trainer has no weight of a name
                here.
        """
        if isinstance(values, Trainer):
            values = trained_values(self.program, values.engine)
        arrays = arrays_to_load(self.program, values, self.progress.steps)
        moving = {entry.name for entry in self.manifest.moving()}
        self.engine.write({name: array for name, array in arrays.items() if name in moving})
        self.engine.replace({name: array for name, array in arrays.items() if name not in moving})

    def flat_parameters(self, *, statistics: bool = False) -> np.ndarray:
        """All parameters as one vector, in the order of the manifest; with `statistics` the running statistics too.

        Args:
            statistics: Whether to append the running statistics.
        """
        return self.engine.read_flat(self.manifest.stored() if statistics else self.manifest.parameters)

    def load_flat(self, vector: np.ndarray, *, statistics: bool = False) -> None:
        """Replace all parameters by a result of `flat_parameters`.

        Args:
            vector: Float32, of the length that `flat_parameters` returns.
            statistics: Whether the vector has the running statistics, too.

        Raises:
            ArgumentError: The vector has another length.
        """
        self.engine.write_flat(self.manifest.stored() if statistics else self.manifest.parameters, vector)
        if not self.progress.steps and self.manifest.averages():
            self.load(self.parameters())  # the averages follow

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint to a file of this name or, in an existing folder, to one named after the number of steps.

        It is a safetensors file with all values, and with the progress as JSON in its header, written atomically. Of several
        ranks, all call this, and rank 0 writes.

        Args:
            path: The file, or an existing folder.

        Returns:
            The file.

        Raises:
            CheckpointError: It cannot be written.
            DivergenceError: A value is not finite.
        """
        progress = self.progress if self._run is None else self._run.to_save()
        return save(self, progress, as_path(path))

    def restore(self, path: str | os.PathLike[str]) -> Path:
        """Continue from a checkpoint: a file, or the newest usable one of a folder. Newer unusable ones give warnings.

        Of several ranks, all call this, rank 0 reads the file, and their number may differ from that of the run before.

        Args:
            path: The file, or the folder.

        Returns:
            The file.

        Raises:
            CheckpointError: The file, or every one in the folder, is damaged or of another program.
        """
        self.skipped = SkippedSteps(self.engine)
        path, self.progress = restore(self, as_path(path))
        self.restored = True
        return path

    def export(self, path: str | os.PathLike[str], *, average: bool | None = None, check: bool = True) -> None:
        """Write the trained model in its original form: same inputs, outputs and opset, in inference mode.

        Inputs declare the sizes that they were trained at, if `input_shapes` changed them. Weights of more than 2 GB go to
        `<path>.data`. Of several ranks, only rank 0 writes.

        Args:
            path: The file.
            check: Run the written file on a few samples of the first batch (or on drawn ones, before any training) and
                compare its outputs with the trainer's.
            average: Whether to write the averages of the parameters; by default if the program keeps them (`ema`).

        Raises:
            ArgumentError: The path is a folder, or not writable; or the program keeps no averages.
            DivergenceError: A value is not finite.
            ExecutionError: ONNX Runtime does not run the file.
            ModelError: Writing failed, or the file computes other numbers than the trainer.
        """
        path = as_path(path)
        values = model_values(self.engine, self.progress.steps, average=average)
        if not self.ranks.leader:
            return
        tell_limited(self.engine, values)
        tell_fresh(self.engine, values)
        model = self.program.model("inference")
        export(model, values, path, labels=self.labels, preprocessing=self.preprocessing)
        predicted = average is not False or not self.manifest.averages()  # the trainer predicts with the averages
        if flag(check, "check") and predicted:
            check_export(path, model, self.engine, self.sample)

    def export_adapter(self, path: str | os.PathLike[str]) -> None:
        """Write the adapters that `export` stores, alone; `add_adapters` put them into the model.

        Args:
            path: `<name>.onnx_adapter`, which ONNX Runtime takes with the exported model, or with the one that was trained
                (`LoraAdapter.Load`, `RunOptions.add_active_adapter`); or `<name>.safetensors`, with rank and alpha in the
                header. `onnx_convgrad.transforms.load_adapters` reads both.

        Raises:
            ArgumentError: The model has no adapters, or the path is of neither kind or not writable.
            DivergenceError: A value is not finite.
        """
        path = as_path(path)
        values, note = adapter_values(self.engine, self.progress.steps)
        if self.ranks.leader:
            write_adapters(path, values, note)

    def __repr__(self) -> str:
        p = self.progress
        loss = f", loss {p.history[-1]['loss']:.4f}" if p.history else ""
        return f"<Trainer: {p.steps} steps, {p.epoch} epochs done{loss}; {self.program!r}>"

    def _repr_html_(self) -> str:
        history = self.progress.history
        return f"<pre>{escape(repr(self))}</pre>{history._repr_html_() if history else ''}"

    def _described(self) -> Manifest:
        """The manifest with the labels and the preprocessing that are known by now."""
        return self.manifest.described(self.labels, self.preprocessing)

    def _split(self, data: DataLike, validation: DataLike | float | None) -> tuple[DataLike, DataLike | None]:
        """The data to train on and those to evaluate on, which may be given as a share of the former."""
        if not isinstance(validation, (int, float)):
            return data, validation
        return split_off(data, validation, self._described(), self.seed)

    # -- names of results ----------------------------------------------------------------------------------------------

    def _result_names(self, outputs: Sequence[str] | None) -> tuple[str, ...]:
        if outputs is None:
            return (*self.engine.losses, *self.manifest.outputs)
        names = as_names(outputs, "outputs")
        check_names(names, list(self.manifest.outputs), "output")
        return (*self.engine.losses, *names)

    def _renamed(self, results: Results) -> Results:
        """Return loss and norms under `"loss"` and `"grad_norm"`, whatever their names in the graph and other outputs'."""
        m = self.manifest
        wanted = {"loss": m.loss, **m.grad_norms()}
        named = {name: results.pop(key) for name, key in wanted.items() if key in results}
        return {**named, **{name: value for name, value in results.items() if name not in named}}
