"""Train a small CNN on scikit-learn's 8x8 digits with PyTorch and write `models/digits_cnn.onnx`.

BatchNormalization is exported as its own operator and parameters keep their names, so the file can be trained further.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

EPOCHS, BATCH, SEED = 20, 64, 0

torch.manual_seed(SEED)
torch.set_num_threads(1)  # the order of sums depends on the number of threads
torch.use_deterministic_algorithms(True)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
picked = train_test_split(range(len(labels)), test_size=0.25, random_state=SEED, stratify=digits.target)
train, test = (torch.tensor(indices) for indices in picked)


def block(index: int, cin: int, cout: int) -> list[tuple[str, nn.Module]]:
    conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
    return [(f"conv{index}", conv), (f"bn{index}", nn.BatchNorm2d(cout)), (f"relu{index}", nn.ReLU())]


layers = block(1, 1, 16) + block(2, 16, 32) + [("pool2", nn.MaxPool2d(2))]
layers += [*block(3, 32, 48), ("pool3", nn.MaxPool2d(2)), ("flatten", nn.Flatten()), ("fc", nn.Linear(48 * 2 * 2, 10))]
model = nn.Sequential(OrderedDict(layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * -(-len(train) // BATCH))
for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train))].split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()

model.eval()
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
print(f"{sum(p.numel() for p in model.parameters())} parameters, test accuracy {accuracy:.2%}")
path = Path(__file__).parent / "models" / "digits_cnn.onnx"
path.parent.mkdir(exist_ok=True)
warnings.simplefilter("ignore")  # this exporter is deprecated; the newer one folds the normalization into Conv
names: dict[str, Any] = {"input_names": ["image"], "output_names": ["logits"]}
names["dynamic_axes"] = {"image": {0: "N"}, "logits": {0: "N"}}
kept: dict[str, Any] = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
torch.onnx.export(model, (images[:1],), path, opset_version=17, dynamo=False, **names, **kept)
