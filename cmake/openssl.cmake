# Encryption of connections between hosts (csrc/transport/tcp/tls.cc, RINGREDUCE_TLS=1): whether it is built.
# Included by CMakeLists.txt.
#
# RINGREDUCE_OPENSSL   auto  built if OpenSSL 3 and its headers are found
#                      1     built, or an error that says what is missing
#                      0     not built, and not looked for
set(RINGREDUCE_OPENSSL auto CACHE STRING "Build encryption between hosts: auto, 1 or 0")

if(NOT RINGREDUCE_OPENSSL MATCHES "^(auto|0|1)$")
  message(FATAL_ERROR "RINGREDUCE_OPENSSL is auto, 0 or 1, not \"${RINGREDUCE_OPENSSL}\".")
endif()

set(openssl_text "")
if(NOT RINGREDUCE_OPENSSL STREQUAL "0")
  find_package(OpenSSL 3.0 QUIET COMPONENTS SSL)
  if(TARGET OpenSSL::SSL AND NOT OPENSSL_VERSION VERSION_LESS 3.0)
    set(openssl_text ${OPENSSL_VERSION})
    target_compile_definitions(ringreduce_core ${core_private} RINGREDUCE_OPENSSL)
    target_link_libraries(ringreduce_core ${core_private} OpenSSL::SSL)
  elseif(RINGREDUCE_OPENSSL STREQUAL "1")
    message(FATAL_ERROR "RINGREDUCE_OPENSSL=1 needs OpenSSL 3 with its headers (libssl-dev, "
                        "openssl-devel), or OPENSSL_ROOT_DIR, which says where they are.")
  endif()
endif()
if(openssl_text)
  message(STATUS "RINGREDUCE_TLS=1 can be used: OpenSSL ${openssl_text}")
else()
  message(STATUS "RINGREDUCE_TLS=1 cannot be used: built without OpenSSL 3")
endif()
