"""Federated learning on this machine: a server, two clients, four rounds. `pip install ".[cpu,train,flower]"`.

python examples/flower/run.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import onnx_convgrad as og

HERE = Path(__file__).resolve().parent
LINK = "127.0.0.1:8911"
folder = Path(tempfile.mkdtemp(prefix="digits-federated-"))
home = folder / "flower"
home.mkdir()
(home / "config.toml").write_text(
    f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{LINK}"\ninsecure = true\n'
)
model = onnx.load(HERE.parent / "models" / "digits_cnn.onnx")
draw = np.random.default_rng(0)
for tensor in model.graph.initializer:  # start from random weights
    if len(tensor.dims) > 1:
        weights = draw.standard_normal(tensor.dims) * np.sqrt(2 / np.prod(tensor.dims[1:]))
        tensor.CopyFrom(numpy_helper.from_array(weights.astype(np.float32), tensor.name))
optimizer = og.optim.SGD(lr=0.05, momentum=0.9)
og.build_training(model, loss="cross_entropy", optimizer=optimizer).save(folder / "program")

variables = {"DIGITS_FEDERATED": folder, "FLWR_HOME": home, "FLWR_TELEMETRY_ENABLED": 0, "OMP_NUM_THREADS": 1}
path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
environment = {**os.environ, **{k: str(v) for k, v in variables.items()}, "PATH": path}
host, port = LINK.split(":")
link = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--host", host, "--port", port]
node = ["flower-supernode", "--insecure", "--superlink", LINK]
started = []
with (folder / "log.txt").open("w") as log:
    try:
        nodes = [
            [*node, "--port", str(9094 + i), "--node-config", f"partition-id={i} num-partitions=2"] for i in (0, 1)
        ]
        for command in (link, *nodes):
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(6)
        subprocess.run(
            ["flwr", "run", HERE, "--stream"], env=environment, stdout=log, stderr=log, check=True, timeout=600
        )
    finally:
        for process in reversed(started):
            process.terminate()
for number in range(1, 5):
    print(f"round {number}  accuracy {100 * float((folder / f'round-{number}.txt').read_text()):.1f}%")
print(f"The model is {folder / 'federated.onnx'}, the log {folder / 'log.txt'}.")
