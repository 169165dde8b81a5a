"""Saliency maps of many images on the workers of Ray: `Mapper` in `map_batches`.

pip install ".[cpu]" "ray[data]" scikit-learn
python examples/ray/saliency.py
"""

import logging
import os
import warnings
from pathlib import Path

import numpy as np
import ray
from sklearn.datasets import load_digits

from onnx_convgrad.evaluation import Mapper

MODEL = str(Path(__file__).resolve().parents[1] / "models" / "digits_cnn.onnx")
images = (load_digits().images[:, None] / 16).astype(np.float32)  # [1797, 1, 8, 8]

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
warnings.simplefilter("ignore")
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
ray.data.DataContext.get_current().enable_progress_bars = False
rows = ray.data.from_numpy(np.array_split(images, 4)).rename_columns({"data": "image"})
logging.getLogger("ray.data").setLevel(logging.ERROR)

# Each of two workers opens one session, and maps batches to the gradients of the largest score by the pixels.
maps = rows.map_batches(
    Mapper,
    fn_constructor_args=[MODEL],
    fn_constructor_kwargs={"largest": True, "norms": True, "options": {"threads": 1}},
    batch_size=256,
    concurrency=2,
)
norms = np.sort([row["image_norm"] for row in maps.iter_rows()])  # rows arrive in any order
alone = np.sort(Mapper(MODEL, largest=True, norms=True)({"image": images})["image_norm"])
print(f"{len(norms)} images; the score of the most sensitive one changes by {norms[-1]:.1f} per unit of its pixels")
print(f"largest difference from one process: {np.abs(norms - alone).max():.1e}")
