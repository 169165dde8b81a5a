"""Run a training: a folder holds its options, program, checkpoints, history and the trained model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple, cast

from onnx_convgrad.base.drafts import remove_leftovers, write_text
from onnx_convgrad.base.progress import announce
from onnx_convgrad.base.warn import warn
from onnx_convgrad.cli import train_assembly, train_data, train_folder
from onnx_convgrad.cli.figures import check_plot
from onnx_convgrad.cli.tables import Output, recorded_warnings, tell
from onnx_convgrad.cli.train_classes import Tell, fitted_model, suggest_batchnorm, with_default_loss
from onnx_convgrad.cli.train_config import Config
from onnx_convgrad.cli.train_parts import schedule
from onnx_convgrad.cli.train_plot import plot_rates
from onnx_convgrad.cli.train_ranks import about_ranks, merged, output_of, signal_of_all, together
from onnx_convgrad.cli.train_results import finish, print_summary
from onnx_convgrad.data.batches import Loader
from onnx_convgrad.distributed import Communicator, launched_by
from onnx_convgrad.distributed.launchers import restarts
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.errors import ArgumentError, ConvGradError, DivergenceError, shown
from onnx_convgrad.frontend.files import read
from onnx_convgrad.frontend.metadata import declare_states
from onnx_convgrad.metrics.metric import Metric
from onnx_convgrad.metrics.named import resolve_metrics
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.programs.optim.schedules import Schedule
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.runtime.providers import check_available, resolve_providers
from onnx_convgrad.training import checkpoint
from onnx_convgrad.training.callbacks import Callback, Checkpoints, EarlyStopping
from onnx_convgrad.training.interruption import Interruption
from onnx_convgrad.training.loggers import Log, MLflow, TensorBoard, WandB
from onnx_convgrad.training.run_folder import CHECKPOINTS, CLASSES, CONFIG, HISTORY, PROGRAM
from onnx_convgrad.training.trainer import Trainer

_BROKEN = "broken_images.txt"
"""The file with the images that could not be read."""


def train(given: Mapping[str, Any], config_file: Path | None, resume: Path | None, out: Output) -> int:
    """Train and print; return the exit status. `given` are fields of `Config`, which override those of `config_file`."""
    with together(_rank_timeout(given, config_file, resume)) as ranks:
        return _train(train_folder.absolute(given, Path.cwd()), config_file, resume, ranks, output_of(ranks, out))


def _train(given: Mapping[str, Any], config_file: Path | None, resume: Path | None, ranks: Ranks, out: Output) -> int:
    config, folder, resumed = _configure(given, config_file, resume)
    if config.plot and ranks.leader:
        check_plot(Path(config.plot))
    ranks.meet()  # no rank writes before all have looked at the folder
    with out.stages():
        say = (lambda _: None) if out.silent else tell
        run = _start(config, folder, say, ranks, resumed=resumed)
        config, trainer = run.config, run.trainer
        if ranks.of_leader(resumed and bool(checkpoint.numbered(folder / CHECKPOINTS))):
            trainer.restore(folder / CHECKPOINTS)
            if trainer.progress.epoch >= config.epochs and ranks.leader:
                warn(
                    f"Nothing is left to train: {trainer.progress.epoch} of {config.epochs} epochs are finished. To go on, "
                    f"give more: --epochs {trainer.progress.epoch + config.epochs}."
                )
    shared: Any = {"epochs": config.epochs, "validation": run.held, "accumulate": config.accumulate}
    summary = trainer.summary(run.data, **shared)
    print_summary(summary, out)
    if ranks.several:
        for line in about_ranks(ranks, trainer.manifest):
            out.line(line)
    diverged = None
    with Interruption() as interruption:
        progress = "none" if out.silent else "auto"
        try:
            trainer.fit(
                run.data,
                **shared,
                steps_per_epoch=config.steps_per_epoch,
                metrics=run.metrics,
                callbacks=[*run.callbacks, interruption],
                progress=progress,
            )
        except DivergenceError as problem:
            diverged = DivergenceError(
                f"{problem.message} No model was exported.",
                hint=f"{problem.hint} Then continue with: {train_folder.resume_command(config, folder)}",
            )
    if diverged is None:
        interruption.signal = signal_of_all(ranks, interruption.signal)
    _list_broken([run.data, run.held], folder, ranks)
    return finish(config, trainer, folder, interruption, diverged, out, summary)


def _rank_timeout(given: Mapping[str, Any], config_file: Path | None, resume: Path | None) -> float | None:
    """The option, before all others are read: their errors are then those of connected ranks."""
    if given.get("rank_timeout") is None and (config_file is not None or resume is not None):
        with contextlib.suppress(ConvGradError, OSError):
            file = config_file if config_file is not None else (resume or Path()) / CONFIG
            return Config.of(train_folder.read_config(file), file.name).rank_timeout
    return given.get("rank_timeout")


def _configure(given: Mapping[str, Any], config_file: Path | None, resume: Path | None) -> tuple[Config, Path, bool]:
    """Return the options and the folder of the run, and whether the run in it goes on.

    It does after `--resume`, and if torchrun repeats the command of a run that it has restarted.
    """
    if resume is None:
        options = {**(train_folder.read_config(config_file) if config_file else {}), **given}
        config = Config.of(options, "the command line")
        if config_file is not None:
            train_folder.check_outputs(config, given, config_file)
        if not restarts() or config.model is None or not (train_folder.folder_of(config) / CONFIG).exists():
            return config, train_folder.new_folder(config), False
        resume = train_folder.folder_of(config)
    elif config_file is not None:
        raise ArgumentError(
            "--resume takes its options from the folder of the run, not from --config.",
            hint="Leave --config out, or start a new run with it.",
        )
    train_folder.check_links(resume)
    return train_folder.stored_options(resume).continued(given, resume), resume, True


class _Run(NamedTuple):
    """All that a training needs, with the options that it follows."""

    config: Config
    trainer: Trainer
    data: Loader
    held: Loader | None
    metrics: Sequence[Metric]
    callbacks: list[Callback]


def _start(config: Config, folder: Path, tell: Tell, ranks: Ranks, *, resumed: bool) -> _Run:
    """Read the data, build or load the program, write the folder of the run, and open the trainer.

    Nothing is written before all options are checked. The options get their final name last, so that a folder with them is
    a whole run, and one with their draft is the start of one. Of several ranks, the first builds and writes, and the others
    read what it has written.
    """
    if not ranks.leader:
        ranks.meet()
        config, resumed = train_folder.stored_options(folder), True
    stored = folder / PROGRAM if resumed and (folder / PROGRAM).exists() else None
    config, program, (data, held), rate = _assembled(config, tell, stored)
    m = program.manifest.described(data.dataset.classes or program.manifest.labels, program.manifest.preprocessing)
    metrics = resolve_metrics(train_assembly.metrics(config, m), m)
    callbacks = _callbacks(config, folder)
    if ranks.leader:
        _write_folder(folder, config, data, program if stored is None else None)
        ranks.meet()
    loaded = TrainingProgram.load(folder / PROGRAM)  # as in a resumed run
    return _Run(config, _trainer(config, loaded, rate, ranks.communicator), data, held, metrics, callbacks)


def _write_folder(folder: Path, config: Config, loader: Loader, program: TrainingProgram | None) -> None:
    """Write the folder of a run; with a new program, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with train_folder.written_config(config, folder / CONFIG):
        remove_leftovers(folder)
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        classes = loader.dataset.classes
        if classes:
            write_text(folder / CLASSES, dumps(classes))
        if program is not None:  # with labels and preprocessing, which `predict` needs
            m = program.manifest
            program.manifest = m.described(classes or m.labels, loader.inputs.preprocessing)
            program.save(folder / PROGRAM, shared_weights=True)


