# The core, csrc without torch and cuda: the library ringreduce_core.  Included by CMakeLists.txt, unless
# RINGREDUCE_CORE names one that was built before.

set(layers base algorithm kernels transport transport/shm transport/tcp control bootstrap health collectives
           p2p epoch survival group)
list(TRANSFORM layers PREPEND ${PROJECT_SOURCE_DIR}/csrc/ OUTPUT_VARIABLE core_globs)
list(TRANSFORM core_globs APPEND /*.cc)
file(GLOB core_sources CONFIGURE_DEPENDS ${core_globs})

# Compiles the files of one folder as one file.  They read the same headers, and reading headers is most
# of the work.  A name in an anonymous namespace must then be unique in its folder.
foreach(source IN LISTS core_sources)
  get_filename_component(folder ${source} DIRECTORY)
  get_filename_component(folder ${folder} NAME)
  set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder})
endforeach()

# The kernels are compiled once per instruction set, into one namespace each, and chosen when loaded.
set(kernels ${PROJECT_SOURCE_DIR}/csrc/kernels/reduce_kernels.cc
            ${PROJECT_SOURCE_DIR}/csrc/kernels/codec_kernels.cc)
list(REMOVE_ITEM core_sources ${kernels})
add_library(ringreduce_core STATIC ${core_sources})
set_target_properties(ringreduce_core PROPERTIES ${unity})
target_compile_definitions(ringreduce_core PRIVATE RINGREDUCE_VERSION="${PROJECT_VERSION}")
if(RINGREDUCE_SANITIZE)
  target_precompile_headers(ringreduce_core PRIVATE ${usual_headers})
endif()

set(kernel_objects "")
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  set(instruction_sets v2 v3 v4)
else()
  set(instruction_sets aarch64)
endif()
foreach(isa IN LISTS instruction_sets)
  set(target ringreduce_kernels_${isa})
  add_library(${target} OBJECT ${kernels})
  target_include_directories(${target} PRIVATE csrc)
  target_compile_definitions(${target} PRIVATE RINGREDUCE_ISA=${isa})
  # Comes after the build type's own -O flag: even in a Debug build the kernels are to be fast.
  # Instrumented they stay at -O1, where GCC 12 warns of an uninitialised variable in its own headers,
  # and one set is enough to find undefined arithmetic: they differ in how they load and store.
  if(NOT RINGREDUCE_SANITIZE)
    target_compile_options(${target} PRIVATE -O3)
  else()
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    if(isa MATCHES "^v[34]")
      target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
    endif()
  endif()
  if(isa MATCHES "^v")
    target_compile_options(${target} PRIVATE -march=x86-64-${isa})
  endif()
  target_sources(ringreduce_core PRIVATE $<TARGET_OBJECTS:${target}>)
  list(APPEND kernel_objects $<TARGET_OBJECTS:${target}>)
endforeach()
