"""Calls of the CUDA driver: cuda.bindings' real functions, before a driver in C that writes down
what reaches it and keeps a current context per thread, as the real one does. The other tests
replace cuda.bindings.driver as a whole."""

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
  *f = (void *)7;
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
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned m, void *s, u64 **p, void **e)
  TELL(launch, "%p %u,%u,%u %u,%u,%u %u %p %llx %d", f, x, y, z, a, b, c, m, s, *p[0], e == 0)
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
from megatron_fluid.kernels.fused_gemm.launch import FUSED
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
