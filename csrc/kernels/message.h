// From a bucket to a message and back.
#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"
#include "kernels/layout.h"

namespace ringreduce {

// Whether buckets of a dtype can become a message of float32: float32 itself and the halves.
constexpr bool canBeCoded(DType dtype) {
  return dtype == DType::kFloat32 || isHalf(dtype);
}

// The elements of `bucket` as float32.  `residual`, laid out as the message, is added if there is
// one.
void gather(float* message, const MessageLayout& layout, const void* bucket, DType dtype,
            const float* residual);
// The other way: rounded once.  False if anything that was written is not finite.
bool scatter(void* bucket, DType dtype, const MessageLayout& layout, const float* message);

// The same of elements as they are, of any dtype; only floating ones can be other than finite.
void gatherExact(std::byte* message, const MessageLayout& layout, const void* bucket, DType dtype);
bool scatterExact(void* bucket, DType dtype, const MessageLayout& layout, const std::byte* message);

// Adds a message's elements to the bucket's, rounded once.
void addTo(void* bucket, DType dtype, const MessageLayout& layout, const float* message);

// The layout's parts of which every element is zero in the bucket, of either sign.
std::vector<size_t> partsOfZeros(const MessageLayout& layout, const void* bucket, DType dtype);
// Of part `i` of a message: fills it with zeros; adds what another message has of it.
void clearPart(float* message, const MessageLayout& layout, size_t i);
void addPart(float* message, const MessageLayout& layout, size_t i, const float* other);

// Whether no element is infinite or NaN.
bool allFinite(const void* elements, DType dtype, size_t count);

}  // namespace ringreduce
