# The GPU data plane (csrc/cuda): whether it is built, for which GPUs, with which flags.  Included by
# CMakeLists.txt, and does nothing to a build without CUDA.
#
# RINGREDUCE_CUDA   auto  built if there is an nvcc that works and, for the extension, torch is a
#                         CUDA build of the same major version.  Where it cannot be built beside a
#                         CUDA build of torch, whose user wants GPUs, that is an error; else a status
#                         line says why not
#                   1     built, or an error that says what is missing
#                   0     not built, and not looked for
# The extension keeps the reason (`cuda_missing`), for its errors about CUDA tensors.
# RINGREDUCE_CUDA_ARCHS   native  machine code for the GPUs of this machine
#                         all     for one of each generation: others of a generation run its code
#                         80;90   for these (8.0 is 80)
#                         auto    native if there are GPUs, and all of them among those that nvcc
#                                 knows and `all` serves; else all
#                         Those that nvcc does not know are left out.  PTX is added for the lowest,
#                         which serves the GPUs in between that no machine code serves, and for the
#                         highest, which serves all that are newer.
#
# nvcc is CMAKE_CUDA_COMPILER, $CUDACXX, or the first in $CUDA_HOME/bin, $CUDA_PATH/bin, PATH and, for
# the extension, what fits torch: among the packages of its Python (nvidia/cu13/bin), in
# /usr/local/cuda-13.0, /usr/local/cuda-13 and /usr/local/cuda.
set(RINGREDUCE_CUDA auto CACHE STRING "Build the GPU data plane: auto, 1 or 0")
set(RINGREDUCE_CUDA_ARCHS auto CACHE STRING "GPUs to compile for: auto, native, all or a list")
set(all_archs 75 80 90 100 120)
set(RINGREDUCE_CUDA_USUAL /usr/local/cuda CACHE PATH "Where CUDA is, if nothing says where")
option(RINGREDUCE_GPU_TESTS "Let ctest run the tests that need a GPU" OFF)

if(NOT RINGREDUCE_CUDA MATCHES "^(auto|0|1)$")
  message(FATAL_ERROR "RINGREDUCE_CUDA is auto, 0 or 1, not \"${RINGREDUCE_CUDA}\".")
endif()
if(NOT RINGREDUCE_CUDA_ARCHS MATCHES "^(auto|native|all|[0-9]+([; ][0-9]+)*)$")
  message(FATAL_ERROR "RINGREDUCE_CUDA_ARCHS is auto, native, all or a list of numbers as in 80;90 (for "
                      "compute capability 8.0 and 9.0), not \"${RINGREDUCE_CUDA_ARCHS}\".")
endif()

# --- Is everything there?  If not, `missing` says what ------------------------------------------------

set(missing "")
set(nvcc ${CMAKE_CUDA_COMPILER})
if(RINGREDUCE_CUDA STREQUAL "0")
  set(missing "switched off by RINGREDUCE_CUDA=0")
elseif(RINGREDUCE_SANITIZE)
  set(missing "the sanitizers (RINGREDUCE_SANITIZE) do not go with nvcc")
elseif(RINGREDUCE_BUILD_EXTENSION AND NOT torch_cuda)
  set(missing "torch ${torch_version} is not a CUDA build, so there are no CUDA tensors")
elseif(NOT nvcc AND NOT "$ENV{CUDACXX}" STREQUAL "")
  set(nvcc $ENV{CUDACXX})
