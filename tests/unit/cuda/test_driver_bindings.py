"""Calls of the CUDA driver, by cuda.bindings and, for tensor maps, by ctypes: the real functions,
before a driver in C that writes down what reaches it and keeps a current context per thread, as the
real one does. The other tests replace cuda.bindings.driver as a whole."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.fresh_program import run_code
from tests.support.host_code import COMPILER

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is there"),
]

_DRIVER = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#define SAY(name, form, ...) printf(#name " " form "\n", __VA_ARGS__), fflush(stdout)
#define TELL(name, form, ...) \
  { if (!current) return 201; SAY(name, form, __VA_ARGS__); return 0; }
typedef unsigned long long u64;
static __thread void *current;
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)9; return 0; }
int cuCtxSetCurrent(void *c) { current = c; SAY(current, "%p", c); return 0; }
int cuModuleLoadData(void **m, const char *p) { *m = (void *)5; TELL(module, "%.4s", p) }
int cuModuleGetFunction(void **f, void *m, const char *n) {
  *f = (void *)(n[1] == 'r' ? 8 : 7);  // grouped_...: with 3 tensor maps and 10 numbers
  TELL(function, "%p %s", m, n)
}
int cuFuncSetAttribute(void *f, int a, int v) TELL(attribute, "%p %d %d", f, a, v)
int cuFuncGetParamInfo(void *f, size_t i, size_t *o, size_t *s) {
  *o = 8 * i;
  *s = i ? 4 : 8;
  return i > 1;
}
int cuThreadExchangeStreamCaptureMode(int *m) { int was = *m; *m = 0; TELL(mode, "%d", was) }
int cuStreamGetCaptureInfo_v2(void *s, int *t, u64 *n) { *t = 1; *n = 77; return 0; }
int cuStreamGetCaptureInfo_v3(void *s, int *t, u64 *n) { *t = 1; *n = 77; return 0; }
int cuEventCreate(void **e, unsigned f) { *e = (void *)11; TELL(create, "%u", f) }
int cuEventRecord(void *e, void *s) TELL(record, "%p %p", e, s)
int cuStreamWaitEvent(void *s, void *e, unsigned f) TELL(wait, "%p %p %u", s, e, f)
int cuMemcpyAsync(u64 d, u64 s, size_t n, void *t) {
  if (n == 99) return 700;
  TELL(copy, "%llx %llx %zu %p", d, s, n, t)
}
int cuMemcpy2DAsync_v2(const u64 *c, void *t)
  TELL(block, "%llx %llx %llu %llu %llu %p", c[11], c[4], c[13], c[14], c[15], t)
int cuStreamWriteValue32_v2(void *s, u64 a, unsigned v, unsigned f)
  TELL(write, "%p %llx %x %u", s, a, v, f)
int cuStreamWaitValue32_v2(void *s, u64 a, unsigned v, unsigned f)
  TELL(wanted, "%p %llx %x %u", s, a, v, f)
static void list(const char *name, int count, const u64 *wide, const unsigned *narrow) {
  printf("%s", name);
  for (int i = 0; i < count; i++) printf(" %llu", wide ? wide[i] : narrow[i]);
}
// Writes its number in place of the map.
int cuTensorMapEncodeTiled(u64 *map, int kind, unsigned rank, void *data, const u64 *sizes,
                           const u64 *pitches, const unsigned *box, const unsigned *steps,
                           int inner, int swizzle, int l2, int fill) {
  static int count;
  if (!current) return 201;
  for (unsigned i = 0; i < rank; i++)
    if (steps[i] != 1 || (u64)map % 64) return 2;
  printf("map %d of %p, swizzled %d:", ++count, data, swizzle);
  list(" sizes", rank, sizes, 0);
  list(" pitches", rank - 1, pitches, 0);
  list(" box", rank, 0, box);
  puts("");
  fflush(stdout);
  *map = count;
  for (unsigned i = 0; i + 1 < rank; i++)
    if (pitches[i] % 16) return 1;
  return 0;
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned m, void *s, u64 **p, void **e) {
  if (f == (void *)8) {
    printf("maps %llu %llu %llu %llu", *p[0], *p[1], *p[2], p[2][16]);
    for (int i = 3; i < 13; i++) list(i == 3 ? " numbers" : "", 1, p[i], 0);
    puts("");
  }
  TELL(launch, "%p %u,%u,%u %u,%u,%u %u %p %llx %d", f, x, y, z, a, b, c, m, s, *p[0], e == 0)
}
static int missing(void) { return 801; }
int cuGetProcAddress_v2(const char *name, void **found, int version, u64 flags, int *status) {
  char full[256];
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *found = 0;
  for (int v = 3; v >= 2 && !*found; v--) {
    snprintf(full, sizeof full, "%s_v%d", name, v);
    *found = dlsym(self, full);
  }
  if (!*found) *found = dlsym(self, name);
  if (!*found) *found = (void *)missing;
  if (status) *status = 0;
  return 0;
}
"""

