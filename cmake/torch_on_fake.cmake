# PyTorch's wheel for GPUs on the fake of CUDA (tests/cuda/torch_on_fake): stubs of CUDA's libraries,
# the fake in place of libcudart and libcuda, and the extension once more, of the same objects but for
# the kernels, which the C++ compiler makes of the same files.  Included by CMakeLists.txt.
if(NOT RINGREDUCE_BUILD_EXTENSION OR NOT TARGET ringreduce_cuda)
  message(FATAL_ERROR "RINGREDUCE_ON_FAKE=ON needs RINGREDUCE_BUILD_EXTENSION=ON and a build for GPUs.")
endif()
set(here ${PROJECT_SOURCE_DIR}/tests/cuda/torch_on_fake)
set(on_fake ${PROJECT_BINARY_DIR}/on_fake)

# --- CUDA's libraries, as far as torch wants them: on_fake/lib ------------------------------------------

set(rest ${on_fake}/lib/libcudart.so.13.cc)
set(rest_of_nccl ${on_fake}/lib/libnccl.so.2.cc)
add_custom_command(OUTPUT ${rest} ${rest_of_nccl} VERBATIM
  COMMAND ${CMAKE_COMMAND} -E env CXX=${CMAKE_CXX_COMPILER}
          ${RINGREDUCE_PYTHON} ${here}/make_stubs.py ${torch_lib} ${on_fake}/lib
  DEPENDS ${here}/make_stubs.py ${torch_lib}/libtorch_cuda.so)
set_source_files_properties(${rest} ${rest_of_nccl} PROPERTIES COMPILE_OPTIONS -w)
file(GLOB fake_sources CONFIGURE_DEPENDS ${here}/*.cc)
list(REMOVE_ITEM fake_sources ${here}/gpu_data.cc)
set(nccl_sources ${fake_sources})
list(FILTER nccl_sources INCLUDE REGEX "/nccl_[^/]*$")
list(REMOVE_ITEM fake_sources ${nccl_sources})
foreach(part world driver runtime)
  list(APPEND fake_sources tests/cuda/fake_${part}.cc)
endforeach()
add_library(fake_cudart SHARED ${fake_sources} ${rest})
target_include_directories(fake_cudart PRIVATE csrc)
target_include_directories(fake_cudart SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_options(fake_cudart PRIVATE
  -Wl,-soname,libcudart.so.13 -Wl,--version-script=${here}/libcudart.map -Wl,-z,defs)
target_link_libraries(fake_cudart PRIVATE Threads::Threads)
set_target_properties(fake_cudart PROPERTIES
  CXX_VISIBILITY_PRESET default
  NO_SONAME ON
  PREFIX "" OUTPUT_NAME libcudart SUFFIX .so.13
  LIBRARY_OUTPUT_DIRECTORY ${on_fake}/lib)

# NCCL, which moves bytes between processes by sockets, in the fake's streams.
add_library(nccl_on_fake SHARED ${nccl_sources} ${rest_of_nccl})
target_include_directories(nccl_on_fake SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_options(nccl_on_fake PRIVATE
  -Wl,-soname,libnccl.so.2 -Wl,--version-script=${here}/libnccl.map -Wl,-z,defs)
target_link_libraries(nccl_on_fake PRIVATE fake_cudart Threads::Threads)
set_target_properties(nccl_on_fake PROPERTIES
  CXX_VISIBILITY_PRESET default
  NO_SONAME ON
  PREFIX "" OUTPUT_NAME libnccl SUFFIX .so.2
  LIBRARY_OUTPUT_DIRECTORY ${on_fake}/lib)

# --- The extension: on_fake/ringreduce, the package with this one in it ---------------------------------

set(host_kernels "")
foreach(file IN LISTS cuda_files)
  get_filename_component(name ${file} NAME_WE)
  file(CONFIGURE OUTPUT on_fake/${name}.cc CONTENT "#include \"host_kernels.h\"\n#include \"${file}\"\n")
  list(APPEND host_kernels ${on_fake}/${name}.cc)
endforeach()
add_library(ringreduce_host_kernels OBJECT ${host_kernels})
target_include_directories(ringreduce_host_kernels PRIVATE csrc ${here})
target_include_directories(ringreduce_host_kernels SYSTEM PRIVATE
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_definitions(ringreduce_host_kernels PRIVATE _GLIBCXX_USE_CXX11_ABI=${torch_abi})
target_compile_options(ringreduce_host_kernels PRIVATE -O1)

add_extension(_C_on_fake
  $<TARGET_OBJECTS:ringreduce_cuda_host> $<TARGET_OBJECTS:ringreduce_host_kernels> fake_cudart
  ${CMAKE_DL_LIBS})
set_target_properties(_C_on_fake PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${on_fake}/ringreduce)
file(GLOB package_files CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}
     _ringreduce_autoload.py ringreduce/*)
list(FILTER package_files EXCLUDE REGEX "/(_build_info[.]py|__pycache__|.*[.]so)$")
file(MAKE_DIRECTORY ${on_fake}/ringreduce)
foreach(file IN LISTS package_files)
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/${file} ${on_fake}/${file} SYMBOLIC)
endforeach()
file(CREATE_LINK ${PROJECT_BINARY_DIR}/_build_info.py ${on_fake}/ringreduce/_build_info.py SYMBOLIC)

# As installed: import asks for the version, and torch for the entry points, of which the second gives
# it operators that need no kernels.
set(metadata on_fake/ringreduce-${PROJECT_VERSION}.dist-info)
file(CONFIGURE OUTPUT ${metadata}/METADATA
     CONTENT "Metadata-Version: 2.1\nName: ringreduce\nVersion: ${PROJECT_VERSION}\n")
file(CONFIGURE OUTPUT ${metadata}/entry_points.txt
     CONTENT "[torch.backends]\nringreduce = _ringreduce_autoload:register\nfake = host_ops:install\n")
file(CREATE_LINK ${here}/host_ops.py ${on_fake}/host_ops.py SYMBOLIC)

# The program of gpu-check whose ranks are processes, of the same objects, on the same fake.
add_executable(cuda_perf_on_fake ${here}/gpu_data.cc
  $<FILTER:$<TARGET_OBJECTS:ringreduce_cuda_perf>,EXCLUDE,[.]cu[.]o>
  $<TARGET_OBJECTS:ringreduce_cuda_host> $<TARGET_OBJECTS:ringreduce_host_kernels>)
target_include_directories(cuda_perf_on_fake SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(cuda_perf_on_fake PRIVATE ringreduce_core fake_cudart ${CMAKE_DL_LIBS})
set_target_properties(cuda_perf_on_fake PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${on_fake})

add_custom_target(torch_on_fake DEPENDS _C_on_fake fake_cudart nccl_on_fake cuda_perf_on_fake)
