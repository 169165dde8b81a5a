"""Instance, layer and group normalization."""

from __future__ import annotations

import numpy as np

from onnx_convgrad.testing import Case, rand
from tests.support.operators import rule_test

GROUPED = [
    *(
        Case("InstanceNormalization", [rand(*shape), rand(3), rand(3)], {"epsilon": 1e-2})
        for shape in [(2, 3, 4), (2, 3, 2, 4), (2, 3, 2, 2, 2)]
    ),
    Case("InstanceNormalization", [rand(2, 3, 4), rand(3), rand(3)], dtype=np.float16),
    Case("InstanceNormalization", [rand(2, 3, 4), rand(3), rand(3)], constants=[1, 2], name="stored"),
    *(Case("GroupNormalization", [rand(2, 4, 3), rand(4), rand(4)], {"num_groups": groups}) for groups in (1, 2, 4)),
    Case("GroupNormalization", [rand(2, 4, 2, 3), rand(4), rand(4)], {"num_groups": 2, "epsilon": 1e-2}),
    Case("GroupNormalization", [rand(2, 4), rand(4), rand(4)], {"num_groups": 2, "epsilon": 0.1}),
    Case(
        "GroupNormalization", [rand(2, 4, 2, 3), rand(4), rand(4)], {"num_groups": 2}, constants=[1, 2], name="stored"
    ),
    Case(
        "GroupNormalization",
        [rand(2, 4, 3), rand(4), rand(4)],
        {"num_groups": 2, "stash_type": 1},
        dtype=np.float16,
    ),
    Case(
        "GroupNormalization", [rand(2, 4, 3), rand(4), rand(4)], {"num_groups": 2, "stash_type": 11}, dtype=np.float64
    ),
]

LAYER = [
    Case("LayerNormalization", [rand(3, 5), rand(5), rand(5)]),
    Case("LayerNormalization", [rand(3, 5), rand(5)]),
    Case("LayerNormalization", [rand(2, 3, 5), rand(5), rand(5)], {"epsilon": 0.1}),
    Case("LayerNormalization", [rand(2, 3, 5), rand(3, 5), rand(3, 5)], {"axis": 1}),
    Case("LayerNormalization", [rand(2, 3, 5), rand(3, 5), rand(3, 5)], {"axis": -2}),
    Case("LayerNormalization", [rand(2, 3, 5), rand(2, 3, 5), rand(2, 3, 5)], {"axis": 0}),
    Case("LayerNormalization", [rand(2, 3, 5), rand(3, 1), rand(5)], {"axis": 1}, name="broadcast"),
    Case("LayerNormalization", [rand(2, 3, 5), rand(1, 3, 5), rand(1)], name="broadcast"),
    # ONNX Runtime returns the statistics in float32 always: a larger step
    Case("LayerNormalization", [rand(2, 3, 5), rand(5), rand(5)], outputs=3, name="statistics", step=3e-3),
    Case("LayerNormalization", [rand(2, 3, 5), rand(5), rand(5)], outputs=3, of=[1], name="of mean", step=3e-3),
    Case(
        "LayerNormalization",
        [rand(2, 3, 5), rand(3, 5)],
        {"axis": 1},
        outputs=3,
        of=[2],
        name="of deviation",
        step=3e-3,
    ),
    Case("LayerNormalization", [rand(2, 3, 5), rand(5), rand(5)], constants=[1, 2], name="stored"),
    Case("LayerNormalization", [rand(3, 5), rand(5), rand(5)], dtype=np.float64),
    Case("LayerNormalization", [rand(3, 5), rand(5), rand(5)], dtype=np.float16),
    Case("LayerNormalization", [rand(0, 5), rand(5), rand(5)], name="empty batch"),
]

test_rule = rule_test([*GROUPED, *LAYER])