def _list_broken(loaders: Sequence[Loader | None], folder: Path, ranks: Ranks) -> None:
    """List the images that could not be read in a file of the run."""
    own = {file: reason for loader in loaders if loader for file, reason in loader.dataset.broken.items()}
    broken = merged(ranks, own)
    if broken and ranks.leader:
        write_text(folder / _BROKEN, "".join(f"{shown(f'{file}: {reason}')}\n" for file, reason in broken.items()))


def _assembled(
    config: Config, tell: Tell, stored: Path | None = None
) -> tuple[Config, TrainingProgram, tuple[Loader, Loader | None], Schedule]:
    """Read the data, build the program or load the one that is `stored`; return the options with the batch size, too."""
    check_available(import_runtime(), [name for name, _ in resolve_providers(list(config.providers) or None)])
    announce("reading the data")
    model = read(config.model or "")
    declare_states(model, text.states(config.states) if config.states else None)
    config = train_data.sized(config, model)
    data, held = train_data.datasets(config)
    config = with_default_loss(config, data, tell)
    size, batches = train_data.batches(config, model, len(data))
    config, batches = replace(config, batch_size=size), max(1, batches)
    if config.steps_per_epoch is not None and not config.private:  # whose rate of sampling follows from the data
        batches = min(batches, config.steps_per_epoch * config.accumulate)
    rate = schedule(config, batches)
    if stored is not None:
        program = TrainingProgram.load(stored)
        train_assembly.check_stored(config, program.manifest, stored.parent)
    else:
        suggest_batchnorm(config, model, tell)
        announce("building the program")
        with recorded_warnings():  # printed before the training
            config = fitted_model(config, model, [data] if held is None else [data, held], tell)
            program = train_assembly.program(config, rate, model, data, -(-batches // config.accumulate))
    loaders = train_data.loaders(config, program.manifest, *train_data.taught(config, data, held))
    train_assembly.check_classes(program, data)
    return config, program, loaders, rate


def _trainer(
    config: Config, program: TrainingProgram, rate: Schedule, communicator: Communicator | None = None
) -> Trainer:
    announce("starting ONNX Runtime")
    options = {"deterministic": config.deterministic} | ({"threads": config.threads} if config.threads else {})
    providers = list(config.providers) or None
    if config.overlap and communicator is not None:
        cast(Any, communicator).overlap = True
    return Trainer(
        program,
        providers,
        config.seed,
        schedule=rate,
        options=options,
        distributed=communicator,
        shard_optimizer=config.shard_optimizer,
    )


def find_rate(given: Mapping[str, Any], config_file: Path | None, resume: Path | None, out: Output) -> int:
    """Search for a learning rate and print it; nothing is trained or written but the plot. Arguments as for `train`."""
    if resume is not None:
        raise ArgumentError("--find-lr is for a new run, not for one to --resume.", hint="Leave one of the two out.")
    if launched_by() is not None:
        raise ArgumentError("--find-lr is for one process.", hint="Start it without mpiexec or torchrun.")
    given = train_folder.absolute(given, Path.cwd())
    config = Config.of({**(train_folder.read_config(config_file) if config_file else {}), **given}, "the command line")
    if config.model is None:
        raise ArgumentError("There is no model to train.", hint="Name an ONNX file.")
    if config.plot:
        check_plot(Path(config.plot))
    with out.stages():
        say = (lambda _: None) if out.silent else tell
        config, program, loaders, rate = _assembled(config, say)
        trainer = _trainer(config, program, rate)
        announce("searching for a learning rate")
        found = trainer.find_learning_rate(loaders[0], accumulate=config.accumulate)
    if config.plot:
        plot_rates(
            found, Path(config.plot), Path(config.model or "").name, f"{', '.join(config.loss)}, {config.optimizer}"
        )
    out.line(f"{len(found.rates)} steps, with rates from {found.rates[0]:.3g} to {found.rates[-1]:.3g}.")
    if found.suggestion is None:
        out.line("The loss does not fall at any of them: there is no rate to suggest.")
    else:
        out.line(f"Suggested learning rate: {found.suggestion:.2g}. Train with --lr {found.suggestion:.2g}.")
    if config.plot:
        out.line(f"The plot is in {train_folder.here(config.plot)}.")
    out.print_json({"model": config.model, "plot": config.plot, **asdict(found)})
    return 0


# -- the run -----------------------------------------------------------------------------------------------------------


def _callbacks(config: Config, folder: Path) -> list[Callback]:
    best = "val_loss" if config.validation else None
    callbacks: list[Callback] = [
        Log(config.log or folder / HISTORY),
        Checkpoints(folder / CHECKPOINTS, every_steps=config.checkpoint_every, keep=config.keep, best=best),
    ]
    loggers = {TensorBoard: config.tensorboard, MLflow: config.mlflow, WandB: config.wandb}
    callbacks += [logger(place) for logger, place in loggers.items() if place]
    if config.patience:
        # The folder gets both: the model of the last epoch and, with a validation, that of the best one.
        callbacks.append(EarlyStopping(best or "loss", patience=config.patience, restore_best_weights=False))
    return callbacks
