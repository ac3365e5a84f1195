"""SyncBatchNorm: batch normalization over the batches of all ranks, on CPUs and GPUs.

Each rank computes mean, squared deviations and count of its batch.  All ranks gather them, and
combine them as Chan, Golub and LeVeque do ("Updating formulae and a pairwise algorithm for
computing sample variances", 1979).
"""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ringreduce.horovod import _world
from ringreduce.horovod._operations import Sum, allgather, allreduce_


class SyncBatchNorm(_BatchNorm):
    """As torch.nn.BatchNorm1d, 2d and 3d, with statistics of all ranks' batches in training.

    Input and output: [batch, features, ...], of any floating dtype; statistics are float32.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes a batch."""
        self._check_input_dim(input)
        if not self.training or _world.size() == 1:
            return super().forward(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps
        )
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        result: torch.Tensor = output
        return result


def _by_feature(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """[features] in a shape that broadcasts over [batch, features, ...]."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        values = input.detach().float()
        over = [d for d in range(input.dim()) if d != 1]
        features = input.shape[1]
        own = values.numel() // features
        mean = values.mean(over) if own else values.new_zeros(features)
        deviations = (values - _by_feature(mean, values)).square().sum(over)
        packed = torch.cat([mean, deviations, mean.new_tensor([own])])
        gathered = allgather(packed.unsqueeze(0))
        counts = gathered[:, -1:]
        means, squares = gathered[:, :features], gathered[:, features:-1]
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = (squares.sum(0) + ((means - mean).square() * counts).sum(0)) / count
        inverse = (variance + eps).rsqrt()
        normal = (values - _by_feature(mean, values)) * _by_feature(inverse, values)
        output = normal
        if weight is not None:
            output = output * _by_feature(weight.detach().float(), values)
        if bias is not None:
            output = output + _by_feature(bias.detach().float(), values)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        normal, weight, inverse, count = ctx.saved_tensors
        values = gradient.float()
        over = [d for d in range(gradient.dim()) if d != 1]
        of_bias, of_weight = values.sum(over), (values * normal).sum(over)
        sums = torch.stack([of_bias, of_weight])
        allreduce_(sums, op=Sum)
        sums /= count
        of_input = (
            values - _by_feature(sums[0], values) - normal * _by_feature(sums[1], values)
        ) * _by_feature(inverse, values)
        if weight is None:
            return of_input.to(gradient.dtype), None, None, None
        of_input = of_input * _by_feature(weight.float(), values)
        return of_input.to(gradient.dtype), of_weight.to(weight.dtype), of_bias, None
