// How the gradients of a bucket lie in the message that carries them, and the copies both ways.
//
// Each parameter is cut by itself, as a message of its own would be (algorithm/cut.h), and part c
// of all parameters makes chunk c of the message.  So the rank that owns an element, the elements
// that share its block, and the order of addition depend on its parameter alone: neither the order
// of parameters in a bucket nor the size of buckets changes a bit of the result.  Parts are padded
// with zeros to the same size for all ranks, a multiple of 128 elements.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "algorithm/cut.h"
#include "base/bytes.h"
#include "base/dtype.h"

namespace ringreduce {

// The place of a parameter's gradient in a bucket, in elements.
struct Part {
  size_t parameter;  // its index
  size_t begin, count;
  bool operator==(const Part&) const = default;
};

class MessageLayout {
 public:
  MessageLayout(std::vector<Part> parts, int world_size)
      : parts_(std::move(parts)), world_size_(world_size) {
    for (const Part& part : parts_) {
      places_.push_back(chunk_);
      chunk_ += Cut{part.count, world_size}.chunkSize();
    }
  }

  const std::vector<Part>& parts() const { return parts_; }
  // Elements of the message, padding included: as many in each rank's chunk.
  size_t count() const { return chunk_ * static_cast<size_t>(world_size_); }

  // Calls visit(message, offset, size, padded) for each run of part `i`: `size` elements of the
  // parameter from `offset` on lie at `message`, and zeros behind them until there are `padded`.
  template <class Visit>
  void forEachRun(size_t i, Visit visit) const {
    const Cut cut{parts_[i].count, world_size_};
    for (int c = 0; c < world_size_; ++c) {
      const Span span = cut.chunk(c);
      visit(static_cast<size_t>(c) * chunk_ + places_[i], span.begin, span.size, cut.chunkSize());
    }
  }

  // A hash of which parameters it has, and of their sizes.
  uint64_t borders() const {
    uint64_t hash = 0xcbf29ce484222325;
    for (const Part& part : parts_) hash = mixed(mixed(hash, part.parameter), part.count);
    return hash;
  }

  bool operator==(const MessageLayout&) const = default;

 private:
  std::vector<Part> parts_;
  int world_size_;
  std::vector<size_t> places_;  // of each part in every chunk
  size_t chunk_ = 0;            // elements
};

// Whether buckets of a dtype can become a message of float32: float32 itself and the halves.
constexpr bool canBeCoded(DType dtype) {
  return dtype == DType::kFloat32 || isHalf(dtype);
}

// Copies a bucket of float32, float16 or bfloat16 to a message of float32.  Adds `residual`, which
// is laid out as the message, if it is not null.
void gather(float* message, const MessageLayout& layout, const void* bucket, DType dtype,
            const float* residual);
// The reverse, rounded once.  False if a written element is not finite.
bool scatter(void* bucket, DType dtype, const MessageLayout& layout, const float* message);

// The same without conversion, for any dtype.
void gatherExact(std::byte* message, const MessageLayout& layout, const void* bucket, DType dtype);
bool scatterExact(void* bucket, DType dtype, const MessageLayout& layout, const std::byte* message);

// Adds a message's elements to the bucket's, rounded once.
void addTo(void* bucket, DType dtype, const MessageLayout& layout, const float* message);

// The layout's parts whose elements in the bucket are all zero, of either sign.
std::vector<size_t> partsOfZeros(const MessageLayout& layout, const void* bucket, DType dtype);
// Fills part `i` of a message with zeros; adds part `i` of another message.
void clearPart(float* message, const MessageLayout& layout, size_t i);
void addPart(float* message, const MessageLayout& layout, size_t i, const float* other);

// Whether no element is infinite or NaN.
bool allFinite(const void* elements, DType dtype, size_t count);

// Error feedback: the residual of each parameter, which is the error of its coded gradients so far.
// It is added to the next gradient.
//
// Residuals are laid out like the messages of their parameters, so that a bucket that
// comes again finds its residual without a copy.  If the buckets or the world size change,
// residuals move, parameter by parameter.  Each has two copies: the one in force, and the one that
// the current step makes.  A step that succeeds swaps them.
//
// Not thread-safe, but any holder of a store may use its memory.
class Residuals {
 public:
  struct Store {
    MessageLayout layout;
    std::vector<float> kept, made;  // in force; made by the current step
  };

  // `counts`: elements of each parameter.
  explicit Residuals(std::vector<size_t> counts);

  // The store with the residuals of the layout's parameters, laid out as its message.
  std::shared_ptr<Store> storeOf(const MessageLayout& layout);

  // Copies a parameter's residual to `to`, in the parameter's order; false if there is none.
  bool read(size_t parameter, float* to) const;
  // Sets a residual, or removes it (null).  Elements that are not finite become 0.
  void write(size_t parameter, const float* from);
  // Scales all residuals; elements that would not be finite become 0.
  void scale(float factor);
  void clear();

  bool empty() const;
  size_t bytes() const;

 private:
  struct Entry {
    size_t count;
    std::shared_ptr<Store> store = {};  // and the parameter's index in its layout
    size_t place = 0;
    std::vector<float> loose = {};  // until a bucket comes; may be empty
  };
  std::vector<std::shared_ptr<Store>> stores() const;
  std::vector<Entry> entries_;
};

}  // namespace ringreduce
