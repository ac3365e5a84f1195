// Error feedback: what the codec has lost of each parameter's gradient so far, to be added to the
// next one.
//
// Residuals belong to parameters.  They lie in memory as the messages do in which the parameters
// travel (layout.h), so that a bucket that comes again finds its own without a copy; where buckets
// change, or the world size does, they are moved, parameter by parameter.  There are two of each:
// that in force, and that which a step under way makes.  A step that succeeds swaps them.
//
// Not thread-safe, but the memory of a store may be used by whoever holds it.
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
    std::vector<float> kept, made;  // in force; and what the step under way makes
  };

  // `counts`: elements of each parameter.
  explicit Residuals(std::vector<size_t> counts);

  // Where the residuals of the layout's parameters lie as its message does.
  std::shared_ptr<Store> storeOf(const MessageLayout& layout);

  // Copies a parameter's residual to `to`, as it lies in the parameter; false if there is none.
  bool read(size_t parameter, float* to) const;
  // Sets it; null: there is none.  Elements that are not finite become 0.
  void write(size_t parameter, const float* from);
  // Of all of them; what would not be finite becomes 0.
  void scale(float factor);
  void clear();

  bool empty() const;
  size_t bytes() const;

 private:
  struct Entry {
    size_t count;
    std::shared_ptr<Store> store = {};  // and the parameter's place in its layout
    size_t place = 0;
    std::vector<float> loose = {};  // until a bucket comes; may be empty
  };
  std::vector<std::shared_ptr<Store>> stores() const;
  std::vector<Entry> entries_;
};

}  // namespace ringreduce
