// Error feedback: the residual of each parameter, which is the error of its coded gradients so far.
// It is added to the next gradient.
//
// Residuals are laid out like the messages of their parameters (message.h), so that a bucket that
// comes again finds its residual without a copy.  If the buckets or the world size change,
// residuals move, parameter by parameter.  Each has two copies: the one in force, and the one that
// the current step makes.  A step that succeeds swaps them.
//
// Not thread-safe, but any holder of a store may use its memory.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/message.h"

namespace ringreduce {

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
