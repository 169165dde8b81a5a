"""Requirements that several convolution lowerings share, with the reason to report where they do not hold."""

from __future__ import annotations

import math

from onnx_convgrad.lowering.table import Query, needs

# -- the geometry ------------------------------------------------------------------------------------------------------

not_empty = needs(lambda s: not s.empty, "a size is zero, so the gradient is")
is_empty = needs(lambda s: s.empty, "no size is known to be zero")

known_batch = needs(lambda s: s.batch is not None, "the batch size is not known while building")
known_channels = needs(lambda s: s.channels is not None, "the number of channels is not known")
known_features = needs(lambda s: s.features is not None, "the number of features is not known")
static_groups = needs(lambda s: s.groups == 1 or s.features is not None, "the number of features is not known")

MOST_TAPS = 1024
"""Most taps of a kernel that a lowering may list: as nodes, or as the rows of a constant matrix."""

MOST_POINTS = 2**24
"""Most points of an image that a lowering may list in a constant."""

known_kernel = needs(lambda s: s.taps is not None, "the kernel size is not known while building")
_few_taps = needs(
    lambda s: s.taps is None or s.taps <= MOST_TAPS, lambda s: f"the kernel has {s.taps:,} taps, too many to list"
)
few_points = needs(
    lambda s: all(math.prod(d or 1 for d in sizes) <= MOST_POINTS for sizes in (s.x, s.y, [s.channels], [s.features])),
    "an image has too many points or channels to list",
)
_known_sizes = needs(lambda s: s.static, "a spatial size is not known while building")


def static_kernel(q: Query) -> str | None:
    """The kernel size is known, and its taps are few enough to list."""
    taps = q.spec.taps
    return None if taps is not None and taps <= MOST_TAPS else known_kernel(q) or _few_taps(q)


def static_sizes(q: Query) -> str | None:
    """The spatial sizes are known, and small enough to list taps and points."""
    return _known_sizes(q) or _few_taps(q) or few_points(q)


several_samples = needs(lambda s: s.batch != 1, "there is only one sample")
several_axes = needs(lambda s: s.rank > 1, "there is one spatial axis")
several_taps = needs(lambda s: s.taps != 1, "the kernel is 1x1")
several_rows = needs(lambda s: s.kernel[0] != 1, "the kernel has one row along the first axis")

one_group = needs(lambda s: s.groups == 1, lambda s: f"there are {s.groups} groups")
one_per_group = needs(lambda s: s.features == s.groups, "a group has several features, or an unknown number")
depthwise = needs(
    lambda s: s.depthwise and s.features is not None, "the convolution is not known to have one channel per group"
)

unit_stride = needs(lambda s: s.unit_stride, lambda s: f"strides {list(s.strides)} are not 1")
unit_row_stride = needs(
    lambda s: s.strides[0] == 1, lambda s: f"the stride along the first axis is {s.strides[0]}, not 1"
)
last_unit_stride = needs(
    lambda s: s.strides[-1] == 1, lambda s: f"the stride along the last axis is {s.strides[-1]}, not 1"
)
strided = needs(lambda s: not s.unit_stride, "every stride is 1")

# -- the target --------------------------------------------------------------------------------------------------------


def conv_kernel(q: Query) -> str | None:
    """The provider convolves this data type."""
    if q.dtype not in q.target.conv_dtypes:
        return f"the {q.target.name} provider has no convolution for {q.dtype.name}"
    return None


def transposed_kernel(q: Query) -> str | None:
    """The provider transposes convolutions over so many axes."""
    if q.spec.rank > q.target.transposed_axes:
        return f"the {q.target.name} provider has no ConvTranspose over {q.spec.rank} axes"
    return None


def overlapping_windows(q: Query) -> str | None:
    """ONNX Runtime's CPU convolution reads windows as wide as the data in place."""
    if q.target.on_cpu:
        return None
    return f"the {q.target.name} provider copies windows that overlap in memory"


def products_of_samples(q: Query) -> str | None:
    """cuDNN's convolutions are as fast as such products, and four times as fast for few points; see quirks.CUDA_SAMPLES."""
    if q.target.name != "cuda" or q.dtype not in q.target.conv_dtypes:
        return None
    return f"the {q.target.name} provider multiplies the samples by one matrix more slowly than it convolves them"


samples_in_rows = [not_empty, conv_kernel, known_batch, several_samples, static_sizes, several_taps]
"""Requirements of a Conv whose rows hold the points of all samples."""
