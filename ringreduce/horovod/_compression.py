"""Horovod's `Compression`: how tensors travel.

`none` and `fp16` are Horovod's.  `bf16` is the same with bfloat16.  `int8` and `int4` are
ringreduce's codecs (docs/compression.md): the coordinator sends a quarter, or an eighth, of the
bytes.  DistributedOptimizer adds the error of each encoding to the next gradient.
"""

from typing import Any

import torch


class Compressor:
    """Changes a tensor before it is sent, and the result back.

    A class of one's own has these two functions, and may leave `codec` as it is.
    """

    codec = ""  # of ringreduce, for all-reduces of float32 on CPUs

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The result in the form that the tensor had."""
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class FP16Compressor(Compressor):
    """Sends floating tensors as float16; sums are accumulated in float32 and rounded once."""

    _dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls._dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Sends floating tensors as bfloat16."""

    _dtype = torch.bfloat16


class Int8Compressor(Compressor):
    """All-reduces float32 tensors in 8 bits an element; sends others as they are."""

    codec = "int8"


class Int4Compressor(Compressor):
    """All-reduces float32 tensors in 4 bits an element; sends others as they are."""

    codec = "int4"


class Compression:
    """The choices: `compression=hvd.Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