elseif(NOT nvcc)
  # Not where CMake would look by itself, /usr/local/bin and the like: PATH is the user's word.
  find_program(found_nvcc nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
               NO_DEFAULT_PATH)
  find_program(found_nvcc nvcc NO_CMAKE_PATH NO_CMAKE_SYSTEM_PATH NO_PACKAGE_ROOT_PATH)
  set(nvcc_places "")
  if(NOT found_nvcc)
    set(toolkits ${RINGREDUCE_CUDA_USUAL})
    if(RINGREDUCE_BUILD_EXTENSION)
      string(REGEX MATCH "^[0-9]+" torch_cuda_major ${torch_cuda})
      list(TRANSFORM python_packages APPEND /nvidia/cu${torch_cuda_major} OUTPUT_VARIABLE of_pip)
      set(toolkits ${of_pip} ${toolkits}-${torch_cuda} ${toolkits}-${torch_cuda_major} ${toolkits})
    endif()
    list(TRANSFORM toolkits APPEND /bin OUTPUT_VARIABLE nvcc_places)
    find_program(found_nvcc nvcc PATHS ${nvcc_places} NO_DEFAULT_PATH)
    list(JOIN nvcc_places ", " nvcc_places)
  endif()
  if(found_nvcc)
    set(nvcc ${found_nvcc})
  else()
    set(missing "there is no nvcc in PATH, $CUDA_HOME/bin, $CUDA_PATH/bin, ${nvcc_places}")
  endif()
  unset(found_nvcc CACHE)
endif()

# pip's nvcc looks for its libraries in lib64, and pip brings lib: so it is used by way of a folder
# in which both are.
get_filename_component(toolkit "${nvcc}" DIRECTORY)
get_filename_component(toolkit "${toolkit}" DIRECTORY)
set(shown_nvcc ${nvcc})
if(NOT missing AND toolkit MATCHES "/nvidia/cu[0-9]+$" AND NOT EXISTS ${toolkit}/lib64)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda_toolkit)
  foreach(part bin include lib nvvm)
    file(CREATE_LINK ${toolkit}/${part} ${PROJECT_BINARY_DIR}/cuda_toolkit/${part} SYMBOLIC)
  endforeach()
  file(CREATE_LINK ${toolkit}/lib ${PROJECT_BINARY_DIR}/cuda_toolkit/lib64 SYMBOLIC)
  set(nvcc ${PROJECT_BINARY_DIR}/cuda_toolkit/bin/nvcc)
endif()

# That it is there is not enough: it may not know this C++ compiler, or lack headers or libraries.
# The program that it has to make here also tells the GPUs of this machine.
set(probe ${PROJECT_BINARY_DIR}/cuda_probe)
if(NOT missing AND NOT RINGREDUCE_NVCC_WORKS STREQUAL "${nvcc} ${CMAKE_CXX_COMPILER}")
  file(WRITE ${probe}.cu [[
#include <concepts>
#include <cstdio>
__global__ void probe() {}
int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) return 0;
  for (int device = 0; device < devices; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    std::printf("%d%d\n", major, minor);
  }
}
]])
  execute_process(
    COMMAND ${nvcc} -std=c++20 -ccbin ${CMAKE_CXX_COMPILER} ${probe}.cu -o ${probe}
    RESULT_VARIABLE nvcc_status OUTPUT_VARIABLE nvcc_output ERROR_VARIABLE nvcc_output)
  if(nvcc_status EQUAL 0)
    set(RINGREDUCE_NVCC_WORKS "${nvcc} ${CMAKE_CXX_COMPILER}" CACHE INTERNAL "")
  else()
    string(STRIP "${nvcc_status}\n${nvcc_output}" nvcc_output)
    set(missing "${shown_nvcc} cannot make a C++20 program with ${CMAKE_CXX_COMPILER}:\n${nvcc_output}\n")
  endif()
endif()

