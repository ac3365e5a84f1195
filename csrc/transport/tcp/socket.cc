// What went wrong, in words.
#include "transport/tcp/socket.h"

#include <cerrno>
#include <cstring>

namespace ringreduce::net {

std::string textOfError(int error) {
  if (error == EBADMSG)
    return "what came cannot be decrypted: it was changed on its way, or no rank of this group "
           "sent it";
  return std::strerror(error);
}

}  // namespace ringreduce::net
