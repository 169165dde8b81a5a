"""Instance, layer and group normalization."""

from __future__ import annotations

from functools import partial

import numpy as np

from onnx_convgrad.testing import Case, rand
from tests.support.operators import rule_test

instance, group, layer = (partial(Case, f"{kind}Normalization") for kind in ("Instance", "Group", "Layer"))
PAIR = {"num_groups": 2}

GROUPED = [
    *(
        instance([rand(*shape), rand(3), rand(3)], {"epsilon": 1e-2})
        for shape in [(2, 3, 4), (2, 3, 2, 4), (2, 3, 2, 2, 2)]
    ),
    instance([rand(2, 3, 4), rand(3), rand(3)], dtype=np.float16),
    instance([rand(2, 3, 4), rand(3), rand(3)], constants=[1, 2], name="stored"),
    *(group([rand(2, 4, 3), rand(4), rand(4)], {"num_groups": groups}) for groups in (1, 2, 4)),
    group([rand(2, 4, 2, 3), rand(4), rand(4)], {**PAIR, "epsilon": 1e-2}),
    group([rand(2, 4), rand(4), rand(4)], {**PAIR, "epsilon": 0.1}),
    group([rand(2, 4, 2, 3), rand(4), rand(4)], PAIR, constants=[1, 2], name="stored"),
    group([rand(2, 4, 3), rand(4), rand(4)], {**PAIR, "stash_type": 1}, dtype=np.float16),
    group([rand(2, 4, 3), rand(4), rand(4)], {**PAIR, "stash_type": 11}, dtype=np.float64),
]

LAYER = [
    layer([rand(3, 5), rand(5), rand(5)]),
    layer([rand(3, 5), rand(5)]),
    layer([rand(2, 3, 5), rand(5), rand(5)], {"epsilon": 0.1}),
    *(layer([rand(2, 3, 5), rand(3, 5), rand(3, 5)], {"axis": axis}) for axis in (1, -2)),
    layer([rand(2, 3, 5), rand(2, 3, 5), rand(2, 3, 5)], {"axis": 0}),
    layer([rand(2, 3, 5), rand(3, 1), rand(5)], {"axis": 1}, name="broadcast"),
    layer([rand(2, 3, 5), rand(1, 3, 5), rand(1)], name="broadcast"),
    # ONNX Runtime returns the statistics in float32 always: a larger step
    layer([rand(2, 3, 5), rand(5), rand(5)], outputs=3, name="statistics", step=3e-3),
    layer([rand(2, 3, 5), rand(5), rand(5)], outputs=3, of=[1], name="of mean", step=3e-3),
    layer([rand(2, 3, 5), rand(3, 5)], {"axis": 1}, outputs=3, of=[2], name="of deviation", step=3e-3),
    layer([rand(2, 3, 5), rand(5), rand(5)], constants=[1, 2], name="stored"),
    *(layer([rand(3, 5), rand(5), rand(5)], dtype=dtype) for dtype in (np.float64, np.float16)),
    layer([rand(0, 5), rand(5), rand(5)], name="empty batch"),
]

test_rule = rule_test([*GROUPED, *LAYER])