if(NOT missing)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE nvcc_output)
  string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" _ "${nvcc_output}")
  set(cuda_major ${CMAKE_MATCH_1})
  set(cuda_version ${CMAKE_MATCH_1}.${CMAKE_MATCH_2})
  execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE known_archs)
  string(REGEX MATCHALL "[0-9]+" known_archs "${known_archs}")
  set(cuda_archs ${all_archs})
  if(RINGREDUCE_CUDA_ARCHS MATCHES "^(auto|native)$")
    execute_process(COMMAND ${probe} OUTPUT_VARIABLE own_archs)
    string(REGEX MATCHALL "[0-9]+" own_archs "${own_archs}")
    set(cuda_archs ${own_archs})
    set(archs_why "the GPUs of this machine")
    if(RINGREDUCE_CUDA_ARCHS STREQUAL "auto")
      if(NOT own_archs)
        set(cuda_archs ${all_archs})
        set(archs_why "all, since no GPU is seen here")
      endif()
      list(GET all_archs 0 oldest)
      foreach(arch IN LISTS own_archs)
        if(arch LESS oldest OR NOT arch IN_LIST known_archs)
          set(cuda_archs ${all_archs})
          set(archs_why "all, since a GPU of this machine is sm_${arch}")
        endif()
      endforeach()
    endif()
  else()
    set(archs_why "RINGREDUCE_CUDA_ARCHS=${RINGREDUCE_CUDA_ARCHS}")
    if(NOT RINGREDUCE_CUDA_ARCHS STREQUAL "all")
      string(REPLACE " " ";" cuda_archs "${RINGREDUCE_CUDA_ARCHS}")
    endif()
  endif()
  list(REMOVE_DUPLICATES cuda_archs)
  list(SORT cuda_archs COMPARE NATURAL)
  set(unknown_archs ${cuda_archs})
  list(REMOVE_ITEM unknown_archs ${known_archs})
  if(unknown_archs)
    list(REMOVE_ITEM cuda_archs ${unknown_archs})
  endif()
  if(RINGREDUCE_CUDA_ARCHS STREQUAL "native" AND NOT cuda_archs AND NOT unknown_archs)
    set(missing "this machine has no GPU to compile for (RINGREDUCE_CUDA_ARCHS=native)")
  elseif(NOT cuda_archs)
    set(missing "nvcc ${cuda_version} compiles for none of the GPUs asked for "
                "(RINGREDUCE_CUDA_ARCHS=${RINGREDUCE_CUDA_ARCHS})")
  elseif(RINGREDUCE_BUILD_EXTENSION AND NOT torch_cuda MATCHES "^${cuda_major}\\.")
    set(missing "torch ${torch_version} was built with CUDA ${torch_cuda}, and ${shown_nvcc} is of CUDA "
                "${cuda_version}, another major version")
  endif()
endif()

if(missing)
  list(JOIN missing "" missing)
  if(RINGREDUCE_CUDA STREQUAL "1")
    message(FATAL_ERROR "RINGREDUCE_CUDA=1, but ${missing}.")
  elseif(RINGREDUCE_CUDA STREQUAL "auto" AND RINGREDUCE_BUILD_EXTENSION AND torch_cuda)
    string(REGEX MATCH "^[0-9]+" torch_cuda_major ${torch_cuda})
    set(or_of_pip "")  # pip's toolkits before 13 have no nvcc
    if(torch_cuda_major GREATER_EQUAL 13)
      set(or_of_pip ", or pip's nvidia-cuda-nvcc")
    endif()
    message(FATAL_ERROR
      "torch ${torch_version} is for GPUs, and ringreduce cannot be built for them: ${missing}.\n"
      "Either install an nvcc of CUDA ${torch_cuda_major} (the CUDA toolkit${or_of_pip}) "
      "and a C++ compiler that it knows, and set CUDA_HOME if nvcc is not in PATH. "
      "Or build for CPU tensors alone: set the environment variable RINGREDUCE_CUDA=0 "
      "(-DRINGREDUCE_CUDA=0 for CMake).")
  endif()
  message(STATUS "CUDA: not built, ${missing}")
  # For errors: one line.
  string(REGEX REPLACE "[ \n]+" " " cuda_missing "${missing}")
  string(REGEX REPLACE "[\"\\]" "'" cuda_missing "${cuda_missing}")
  string(STRIP "${cuda_missing}" cuda_missing)
  return()
endif()

# --- The compiler and its flags -----------------------------------------------------------------------

list(JOIN cuda_archs " sm_" cuda_text)
set(cuda_text "${cuda_version}, sm_${cuda_text} and newer")
message(STATUS "CUDA: ${cuda_text} (${archs_why}; ${shown_nvcc})")
if(unknown_archs)
  list(JOIN unknown_archs ", sm_" unknown_archs)
  message(STATUS "CUDA: left out sm_${unknown_archs}, which nvcc ${cuda_version} does not know")
