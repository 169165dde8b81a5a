"""Arguments are read from files as Python sees them."""

from __future__ import annotations

import pytest

from onnx_convgrad.base.arguments import argument, sentence


@pytest.mark.parametrize(
    ("place", "name", "begin", "default"),
    [
        ("api:augment", "training", "Run BatchNormalization and Dropout in training mode.", False),
        ("programs.privacy:Privacy(max_norm)", "", "Norm to which", 1.0),
        ("training.trainer:Trainer.fit(epochs)", "", "Number of epochs in total", 1),
        ("training.callbacks:Checkpoints", "keep", "Number of checkpoints to keep.", 3),
        ("programs.optim.optimizers:Optimizer(lr)", "", "Learning rate.", 1e-3),
        ("evaluation.calibration:unfold_batchnorm()", "", "Put BatchNormalization back", None),
        ("frontend.load:load", "model", "A path", None),
    ],
)
def test_the_first_sentence_and_the_default_are_read(place: str, name: str, begin: str, default: object) -> None:
    found = argument(place, name)
    assert found.sentence.startswith(begin) and found.sentence.endswith(".")
    assert found.default == default and type(found.default) is type(default)


@pytest.mark.parametrize("place", ["api", "api:no_such_function(x)", "api:augment(no_such_argument)"])
def test_an_unknown_argument_is_an_error(place: str) -> None:
    with pytest.raises(LookupError):
        argument(place)


def test_a_sentence_ends_with_a_period_and_a_space() -> None:
    assert sentence("At most 0.5\nof it. More.") == "At most 0.5 of it."
    assert sentence("All of it") == "All of it"
