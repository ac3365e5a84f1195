// The outcome of a step, for all ranks.
#include "group/gather.h"

namespace ringreduce {

void settle(Group& group, const Account& mine) {
  const std::vector<Account> all = gatherEach(group, mine);
  for (int r = 0; r < group.size(); ++r)
    if (const Account& account = all[static_cast<size_t>(r)]; account.kind != Failure::kNone)
      throw Error(account.kind, group.who(r) + ": " + account.text);
}

}  // namespace ringreduce