_CALLS = """
import ctypes, sys, threading
from types import SimpleNamespace
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import torch
torch.cuda.current_device = lambda: 0
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: 0x33
torch.cuda.is_current_stream_capturing = lambda: False
from megatron_fluid.cuda import devices, kernel_build, triton_launch
from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.errors import FluidError
from megatron_fluid.cuda.tensor_maps import GATED, TensorMaps, in_boxes, token_boxes
from megatron_fluid.kernels.fused_gemm.launch import FUSED
from megatron_fluid.kernels.grouped_gemm.launch import GROUPED
from megatron_fluid.kernels.sm90 import launch as sm90
from megatron_fluid.kernels.sm90.launch import HopperKernels
words = (ctypes.c_uint64 * 1)(0x5000)
at = ctypes.addressof(words)
kernel_build.machine_code = lambda unit: b"CUBIN"
def without_context(call, *arguments):  # in a thread of its own, like autograd's of GPU 0
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    thread.join()
kernels = HopperKernels(FUSED, torch.bfloat16)
kernels.prepare(["gather_forward"])
without_context(kernels.start, "gather_forward", 131, (at, at))
def at(address, view):  # whose tensor lies elsewhere
    return address, *view[1:]
def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)
x, stack, weights = bf16(96, 64), bf16(5, 48, 64), bf16(5, 96, 136)
grouped, sm90.multiprocessors = HopperKernels(GROUPED, torch.bfloat16), lambda device: 131
own, both, out = in_boxes(stack[:, :, :32], 128), token_boxes(x), in_boxes(x[:32], 64)
for _ in range(2):  # loaded and encoded once
    grouped.launch("grouped_sums", (at(16, own), at(32, both), (at(48, out),)), range(1, 10))
without_context(TensorMaps(1).fill, 0, at(64, in_boxes(weights[:, :, :128], *GATED)))
for view in (in_boxes(bf16(96, 60), 32), in_boxes(bf16(1, 16, 60), *GATED)):
    try:
        TensorMaps(1).fill(0, at(80, view))
    except FluidError as error:
        print(str(error).partition(", innermost")[0], flush=True)
def counter(stream, capturing):
    torch.cuda.is_current_stream_capturing = lambda: capturing
    return grouped._counter(stream)
print("counters", [counter(*way) for way in ((1, 0), (2, 0), (1, 0), (1, 1), (1, 1), (2, 0))])
torch.cuda.is_current_stream_capturing = lambda: False
metadata = SimpleNamespace(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, shared=64)
launch = triton_launch._launch(0x77, 128, 64, ["*fp32"], 1, [])
without_context(launch, 3, 2, [0x7F0000001000], None)
print("widths", triton_launch._parameter_widths(0x77), flush=True)
device = CudaDriver(torch.device("cuda", 0))
event = device.event()
without_context(device.event)
without_context(device.record, event, 0x34)
without_context(device.wait, event, 0x34)
without_context(device.copy, 0x1000, 0x2000, 3, 0x34)
without_context(device.copy_block, 0x1000, 0x2000, 64, 16, 3, 0x34)
without_context(device.write, 0x1000, -1, 0x34)
without_context(device.wait_value, 0x1000, 5, 0x34)
device.copy_block(0x1000, 0x2000, 64, 64, 3, 0x34)  # a whole block is one copy
device.copy_block(0x1000, 0x2000, 64, 16, 1, 0x34)
try:
    device.copy(0x1000, 0x2000, 99, 0x34)
except FluidError as error:
    print(error, flush=True)
torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True
devices.current_stream = lambda: SimpleNamespace(cuda_stream=0x33)
print("capture", devices.current_capture())
"""

_TOLD = """\
current 0x9
mode 2
module CUBI
function 0x5 gather_forward
attribute 0x7 8 230400
mode 0
current 0x9
launch 0x7 130,1,1 384,1,1 230400 0x33 5000 1
current 0x9
map 1 of 0x10, swizzled 3: sizes 32 48 5 pitches 128 6144 box 64 128 1
map 2 of 0x20, swizzled 3: sizes 64 96 1 pitches 128 12288 box 64 32 1
map 3 of 0x20, swizzled 3: sizes 64 96 1 pitches 128 12288 box 64 64 1
map 4 of 0x20, swizzled 3: sizes 64 96 1 pitches 128 12288 box 64 128 1
map 5 of 0x30, swizzled 3: sizes 64 32 1 pitches 128 4096 box 64 64 1
mode 2
module CUBI
function 0x5 grouped_sums
attribute 0x8 8 230400
mode 0
maps 1 2 5 0 numbers 1 2 3 4 5 6 7 8 9 0
launch 0x8 130,1,1 384,1,1 230400 0x33 1 1
maps 1 2 5 0 numbers 1 2 3 4 5 6 7 8 9 0
launch 0x8 130,1,1 384,1,1 230400 0x33 1 1
current 0x9
map 6 of 0x40, swizzled 3: sizes 128 8 2 6 5 pitches 272 13056 2176 26112 box 64 8 2 8 1
map 7 of 0x50, swizzled 3: sizes 60 96 1 pitches 120 11520 box 64 32 1
cuTensorMapEncodeTiled of sizes [60, 96, 1]
map 8 of 0x50, swizzled 3: sizes 60 8 2 1 1 pitches 120 960 960 1920 box 64 8 2 8 1
cuTensorMapEncodeTiled of sizes [60, 8, 2, 1, 1]
counters [1, 2, 1, 1024, 1025, 2]
current 0x9
launch 0x77 3,2,1 128,1,1 64 0x33 7f0000001000 1
widths [8, 4]
create 2
current 0x9
create 2
current 0x9
record 0xb 0x34
current 0x9
wait 0x34 0xb 0
current 0x9
copy 1000 2000 3 0x34
current 0x9
block 1000 2000 64 16 3 0x34
current 0x9
write 0x34 1000 ffffffff 0
current 0x9
wanted 0x34 1000 5 0
copy 1000 2000 192 0x34
copy 1000 2000 16 0x34
cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)
capture (77, 51)
"""


def test_what_the_driver_is_handed(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    (tmp_path / "driver.c").write_text(_DRIVER)
    build = [COMPILER, "-x", "c", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    build += ["-o", "libcuda.so.1", "driver.c", "-ldl"]
    subprocess.run(build, check=True, cwd=tmp_path)
    done = run_code(_CALLS, str(tmp_path / "libcuda.so.1"), environment=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == _TOLD
