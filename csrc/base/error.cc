// Turns errno into an Error.
#include "base/error.h"

#include <cerrno>
#include <system_error>

namespace ringreduce {

void throwErrno(Failure kind, const std::string& what) {
  throw Error(kind, what + ": " + std::generic_category().message(errno));
}

}  // namespace ringreduce
