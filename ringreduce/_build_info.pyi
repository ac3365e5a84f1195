# Types of _build_info.py, which the build writes (CMakeLists.txt) and git ignores.
VERSION: str  # of ringreduce
TORCH_VERSION: str  # torch.__version__ at build time
CXX11_ABI: bool  # torch.compiled_with_cxx11_abi() at build time
COMPILER: str  # as in "GNU 12.2.0"
CUDA: str  # as in "13.0, sm_80 sm_90 and newer"; "" where no code for GPUs was built
CUDA_MISSING: str  # why not, as in "there is no nvcc in PATH"; "" where it was built
OPENSSL: str  # as in "3.0.19"; "" where RINGREDUCE_TLS=1 cannot be used
EXTENSION_SUFFIX: str  # the Python built for, as in ".cpython-311-x86_64-linux-gnu.so"
SOURCE_DIR: str  # where the source lay