endif()

set(CMAKE_CUDA_COMPILER ${nvcc})
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
list(TRANSFORM cuda_archs APPEND -real OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
list(GET cuda_archs 0 lowest)
list(GET cuda_archs -1 highest)
set(ptx_archs ${lowest} ${highest})
list(REMOVE_DUPLICATES ptx_archs)
list(TRANSFORM ptx_archs APPEND -virtual OUTPUT_VARIABLE ptx_archs)
list(APPEND CMAKE_CUDA_ARCHITECTURES ${ptx_archs})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
# CMake before 3.25.2 does not know how nvcc is asked for C++20.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)

# nvcc compiles a file for one GPU after the other unless told otherwise: where there are more cores
# than files, several at a time.
file(GLOB cuda_files CONFIGURE_DEPENDS csrc/cuda/kernels/*.cu)
list(LENGTH cuda_files cuda_file_count)
include(ProcessorCount)
ProcessorCount(cores)
math(EXPR threads "(${cores} + ${cuda_file_count} - 1) / ${cuda_file_count}")
# Constexpr functions of the core (cuts, orders, counters) run on the GPU as they are.  A kernel that
# spills registers, or indexes an array that then lies in memory, is slow without looking so: a warning.
# Compressed: by itself nvcc leaves code that has line numbers (-lineinfo, for profilers) as it is, and
# the library is four times as large.  The smallest form asks for drivers of CUDA 12.4 (550) or newer,
# as programs of CUDA 13 do anyhow; those of CUDA 12 otherwise run on older ones.
set(cuda_options
    -fmad=false -lineinfo --expt-relaxed-constexpr --threads=${threads}
    -Xfatbin=-compress-all -Xcompiler=-Wall,-Wextra,-ffp-contract=off
    -Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage)
execute_process(COMMAND ${nvcc} --help OUTPUT_VARIABLE nvcc_help)
if(cuda_major GREATER_EQUAL 13 AND nvcc_help MATCHES "--compress-mode [^\n]*size")
  list(APPEND cuda_options --compress-mode=size)
endif()
if(RINGREDUCE_WERROR)
  list(APPEND cuda_options -Werror=all-warnings -Xcompiler=-Werror)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
# What ptxas says of each kernel goes to a file, not to the terminal.
set(CMAKE_CUDA_COMPILER_LAUNCHER
    sh ${CMAKE_CURRENT_LIST_DIR}/keep_ptxas_log.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})

# --- The library: no torch, no Python, and no libcuda, which a machine without a GPU has not ------------

file(GLOB cuda_host_files CONFIGURE_DEPENDS csrc/cuda/*.cc csrc/cuda/*/*.cc)
add_library(ringreduce_cuda_host OBJECT ${cuda_host_files})
set_target_properties(ringreduce_cuda_host PROPERTIES ${unity})
add_library(ringreduce_cuda STATIC ${cuda_files} $<TARGET_OBJECTS:ringreduce_cuda_host>)
foreach(target ringreduce_cuda_host ringreduce_cuda)
  target_include_directories(${target} SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(${target} PUBLIC ringreduce_core ${CMAKE_DL_LIBS})
endforeach()
# One log of all kernels; tests/cuda/kernel_report.py reads it.
set(cuda_kernel_objects "$<FILTER:$<TARGET_OBJECTS:ringreduce_cuda>,INCLUDE,[.]cu[.]o$>")
add_custom_command(TARGET ringreduce_cuda POST_BUILD VERBATIM COMMAND_EXPAND_LISTS
  COMMAND sh -c "cat \"$@\" > \"$0\"" ${PROJECT_BINARY_DIR}/ptxas.log
          "$<JOIN:${cuda_kernel_objects},.ptxas;>.ptxas")

# Everything that needs CUDA, and no more of the rest than that needs.
add_custom_target(cuda_all DEPENDS ringreduce_cuda)
