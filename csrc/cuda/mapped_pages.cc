// Registers everybody's pages.
#include "cuda/mapped_pages.h"

#include "group/agreement.h"

namespace ringreduce::cuda {

MappedPages::MappedPages(Group& group, int device, size_t bytes) : pages_(group, bytes) {
  agreeOnStatus(group, [&] {
    for (int r = 0; r < group.size(); ++r)
      mapped_.push_back(registerSegment(device, pages_.segment(r)));
  });
}

}  // namespace ringreduce::cuda
