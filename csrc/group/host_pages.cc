// Makes a segment, hands it out, maps the others'.
#include "group/host_pages.h"

#include "base/bytes.h"
#include "group/agreement.h"
#include "group/exchange_fds.h"

namespace ringreduce {
namespace {

constexpr size_t kPageBytes = 4096;

}  // namespace

HostPages::HostPages(Group& group, size_t bytes) : segments_(static_cast<size_t>(group.size())) {
  const size_t size = roundUp(bytes == 0 ? 1 : bytes, kPageBytes);
  std::shared_ptr<Segment>& own = segments_[static_cast<size_t>(group.rank())];
  agreeOnStatus(group, [&] { own = Segment::create(size); });
  std::vector<Fd> fds = exchangeFds(group, own->fd(), "shared memory");
  agreeOnStatus(group, [&] {
    for (int r = 0; r < group.size(); ++r)
      if (r != group.rank())
        segments_[static_cast<size_t>(r)] =
            Segment::attach(std::move(fds[static_cast<size_t>(r)]), size);
  });
  for (const auto& segment : segments_) segment->closeFd();
}

}  // namespace ringreduce
