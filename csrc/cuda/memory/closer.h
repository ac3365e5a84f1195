// Gives memory back in a thread of its own: closing a mapping may wait for all that a GPU has to
// do, and some of that may wait for the very thread that closes it.
#pragma once

#include <functional>

namespace ringreduce::cuda {

// Returns at once.  `close` runs after those before it; it may wait, and must not throw.  The
// thread is there only while there is something to close.
void closeLater(std::function<void()> close);

}  // namespace ringreduce::cuda
